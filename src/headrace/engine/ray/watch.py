"""Follows the processes of a run on a Ray cluster: which have ended and how, which are started again, how far it is."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from operator import attrgetter
from time import monotonic
from typing import Any

from headrace.engine.base import RunProgress, Stoppable
from headrace.engine.local.fork_server import describe_end
from headrace.engine.ray.nodes import names_of
from headrace.engine.torchrun.failover import expendable_ranks
from headrace.errors import PeerLost, WorkerFailed
from headrace.spec.events import LAUNCHER, Notice
from headrace.worker.events import EventWriter
from headrace.worker.run_spec import RunSpec

_LOOK_EVERY_S = 0.25
_GRACE_S = 5.0
"""That the others have to end when a process has failed, and to end after rank 0."""
_AGAIN_S = 1.0
_IN_VAIN_S = 30.0
_IN_VAIN = 5
"""How often the process of one rank may be lost within that time."""


class RankWatch:
    """Follows the processes of one run; `start` has that of a rank begin, and returns what its agent will tell.

    Attributes:
        status: of rank 0, once it has ended in order.
    """

    def __init__(
        self,
        spec: RunSpec,
        agents: Sequence[Any],
        flag: Stoppable,
        start: Callable[[int], Any],
        progress: Callable[[RunProgress], None],
    ) -> None:
        self.status = ""
        self._spec, self._agents, self._flag = spec, agents, flag
        self._start, self._progress = start, progress
        self._elastic = spec.plan.min_workers > 0
        several = len({role.host for role in spec.plan.roles}) > 1
        self._expendable = expendable_ranks(spec.plan) if several or self._elastic else frozenset()
        self._waits = {start(rank): rank for rank in range(len(agents))}
        self._failure: WorkerFailed | None = None
        self._lost: dict[int, str] = {}
        self._accused: Mapping[str, Any] = {}
        self._deadline: float | None = None
        self._told = RunProgress(0, 0.0, 0)
        self._losses: dict[int, list[float]] = {rank: [] for rank in range(len(agents))}
        self._awaited: dict[Any, tuple[int, float]] = {}

    def follow(self) -> None:
        """Returns when the run is over; raises for the first that failed."""
        import ray

        stopped, looked = False, 0.0
        while self._waits and (self._deadline is None or monotonic() < self._deadline):
            done, _ = ray.wait(list(self._waits), timeout=_LOOK_EVERY_S)
            for reference in done:
                self._take(self._waits.pop(reference), reference)
            if self._flag.stop and not stopped:
                stopped = True
                # It tells the others, and all end after the same round; the first process of a rank does not join yet.
                told = min(self._waits.values(), key=lambda rank: (len(self._losses[rank]), rank), default=0)
                self._agents[told].stop.remote(int(signal.SIGINT))
            if monotonic() - looked > _LOOK_EVERY_S:
                looked = monotonic()
                self._take_back()
                self._progress(self._told)
        self._raise_failure()

    def _take(self, rank: int, reference: Any) -> None:
        """Takes what an agent tells of its process: how far it is, or how it has ended."""
        import ray

        try:
            told = ray.get(reference)
        except ray.exceptions.RayError:
            self._lose(rank, "its node, or its actor there, has ended")
            return
        if "code" in told:
            self._take_end(rank, told)
            return
        if "progress" in told:
            step, loss, examples = told["progress"]
            self._told = max(self._told, RunProgress(int(step), loss, int(examples)), key=attrgetter("step"))
        self._waits[self._agents[rank].watch.remote()] = rank

    def _take_end(self, rank: int, ended: Mapping[str, Any]) -> None:
        """Decides what the end of a process means: the run's, its restart, or nothing."""
        if "status" in ended:
            if rank == 0 or self._elastic:
                self.status = ended["status"]
                self._deadline = monotonic() + _GRACE_S
        elif ended["code"] < 0:
            self._lose(rank, describe_end(ended["code"]))
        elif ended.get("lost"):
            self._accused = self._accused or ended["lost"]
            self._begin_end()
        elif ended.get("error") in ("Replaced", "LeftBehind"):
            self._lose(rank, ended["message"])
        elif 0 in self._lost and self._losses[rank] and ended.get("error") == "RunFailed":
            pass  # it was to come back, and rank 0 has not let it in any more
        else:
            self._failure = self._failure or self._failed(rank, ended)
            self._begin_end()

    def _begin_end(self) -> None:
        self._deadline = self._deadline or monotonic() + _GRACE_S

    def _lose(self, rank: int, cause: str) -> None:
        losses = self._losses[rank]
        losses.append(monotonic())
        in_vain = len(losses) >= _IN_VAIN and losses[-1] - losses[-_IN_VAIN] < _IN_VAIN_S
        if self._elastic and rank == 0 and self._waits and self._deadline is None:
            # The others go on, and have no store any more by which another process could join them.
            self._lost[0] = cause
        elif self._deadline is not None or rank not in self._expendable or in_vain:
            again = f", the {_IN_VAIN}th time within {_IN_VAIN_S:.0f} s" if in_vain else ""
            self._lost.setdefault(rank, cause + again)
            self._begin_end()
        # The backup of a server takes its place by itself.
        elif self._spec.plan.role(rank).computes and 0 not in self._lost:
            self._await(rank)

    def _await(self, rank: int) -> None:
        """Asks for an agent that Ray restarts, perhaps on another node, if the cluster has room for it."""
        self._awaited[self._agents[rank].describe.remote()] = rank, monotonic()

    def _take_back(self) -> None:
        """Starts the processes of lost workers whose agents answer."""
        import ray

        for reference in ray.wait(list(self._awaited), timeout=0)[0] if self._awaited else ():
            rank, asked = self._awaited[reference]
            try:
                found = ray.get(reference)
            except ray.exceptions.RayError:
                # Ray has not noticed yet that the node is gone, or does not restart the agent yet.
                if monotonic() - asked > _AGAIN_S:
                    del self._awaited[reference]
                    self._await(rank)
                continue
            del self._awaited[reference]
            self._start_again(rank, names_of(ray.nodes())[found["node"]])

    def _start_again(self, rank: int, name: str) -> None:
        """Starts a lost worker's process on the node that Ray has chosen."""
        was = self._spec.plan.role(rank).host
        mates = sum(role.host == was for role in self._spec.plan.roles)
        if self._elastic and name != was and mates > 1:
            return  # the workers of one node share its memory
        self._waits[self._start(rank)] = rank
        if name != was:
            with closing(EventWriter(self._spec.run_dir, LAUNCHER, self._spec.started)) as events:
                text = f"rank {rank} was on {was} and is started again on {name}"
                events.write(Notice(LAUNCHER, events.now(), text))

    def _failed(self, rank: int, ended: Mapping[str, Any]) -> WorkerFailed:
        plan = self._spec.plan
        cause = f"exit code {ended['code']} without an error of its own (os._exit?); the end of its log follows"
        shown = ended["log"]
        if "error" in ended:
            cause, shown = f"{ended['error']}: {ended['message']}", ended["traceback"]
        code = ended.get("exit_code", 1)
        return WorkerFailed(rank, plan.role(rank).host, cause, shown, code, plan.part_of(rank))

    def _raise_failure(self) -> None:
        plan = self._spec.plan
        if self.status:
            return
        if self._failure:
            raise self._failure
        for rank, cause in self._lost.items():
            raise PeerLost(rank, plan.role(rank).host, cause, plan.part_of(rank))
        if self._accused:
            rank = self._accused["rank"]
            raise PeerLost(rank, self._accused["host"], self._accused["cause"], plan.part_of(rank))
        raise PeerLost(0, plan.role(0).host, "it has not told how it ended")
