"""Follows the processes of a run on a Ray cluster: which have ended and how, which are started again, how far it is."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from time import monotonic
from typing import Any

from headrace.engine.base import LEFT, RunProgress, Stoppable
from headrace.engine.local.fork_server import describe_end, unsaid
from headrace.engine.local.scaling import ListedWorker, ScaleRequests, changed_workers
from headrace.engine.ray.nodes import names_of, require_versions
from headrace.engine.torchrun.failover import expendable_ranks
from headrace.errors import PeerLost, UnfitMachine, UsageError, WorkerFailed
from headrace.spec.events import Notice
from headrace.worker.events import write_for_launcher
from headrace.worker.run_spec import RunSpec

_LOOK_EVERY_S = 0.25
_AGAIN_S = 1.0
_GRACE_S = 5.0
"""That the others have to end when a process has failed, and to end after rank 0."""
_IN_VAIN_S = 30.0
_IN_VAIN = 5
"""How often the process of one rank may be lost within that time."""


class RankReturns:
    """Waits for what lost ranks need to be started again.

    The store by which a process joins is rank 0's. Where that is lost and the others go on, the rank that leads them
    serves one of its own, and its process tells the address.
    """

    def __init__(self, agents: Sequence[Any]) -> None:
        self._agents = agents
        self._asked: dict[Any, tuple[int, float]] = {}
        self._described: dict[int, Mapping[str, Any]] = {}
        self._leader: int | None = 0
        self._store = ""

    def wanted(self) -> set[int]:
        """Returns the ranks that are waited for."""
        return {rank for rank, _ in self._asked.values()} | self._described.keys()

    def want(self, rank: int) -> None:
        """Begins to wait for a rank's agent: Ray restarts it, perhaps on another node, if the cluster has room."""
        self._asked[self._agents[rank].describe.remote()] = rank, monotonic()

    def lose(self, rank: int) -> None:
        """Takes notice that the process of a rank is lost; without the one that serves the store none can join."""
        if rank == self._leader:
            self._leader = None

    def lead(self, rank: int, store: str) -> None:
        """Takes notice that a rank serves the store."""
        self._leader, self._store = rank, store

    def ready(self) -> Iterator[tuple[int, Mapping[str, Any], str]]:
        """Yields a rank that can be started now, its node's description, and the store's address; "" for rank 0's."""
        import ray

        for reference in ray.wait(list(self._asked), timeout=0)[0] if self._asked else ():
            rank, asked = self._asked[reference]
            try:
                self._described[rank] = ray.get(reference)
            except ray.exceptions.RayError:
                # Ray has not noticed yet that the node is gone, or does not restart the agent yet.
                if monotonic() - asked > _AGAIN_S:
                    del self._asked[reference]
                    self.want(rank)
                continue
            del self._asked[reference]
        while self._described and self._leader is not None:
            rank, described = self._described.popitem()
            yield rank, described, self._store


class RankWatch:
    """Follows the processes of one run.

    `start` takes a rank, the store to join at ("" for rank 0's), the node and the GPU ("" for the plan's), has the
    process begin, and returns what its agent will tell. `write_to` takes a rank, and the folder that its process writes
    to. `hosts` are the names of the plan's nodes, by id.

    Attributes:
        status: of rank 0, once it has ended in order.
    """

    def __init__(
        self,
        spec: RunSpec,
        agents: Sequence[Any],
        flag: Stoppable,
        start: Callable[[int, str, str, str], Any],
        progress: Callable[[RunProgress], None],
        write_to: Callable[[int, str], object],
        hosts: Mapping[str, str],
    ) -> None:
        self.status = ""
        self._spec, self._agents, self._flag = spec, agents, flag
        self._start, self._progress, self._write_to = start, progress, write_to
        self._hosts = hosts
        self._returns = RankReturns(agents)
        self._elastic = spec.plan.min_workers > 0
        several = len({role.host for role in spec.plan.roles}) > 1
        self._expendable = expendable_ranks(spec.plan) if several or self._elastic else frozenset()
        self._waits = {start(rank, "", "", ""): rank for rank in range(len(agents))}
        self._starts = [1] * len(agents)
        self._stopped: int | None = None
        self._failure: WorkerFailed | None = None
        self._refused: dict[int, WorkerFailed] = {}
        self._lost: dict[int, str] = {}
        self._accused: Mapping[str, Any] = {}
        self._deadline: float | None = None
        self._told = RunProgress(0, None, 0)
        self._losses: dict[int, list[float]] = {rank: [] for rank in range(len(agents))}
        self._members: set[int] = set()
        self._leaving: set[int] = set()
        self._requests = ScaleRequests(spec.run_dir) if self._elastic else None

    def follow(self) -> None:
        """Returns when the run is over; raises for the first that failed."""
        import ray

        looked = 0.0
        while self._waits and (self._deadline is None or monotonic() < self._deadline):
            done, _ = ray.wait(list(self._waits), timeout=_LOOK_EVERY_S)
            for reference in done:
                self._take(self._waits.pop(reference), reference)
            if self._flag.stop and self._stopped is None and self._waits:
                # It tells the others, and all end after the same round; the first process of a rank does not join yet.
                self._stopped = min(self._waits.values(), key=lambda rank: (self._is_outside(rank), rank))
                self._agents[self._stopped].stop.remote(int(signal.SIGINT))
            if monotonic() - looked > _LOOK_EVERY_S:
                looked = monotonic()
                if self._deadline is None:
                    self._take_back()
                if self._requests:
                    self._requests.look(self._change, self._states)
                self._progress(self._told)
        self._raise_failure()

    def _take(self, rank: int, reference: Any) -> None:
        """Takes what an agent tells of its process: how far it is, or how it has ended."""
        import ray

        try:
            told = ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            self._lose(rank, f"its actor has raised {error.cause!r}")
            return
        except ray.exceptions.RayError:
            self._lose(rank, "its node, or its actor there, has ended")
            return
        if "folder" in told:
            self._write_to(rank, told["folder"])
        if "code" in told:
            self._take_end(rank, told)
            return
        if "progress" in told:
            step, loss, examples = told["progress"]
            self._told = max(self._told, RunProgress(int(step), loss, int(examples)), key=attrgetter("step"))
        if told.get("trains"):
            self._members.add(rank)
        if told.get("store"):
            self._returns.lead(rank, told["store"])
        self._waits[self._agents[rank].watch.remote()] = rank

    def _take_end(self, rank: int, ended: Mapping[str, Any]) -> None:
        """Decides what the end of a process means: the run's, its restart, or nothing."""
        outside = self._is_outside(rank)
        in_vain = ended.get("error") == "RunFailed" or (self._elastic and ended.get("lost"))
        if ended.get("status") == LEFT:
            self._part(rank)
        elif "status" in ended:
            if rank == 0 or self._elastic:
                self.status = ended["status"]
                self._deadline = monotonic() + _GRACE_S
        elif ended["code"] < 0:
            self._lose(rank, describe_end(ended["code"]))
        elif outside and in_vain:
            if self._deadline is None and not self._in_vain(rank):
                self._returns.want(rank)
        elif ended.get("lost"):
            self._accused = self._accused or ended["lost"]
            self._begin_end()
        elif ended.get("error") in ("Replaced", "LeftBehind"):
            self._lose(rank, ended["message"])
        elif outside and ended.get("unpacked") is False:
            # Its node may lack what the others have; they go on. If that ended them, too, it is the cause.
            self._refused[rank] = failure = self._failed(rank, ended)
            self._note(f"rank {rank} cannot come back: {failure.cause}")
        else:
            self._failure = self._failure or self._failed(rank, ended)
            self._begin_end()

    def _begin_end(self) -> None:
        self._deadline = self._deadline or monotonic() + _GRACE_S

    def _is_outside(self, rank: int) -> bool:
        """Whether a process has come back and has not joined the others yet: then it speaks for itself alone."""
        return self._starts[rank] > 1 and rank not in self._members

    def _part(self, rank: int) -> None:
        """Takes notice that a rank has no process that is one of the run's."""
        self._members.discard(rank)
        self._leaving.discard(rank)
        self._returns.lose(rank)
        if rank == self._stopped:
            self._stopped = None

    def _in_vain(self, rank: int) -> bool:
        """Counts a loss; returns whether the process of this rank is lost too often to be started again."""
        losses = self._losses[rank]
        losses.append(monotonic())
        return len(losses) >= _IN_VAIN and losses[-1] - losses[-_IN_VAIN] < _IN_VAIN_S

    def _lose(self, rank: int, cause: str) -> None:
        self._part(rank)
        in_vain = self._in_vain(rank)
        # Workers in lockstep go on without rank 0 by themselves, if there are others.
        expendable = rank in self._expendable or (self._elastic and rank == 0 and bool(self._waits))
        if self._deadline is not None or not expendable or in_vain:
            again = f", the {_IN_VAIN}th time within {_IN_VAIN_S:.0f} s" if in_vain else ""
            self._lost.setdefault(rank, cause + again)
            self._begin_end()
        else:
            self._returns.want(rank)

    def _take_back(self) -> None:
        """Starts the processes of lost workers that can join the others."""
        import ray

        for rank, described, store in self._returns.ready():
            # Another node may have a name of the plan's by now, or have had it before.
            names = {**names_of(ray.nodes()), **self._hosts}
            try:
                require_versions([described], names)
            except UnfitMachine as error:
                self._note(f"rank {rank} is not started again: {error}")
                continue
            self._start_again(rank, names[described["node"]], store, ",".join(described["gpus"]))

    def _start_again(self, rank: int, name: str, store: str, gpus: str) -> None:
        """Starts a lost worker's process on the node, and with the GPU, that Ray has chosen."""
        was = self._spec.plan.role(rank).host
        mates = sum(role.host == was for role in self._spec.plan.roles)
        if self._elastic and name != was and mates > 1:
            why = f"it was one of {mates} that share the memory of {was}, and Ray has room for it on {name}"
            self._note(f"rank {rank} is not started again: {why}")
            return
        self._waits[self._start(rank, store, name if name != was else "", gpus)] = rank
        self._starts[rank] += 1
        if name != was:
            self._note(f"rank {rank} was on {was} and is started again on {name}")

    def _states(self) -> list[ListedWorker]:
        """Returns what each worker does, for `headrace workers list`."""
        found, running, wanted = [], set(self._waits.values()), self._returns.wanted()
        for rank in range(self._spec.plan.workers):
            state = "leaves" if rank in self._leaving else "trains" if rank in self._members else "begins"
            if rank not in running:
                state = "waits for a node" if rank in wanted else "is gone"
            found.append(ListedWorker(rank, self._spec.plan.role(rank).host, self._starts[rank] - 1, state))
        return found

    def _change(self, count: int) -> str:
        """Starts so many workers that are gone, or below 0 asks some to leave; returns what happens."""
        states = {each.rank: each.state for each in self._states()}
        gone = [rank for rank, state in states.items() if state == "is gone"]
        stay = [rank for rank, state in states.items() if state == "trains"]
        others = [rank for rank, state in states.items() if state in ("begins", "waits for a node")]
        if self._deadline is not None:
            raise UsageError("no workers can join or leave: this run comes to its end")
        most = f"{len(states)}, as many as it has reserved places for, and {len(stay)} train now"
        ranks, text = changed_workers(count, stay, gone, self._spec.plan.min_workers, most, len(others))
        for rank in ranks:
            if count > 0:
                self._returns.want(rank)
            else:
                self._agents[rank].leave.remote()
                self._leaving.add(rank)
        self._note(text)
        return text

    def _note(self, text: str) -> None:
        write_for_launcher(self._spec, Notice, text)

    def _failed(self, rank: int, ended: Mapping[str, Any]) -> WorkerFailed:
        plan = self._spec.plan
        cause, remedy = unsaid(rank, ended["code"])
        shown = ended["log"]
        if "error" in ended:
            remedy = ""
            cause, shown = f"{ended['error']}: {ended['message']}", ended["traceback"]
        code = ended.get("exit_code", 1)
        return WorkerFailed(rank, plan.role(rank).host, cause, shown, code, plan.part_of(rank)).with_remedy(remedy)

    def _raise_failure(self) -> None:
        plan = self._spec.plan
        if self.status:
            return
        if self._failure:
            raise self._failure
        if self._accused.get("rank") in self._refused:
            raise self._refused[self._accused["rank"]]
        for rank, cause in self._lost.items():
            raise PeerLost(rank, plan.role(rank).host, cause, plan.part_of(rank))
        if self._accused:
            rank = self._accused["rank"]
            raise PeerLost(rank, self._accused["host"], self._accused["cause"], plan.part_of(rank))
        raise PeerLost(0, plan.role(0).host, "it has not told how it ended")
