"""simulate: what a strategy takes on a cluster, from numbers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace.devices import HOST
from headrace.errors import InfeasiblePlan, UsageError
from headrace.policies.behaviour import Behaviour, GradientSum, RingOfTokens, Slices, Stages
from headrace.prediction.assumptions import FASTEST_TCP_BYTES_PER_S, Assumptions
from headrace.prediction.bands import BANDS, Band
from headrace.prediction.cloud import cluster_of
from headrace.prediction.plausibility import doubtful_units
from headrace.prediction.profiling.origin import require_usable
from headrace.prediction.simulation.behaviour import behave
from headrace.prediction.simulation.event_files import write
from headrace.prediction.simulation.failures import Reliability, reliability
from headrace.prediction.simulation.memory import device_bytes, limit_bytes, require_fit, server_bytes
from headrace.prediction.simulation.scene import Scene, place, spread_of
from headrace.prediction.simulation.slices.steps import slices_note
from headrace.prediction.simulation.slices.tokens import EXPERTS_NOTE
from headrace.prediction.simulation.timeline import Timeline
from headrace.report.format import percent, plural
from headrace.report.predicted import PredictedRun
from headrace.spec.cluster import Cluster, Host
from headrace.spec.model import ModelSpec
from headrace.spec.options import require_count
from headrace.strategies import Strategy, resolve
from headrace.strategies.checks import COUNTS
from headrace.strategies.strategy import describe_options

_BUSY = 0.9
"""From this part of the time on, a server's card or core is what workers wait for."""


@dataclass(frozen=True)
class Prediction:
    """What a simulated run takes.

    Attributes:
        strategy, workers, servers: what was simulated.
        global_batch_size: examples of a round.
        examples_per_s: of all workers together.
        bottleneck: in words, what limits the rate.
        step_s: of a round, on average.
        shares: where the devices' time goes: the name of a part to its share of 1.
        moved_bytes: that a worker sends and receives in a step.
        memory_bytes: that the fullest worker holds, without the runtime itself; `server_bytes` of a server.
        speed_up: examples a second, over those of one device that works alone on the whole batch.
        efficiency: examples a second, over those of as many devices that each work alone on their part of a batch.
        reliability: what failures do; None if the hosts never fail.
        notes: what was assumed, and what a reader must know.
        band: between which factors of the rate a measured one is expected.
        timeline: what each process did when.

    Examples:
        >>> predicted = hr.simulate("model.toml", "cluster.toml", hr.ParameterServer(workers=16, servers=1))
        >>> predicted.bottleneck.startswith("the server's network card")
        True
    """

    strategy: Strategy
    workers: int
    servers: int
    global_batch_size: int
    step_s: float
    examples_per_s: float
    speed_up: float
    efficiency: float
    shares: Mapping[str, float]
    bottleneck: str
    moved_bytes: float
    memory_bytes: int
    server_bytes: int
    reliability: Reliability | None
    notes: tuple[str, ...]
    band: Band
    timeline: Timeline = field(repr=False)

    @property
    def useful_examples_per_s(self) -> float:
        """Examples a second that count, after what failures cost."""
        return self.examples_per_s * (self.reliability.useful if self.reliability else 1.0)

    def save(self, run_dir: Path | str) -> None:
        """Keeps it in the directory of a run, whose report then shows it beside what was measured.

        Raises UsageError where it cannot be written.
        """
        seconds = {name: share * self.step_s for name, share in self.shares.items()}
        PredictedRun(
            examples_per_s=self.examples_per_s,
            step_s=self.step_s,
            compute_s=seconds.get("computing", 0.0) + seconds.get("bubble", 0.0),
            exchange_s=seconds.get("network", 0.0) + seconds.get("waiting for others", 0.0),
            update_s=seconds.get("update", 0.0),
            moved_bytes_per_step=self.moved_bytes * self.workers,
            memory_bytes=self.memory_bytes,
        ).save(Path(run_dir))

    @property
    def staleness(self) -> float | None:
        """Mean staleness of an update; None where no gradient is stale."""
        counted = self.timeline.staleness
        updates = sum(counted.values())
        return sum(lag * count for lag, count in counted.items()) / updates if updates else None


def simulate(
    model: ModelSpec | Path | str,
    cluster: Cluster | Path | str,
    strategy: Strategy | str,
    *,
    global_batch_size: int | None = None,
    accumulate: int = 1,
    assumptions: Assumptions | None = None,
    run_dir: Path | str | None = None,
    force: bool = False,
) -> Prediction:
    """Runs a strategy in virtual time on machines that need not be there.

    The schedules, shards, leases and policies are those of real runs; only times are computed.

    Args:
        model: a profile, a file of one, or one that a person has written.
        cluster: the machines, their file, or so many of a cloud's: "aws-g5.xlarge:4".
        strategy: as for `fit`; without a number of workers it takes all devices of the cluster.
        global_batch_size: examples of a round; None for the profile's largest batch on every replica.
        accumulate: micro-batches that a worker makes of its share, as `Options.accumulate`.
        run_dir: where the events of the run are to be written, as a real run writes them, for `headrace report`.
        force: uses a profile of other versions or of another kind of device, and notes it.
        assumptions: what neither file says; None for `Assumptions()`.

    Raises:
        UsageError: something that is needed is missing, or impossible; with the field and its unit.
        InfeasiblePlan: the cluster has too few devices, or a device too little memory, with the numbers.

    Examples:
        >>> predicted = hr.simulate("model.toml", "cluster.toml", hr.Mirrored(workers=16))
        >>> 0.5 < predicted.efficiency <= 1
        True
    """
    model = model if isinstance(model, ModelSpec) else ModelSpec.load(model)
    cluster = cluster_of(cluster)
    differ = require_usable(model, cluster, force)
    chosen = counted(resolve(strategy), cluster)
    require_count("accumulate", accumulate)
    scene = scene_of(model, cluster, chosen, global_batch_size, assumptions or Assumptions())
    scene = replace(scene, accumulate=accumulate)
    needed = device_bytes(scene)
    require_fit(chosen.name, scene, needed)
    timeline = behave(scene)
    if run_dir is not None:
        write(Path(run_dir), chosen, scene, timeline, needed)
    prediction = predicted(chosen, scene, timeline, needed)
    return replace(prediction, notes=(*differ, *doubtful_units(model, cluster), *prediction.notes))


def counted(strategy: Strategy, cluster: Cluster) -> Strategy:
    """Returns a strategy with its number of workers: as many as the cluster has devices, where it has none."""
    options = describe_options(strategy)
    option = next((name for name in COUNTS if name in options), None)
    if option is None or options[option] is not None:
        return strategy
    servers = options.get("servers", 0) if options.get("via", "server") == "server" else 0
    assert isinstance(servers, int)
    if cluster.ranks is not None:
        devices = cluster.ranks - servers
    else:
        devices = cluster.accelerators if cluster.device != HOST else len(cluster.hosts)
    if devices < 1:
        raise UsageError(f"{strategy.name} does not say how many {option} it has, and the cluster has no device")
    return replace(strategy, **{option: devices})  # type: ignore[type-var]


def scene_of(
    model: ModelSpec,
    cluster: Cluster,
    strategy: Strategy,
    examples: int | None,
    assumptions: Assumptions,
    memo: dict[Any, Any] | None = None,
) -> Scene:
    """Returns the scene of a strategy with a number of workers; `memo` is that of others of this model and cluster."""
    counts = strategy.processes()
    among = replace(cluster, hosts=cluster.hosts[:1]) if counts.one_host and cluster.ranks is None else cluster
    hosts, servers = place(among, counts.workers, counts.servers)
    if counts.one_host and len({host.name for host in hosts}) > 1:
        raise InfeasiblePlan(f"{strategy.name} works on one host, and its {counts.workers} workers are on several")
    behaviour = strategy.behave(counts.workers)
    if behaviour.not_simulated:
        raise UsageError(behaviour.not_simulated)
    replicas = counts.workers // behaviour.devices
    if examples is None:
        if model.compute is None:
            raise UsageError("the model has no measured batch; give global_batch_size (--global-batch-size)")
        examples = model.compute.batches[-1].examples * replicas
    if examples < replicas:
        raise UsageError(
            f"a global batch of {plural(examples, 'example')} leaves some of {replicas} replicas without one; give a "
            f"global_batch_size of at least {replicas}"
        )
    known = {} if memo is None else memo
    return Scene(model, cluster, hosts, servers, examples, assumptions, behaviour, memo=known)


def predicted(strategy: Strategy, scene: Scene, timeline: Timeline, needed: int) -> Prediction:
    """Returns what a timeline says; the fullest worker needs `needed` bytes."""
    ranks = scene.behaviour.devices
    rounds = len(timeline.step) / scene.workers if timeline.rounds is None else timeline.rounds
    examples = scene.examples * rounds
    rate = examples / timeline.seconds
    shares_of = scene.shares()
    alone = {share: [share / step.total_s for step in scene.steps(share)] for share in set(shares_of)}
    apart = sum(alone[shares_of[rank // ranks]][rank] for rank in range(scene.workers))
    shares = where_time_goes(timeline)
    assumed = scene.assumptions
    used = {host.name: host for host in (*scene.hosts, *scene.servers)}
    return Prediction(
        strategy=strategy,
        workers=scene.workers,
        servers=len(scene.servers),
        global_batch_size=scene.examples,
        step_s=scene.examples / rate,
        examples_per_s=rate,
        speed_up=rate * _alone_s(scene) / scene.examples,
        efficiency=rate / apart,
        shares=shares,
        bottleneck=bottleneck(shares, timeline.server_busy),
        moved_bytes=timeline.moved_bytes,
        memory_bytes=needed,
        server_bytes=server_bytes(scene) if scene.servers else 0,
        reliability=reliability(list(used.values()), assumed.checkpoint_s, assumed.restart_s),
        notes=(*timeline.notes, *assumed_notes(scene)),
        band=band_of(scene),
        timeline=timeline,
    )


def _alone_s(scene: Scene) -> float:
    """Returns what a step of the whole batch takes one device that works alone; of their mean speed where they differ.

    What does not fit its memory at once is as many micro-batches as the replicas have together.
    """
    rates = []
    for host in {host.name: host for host in scene.hosts}.values():
        alone = replace(scene, hosts=(host,), behaviour=Behaviour(), accumulate=1)
        limit = limit_bytes(host, alone)
        if limit and device_bytes(alone) > limit:
            alone = replace(alone, accumulate=scene.accumulate * scene.replicas)
        rates.append(1 / alone.step(host, scene.examples).total_s)
    return len(rates) / sum(rates)


def band_of(scene: Scene) -> Band:
    """Returns how far off predictions of such a kind were; twice as far where the profile's machine was not idle."""
    exchange, division = scene.behaviour.exchange, scene.behaviour.division
    summed = isinstance(exchange, GradientSum) and exchange.parts == 1
    kind = "other"
    if scene.cluster.device == HOST:
        tokens = isinstance(division, Slices | RingOfTokens) or scene.behaviour.experts > 1
        kind = "other" if tokens else "cpu"
    elif isinstance(division, Stages) and division.slices == 1:
        kind = "pipeline"
    elif division is None and (summed or exchange is None):
        varied = scene.model.compute is not None and scene.model.compute.varied
        kind = "hosts" if len(scene.crowds) > 1 else "varied" if varied else "host"
    band = BANDS[kind]
    return band.wider(2, "measured on a machine that was not idle") if scene.model.origin.get("disturbed") else band


def assumed_notes(scene: Scene) -> tuple[str, ...]:
    """Returns a note of what the prediction depends on and no file says, with its values, or none."""
    assumed, cluster, said = scene.assumptions, scene.cluster, []
    profile, device = scene.model.compute, cluster.device
    if assumed.spread is None and (profile is None or profile.spread is None):
        said.append(f"steps that vary by {percent(spread_of(scene.model, assumed))} (spread)")
    division = scene.behaviour.division
    slices = division.slices if isinstance(division, Stages) else division.devices if division else 1
    if scene.behaviour.experts > 1:
        said.append(EXPERTS_NOTE)
    if slices > 1 and not isinstance(division, RingOfTokens) and (note := slices_note(scene.model, slices)):
        said.append(note)
    counts = Counter(host.name for host in (*scene.hosts, *scene.servers))
    if scene.behaviour.exchange is None and scene.behaviour.division is None:
        counts = Counter()
    if max(counts.values(), default=0) > 1:
        if any(host.bus_bytes_per_s == Host.bus_bytes_per_s for host in scene.hosts):
            said.append(f"{Host.bus_bytes_per_s / 1e9:g} GB/s inside a host (bus_gb_per_s)")
        elif device != HOST and assumed.bus_share is None:
            said.append(f"{percent(assumed.share_of_bus(device))} of a host's bus (bus_share)")
    if len(counts) > 1 and not cluster.links:
        rate = cluster.link_bytes_per_s
        if rate == Cluster.link_bytes_per_s:
            said.append("1 Gbit/s between hosts, which [network] changes")
        if not cluster.link_latency_s and assumed.latency_s is None:
            said.append(f"a latency of {1e6 * assumed.latency_of_link(device):g} us (latency_ms)")
        if device != HOST and not cluster.rdma and assumed.tcp_bytes_per_s < rate <= FASTEST_TCP_BYTES_PER_S:
            said.append(
                f"{assumed.tcp_bytes_per_s * 8 / 1e9:g} Gbit/s at most by TCP, where [network] has no rdma = true"
            )
    if device != HOST and len(scene.hosts) > 1:
        said.append(f"{assumed.memory_bytes_per_s / 1e9:g} GB/s of a device's memory (memory_bytes_per_s)")
    return (f"assumed: {'; '.join(said)}",) if said else ()


def where_time_goes(timeline: Timeline) -> dict[str, float]:
    """Returns the parts of the devices' time: computing, update, network, waiting for others, and bubbles."""
    whole = timeline.seconds * timeline.workers
    update = float(timeline.update_s.sum())
    computing = float(timeline.busy_s.sum()) - update
    bubble = max(0.0, float(timeline.compute_s.sum()) - computing)
    # The worker that waits least in a round waits for the network alone.
    order = np.argsort(timeline.step, kind="stable")
    _, first = np.unique(timeline.step[order], return_index=True)
    least = np.minimum.reduceat(timeline.exchange_s[order], first)
    counts = np.diff(np.append(first, len(order)))
    network = float((least * counts).sum())
    waiting = float(timeline.exchange_s.sum()) - network
    parts = {"computing": computing, "update": update, "network": network, "waiting for others": waiting}
    shares = {name: seconds / whole for name, seconds in {**parts, "bubble": bubble}.items() if seconds > 1e-9 * whole}
    rest = 1.0 - sum(shares.values())
    return {**shares, "other": rest} if rest > 0.005 else shares


def bottleneck(shares: Mapping[str, float], server_busy: Mapping[str, float]) -> str:
    """Returns what limits the speed, by name."""
    busiest = max(server_busy, key=lambda name: server_busy[name], default=None)
    if busiest is not None and server_busy[busiest] > _BUSY:
        what = "core" if busiest == "applying" else "network card"
        return f"the server's {what} ({busiest} {min(1.0, server_busy[busiest]):.0%} of the time)"
    lost = {name: share for name, share in shares.items() if name != "computing"}
    most = max(lost, key=lambda name: lost[name], default="computing")
    return "computing" if lost.get(most, 0.0) < 0.1 else f"{most} ({lost[most]:.0%} of the time)"
