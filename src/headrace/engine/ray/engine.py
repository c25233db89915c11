"""Runs the processes of a run on a Ray cluster: Ray starts, places and restarts them, and knows their nodes.

this process   plans, writes the run's first and last events, shows all
     │ Ray: the run's code and data, its secret, signals, how far it is
an actor a rank, `RankAgent`, on the node that Ray has chosen
     │ a pipe
a process a rank: what it is under any launcher; tensors go through headrace's own channels
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.devices import AUTO, GPU, HOST
from headrace.engine.base import Engine, RunProgress, orderly_interrupts
from headrace.engine.ray.agent import RankAgent
from headrace.engine.ray.connection import connect, naming_runtime_env
from headrace.engine.ray.nodes import RankPlace, arrange, cluster_of, names_of, require_versions
from headrace.engine.ray.placement import PLACEMENTS, BundleGroup, bundle_groups, place
from headrace.errors import UnfitMachine, UsageError
from headrace.spec.cluster import Cluster
from headrace.worker.run_spec import RunSpec

if TYPE_CHECKING:
    from headrace.strategies.strategy import Strategy

_BEGIN_S = 60.0
_CLOSE_S = 5.0


@dataclass
class _Placed:
    """What a run has on the cluster: reserved bundles, and an agent a rank with its place."""

    encrypt: bool
    reserved: list[Any] = field(default_factory=list)
    agents: list[Any] = field(default_factory=list)
    places: list[RankPlace] = field(default_factory=list)


@dataclass
class _Flag:
    stop: int = 0


class RayEngine(Engine):
    """Has Ray start the workers on the nodes of a cluster, one actor a rank.

    Args:
        address: of the cluster; "auto" for that of RAY_ADDRESS, or of this machine. A process that is connected to a
            cluster stays connected to it.
        cpus_per_worker: CPUs that a worker reserves, and threads that it computes with; None reserves one, and
            computes with the node's cores, divided by the run's processes there.
        gpus_per_worker: 1 for a GPU each; 0.5 for workers of which two share one, and exchange through host memory.
        resources: what a worker reserves besides, by Ray's names.
        placement: of the workers: "PACK", "SPREAD", "STRICT_PACK" or "STRICT_SPREAD"; None as the strategy needs it.
        runtime_env: packages and files that nodes need, as Ray describes them.
        start_timeout_s: how long to wait for resources that others use.

    Raises:
        UsageError: a value is none of these.

    Examples:
        >>> import ray
        >>> _ = ray.init(num_cpus=2, include_dashboard=False)
        >>> hr.fit(job, hr.Mirrored(workers=2), engine=hr.RayEngine()).status
        'ok'
        >>> ray.shutdown()
    """

    def __init__(
        self,
        address: str = "auto",
        *,
        cpus_per_worker: int | None = None,
        gpus_per_worker: float = 0,
        resources: Mapping[str, float] | None = None,
        placement: str | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        start_timeout_s: float = 60.0,
    ) -> None:
        if placement not in (None, *PLACEMENTS):
            raise UsageError(f"placement is one of {', '.join(sorted(PLACEMENTS))}, got {placement!r}")
        if not 0 <= gpus_per_worker <= 1:
            raise UsageError(
                f"a worker computes on one GPU, or on a part of one, gpus_per_worker is from 0 to 1, got "
                f"{gpus_per_worker!r}"
            )
        if cpus_per_worker is not None and cpus_per_worker < 1:
            raise UsageError(f"cpus_per_worker must be at least 1, got {cpus_per_worker!r}")
        self._address, self._runtime_env = address, runtime_env
        self._cpus, self._gpus, self._placement = cpus_per_worker, gpus_per_worker, placement
        self._resources = dict(resources or {})
        self._start_timeout_s = start_timeout_s
        self._busy = threading.Lock()
        self._placed: _Placed | None = None
        self._connection = ExitStack()

    def cluster(self, strategy: Strategy, device: str | Sequence[str], encrypt: bool) -> Cluster:
        if device not in (AUTO, HOST, GPU):
            raise UsageError(
                f"RayEngine reserves CPUs or GPUs for the workers, device is {AUTO!r}, {HOST!r} or {GPU!r}, got "
                f"{device!r:.60}; another device, or one for each worker, needs other engines"
            )
        if not self._busy.acquire(blocking=False):
            raise UsageError("this engine runs something already; wait for its end, or give each run an engine")
        self._placed = _Placed(encrypt)
        try:
            return self._place(strategy, device, self._placed)
        except BaseException:
            self.release()
            raise

    def _place(self, strategy: Strategy, device: str | Sequence[str], placed: _Placed) -> Cluster:
        own_env = connect(self._address, self._runtime_env, self._connection)
        # Not before, because it may not be installed.
        import ray

        on_gpus = device == GPU or (device == AUTO and self._gpus > 0)
        worker = {"CPU": self._cpus or 1, **({"GPU": self._gpus or 1} if on_gpus else {}), **self._resources}
        groups = bundle_groups(strategy.processes(), worker, self._placement)
        nodes = [node for node in ray.nodes() if node["Alive"]]
        names = names_of(nodes)
        sizes = dict(sorted((names[node["NodeID"]], node["Resources"]) for node in nodes))
        placed.reserved = place(groups, sizes, self._start_timeout_s)
        for group, reserved in zip(groups, placed.reserved, strict=True):
            with naming_runtime_env(own_env):
                placed.agents += _agents(group, reserved, own_env)
        told = _descriptions(placed.agents)
        require_versions(told, names)
        placed.places = arrange(told, names, ray.get_runtime_context().get_node_id(), groups[0].count)
        placed.agents = [placed.agents[each.agent] for each in placed.places]
        return cluster_of(placed.places, told, groups[0].count, self._cpus)

    def run(self, spec: RunSpec, progress: Callable[[RunProgress], None]) -> str:
        # Not before, because it imports torch.
        from headrace.engine.ray.run import RayRun, RunGauges

        assert self._placed
        run = RayRun(spec, self._placed.agents, self._placed.places, self._placed.encrypt)
        gauges, flag = RunGauges(spec), _Flag()

        def look(now: RunProgress) -> None:
            run.mirror.look()
            gauges.show(now)
            progress(now)

        with orderly_interrupts(flag) as interrupts:
            ended = run.follow(flag, look)
        status = interrupts.status(flag)
        return ended if status == "ok" else status

    def release(self) -> None:
        placed, self._placed = self._placed, None
        if placed is None:
            return
        self._busy.release()
        if not placed.reserved:
            # Not even Ray may be installed.
            return
        import ray
        from ray.util import remove_placement_group

        # Before they are killed, which leaves their folders; an agent whose node is lost does not answer.
        closed = [agent.close.remote() for agent in placed.agents]
        if closed:
            ray.wait(closed, num_returns=len(closed), timeout=_CLOSE_S)
        for agent in placed.agents:
            ray.kill(agent)
        for reserved in placed.reserved:
            remove_placement_group(reserved)

    def close(self) -> None:
        self.release()
        self._connection.close()


def _agents(group: BundleGroup, reserved: Any, runtime_env: Mapping[str, Any] | None) -> list[Any]:
    """Starts an actor for each bundle; Ray restarts it on another node if its own is lost."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    extra = {name: amount for name, amount in group.each.items() if name not in ("CPU", "GPU")}
    kind = ray.remote(RankAgent)
    return [
        kind.options(
            num_cpus=group.each.get("CPU", 0),
            num_gpus=group.each.get("GPU", 0),
            resources=extra,
            runtime_env=dict(runtime_env) if runtime_env else None,
            max_restarts=-1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(reserved, placement_group_bundle_index=index),
        ).remote()
        for index in range(group.count)
    ]


def _descriptions(agents: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Returns what the agents say of their nodes."""
    import ray

    try:
        told: list[Mapping[str, Any]] = ray.get([agent.describe.remote() for agent in agents], timeout=_BEGIN_S)
        return told
    except ray.exceptions.RuntimeEnvSetupError as error:
        raise UnfitMachine(f"a node cannot set up the runtime environment: {error}") from error
    except ray.exceptions.GetTimeoutError as error:
        raise UnfitMachine(
            f"an actor has not begun within {_BEGIN_S:g} s; `ray list actors` and the dashboard say what it waits for"
        ) from error
    except ray.exceptions.RayActorError as error:
        raise UnfitMachine(
            "an actor could not begin on its node, which needs the same headrace and torch as this process (install "
            f"them there, or name them in runtime_env): {str(error).strip().splitlines()[-1]}"
        ) from error
