"""How each strategy behaves in a simulation: from its options to the timeline of its workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import singledispatch

import numpy as np

from headrace.averaging.period import AutoPeriod, Measured, first_period, first_stretch, next_period, next_stretch
from headrace.errors import UsageError
from headrace.prediction.simulation.network import Way
from headrace.prediction.simulation.rounds import averaging, gossip, synchronous
from headrace.prediction.simulation.scene import DeviceStep, Scene
from headrace.prediction.simulation.served import ServerTerms, served
from headrace.prediction.simulation.staged import (
    PipelineTerms,
    gradient_bytes,
    one_step,
    require_enough,
    slowness,
    staged,
    stages_of,
)
from headrace.prediction.simulation.timeline import Timeline, on_devices, one_after_another
from headrace.spec.plan import StageCost
from headrace.strategies import (
    CentralStorage,
    Downpour,
    Gossip,
    Hybrid,
    Mirrored,
    OneDevice,
    ParameterAveraging,
    ParameterServer,
    Pipeline,
    Strategy,
    TensorParallel,
    Unconnected,
)
from headrace.transport.codec import BLOCK

_CODED = {"plain": 1.0, "bf16": 0.5, "int8": (1 + 4 / BLOCK) / 4}
"""Bytes on the wire as a part of those of float32; each block of int8 has a scale."""

FETCHES = "parameters are taken to be fetched with every push"
_DRIFT = "how far workers drift apart is not simulated: it would make the period shorter, if anything"


@singledispatch
def behave(strategy: Strategy, scene: Scene) -> Timeline:
    """Returns what the workers do; raises UsageError for a strategy that cannot be simulated."""
    raise UsageError(f"{strategy.name} cannot be simulated; give another strategy")


def device_steps(scene: Scene, replicas: int | None = None, by_speed: bool = False) -> list[DeviceStep]:
    """Returns what a step of each worker takes, or of each replica's slowest."""
    count = replicas or scene.workers
    ranks = scene.workers // count
    shares = scene.shares(count, by_speed)
    known: dict[tuple[str, int], DeviceStep] = {}
    found = []
    for replica, share in enumerate(shares):
        own = scene.hosts[replica * ranks : (replica + 1) * ranks]
        for host in own:
            if (host.name, share) not in known:
                known[host.name, share] = scene.step(host, share)
        found.append(max((known[host.name, share] for host in own), key=lambda step: step.forward_s + step.backward_s))
    return found


def _coded(way: Way, codec: str) -> Way:
    return replace(way, s_per_byte=way.s_per_byte * _CODED[codec], moved=way.moved * _CODED[codec])


@behave.register(OneDevice)
def _(strategy: OneDevice, scene: Scene) -> Timeline:
    return synchronous(scene, device_steps(scene), Way(), overlap=False)


@behave.register(Unconnected)
def _(strategy: Unconnected, scene: Scene) -> Timeline:
    return averaging(scene, device_steps(scene), Way(), scene.assumptions.steps, 0)


@behave.register(Mirrored)
def _(strategy: Mirrored, scene: Scene) -> Timeline:
    way = scene.network.all_reduce(scene.hosts, scene.assumptions.algorithm)
    several = len({host.name for host in scene.hosts}) > 1
    overlap = strategy.overlap and (several or scene.cluster.device != "cpu")
    steps = device_steps(scene, by_speed=strategy.balance == "speed")
    return synchronous(scene, steps, _coded(way, strategy.codec) if several else way, overlap)


@behave.register(CentralStorage)
def _(strategy: CentralStorage, scene: Scene) -> Timeline:
    way = scene.network.all_reduce(scene.hosts, "ring")
    steps = device_steps(scene, by_speed=strategy.balance == "speed")
    return synchronous(scene, steps, way, overlap=False, parts=scene.workers)


@behave.register(Gossip)
def _(strategy: Gossip, scene: Scene) -> Timeline:
    return gossip(scene, device_steps(scene), strategy.topology, strategy.period)


@behave.register(ParameterAveraging)
def _(strategy: ParameterAveraging, scene: Scene) -> Timeline:
    target = AutoPeriod() if isinstance(strategy.period, str) else strategy.period
    if strategy.via == "all_reduce":
        way = _coded(scene.network.all_reduce(scene.hosts, scene.assumptions.algorithm), strategy.codec)
        return averaging(scene, device_steps(scene), way, target, strategy.post_local)
    steps = device_steps(scene)
    patience_s = strategy.wait if isinstance(strategy.wait, float) else math.inf
    quickest_s = min((s.forward_s + s.backward_s + s.fixed_s + s.optimizer_s for s in steps), default=0.0)
    if patience_s < quickest_s:
        raise UsageError(
            f"wait={patience_s:g} s is shorter than one step, which takes {quickest_s:.3g} s: a worker that is a step "
            "behind would never be part of an average; wait longer, or use wait='all'"
        )
    terms = ServerTerms(
        strategy.policies(scene.workers), strategy.servers, local=True, fixed=strategy.wait == "all",
        optimizes=False, pushed=_CODED[strategy.codec], pulled=_CODED[strategy.pull_codec], patience_s=patience_s,
    )  # fmt: skip
    return _in_stretches(scene, steps, terms, target, strategy.post_local)


def _in_stretches(
    scene: Scene, steps: Sequence[DeviceStep], terms: ServerTerms, target: int | AutoPeriod, post_local: int
) -> Timeline:
    """Simulates workers that average through servers, and whose leases change their length at sync points alone.

    All workers meet there; the length is decided as real workers decide it. Drift is not known, and taken to allow any.
    """
    rounds, assumed = scene.assumptions.steps, scene.assumptions
    if isinstance(target, int) and not post_local:
        return served(scene, steps, replace(terms, span=target))
    period, done = first_period(target), 0
    found: list[Timeline] = []
    until, span = first_stretch(target, post_local, 0, rounds)
    while True:
        # The last lease before a sync point may be shorter.
        lengths = [(until - done) // span * span, (until - done) % span]
        for length in lengths:
            if length:
                seed = assumed.seed + 1_000_003 * len(found)
                apart = replace(scene, assumptions=replace(assumed, steps=length, seed=seed))
                span = min(span, length)
                found.append(served(apart, steps, replace(terms, span=span)))
        if until >= rounds:
            break
        if isinstance(target, AutoPeriod) and until >= post_local:
            period = next_period(period, _measured(found[-1], span), target)
        done = until
        until, span = next_stretch(period, target, post_local, done, rounds)
    notes = (_DRIFT,) if isinstance(target, AutoPeriod) else ()
    joined = one_after_another(found)
    return replace(joined, notes=(*joined.notes, *notes))


def _measured(timeline: Timeline, span: int) -> Measured:
    """Returns what the workers have measured of leases of so many rounds."""
    lasts = timeline.exchange_s[timeline.step % span == span - 1]
    train_s = span * float((timeline.compute_s + timeline.update_s).max())
    return Measured(span, train_s, float(lasts.min()), 0.0)


@behave.register(ParameterServer)
def _(strategy: ParameterServer, scene: Scene) -> Timeline:
    return served(scene, device_steps(scene), server_terms(strategy, scene.workers))


@behave.register(Downpour)
def _(strategy: Downpour, scene: Scene) -> Timeline:
    timeline = served(scene, device_steps(scene), server_terms(strategy, scene.workers))
    if strategy.fetch_every == strategy.push_every:
        return timeline
    return replace(timeline, notes=(*timeline.notes, FETCHES))


def server_terms(strategy: ParameterServer | Downpour, workers: int) -> ServerTerms:
    """Returns how so many workers speak to servers."""
    pushed, pulled = _CODED[strategy.push_codec], _CODED[strategy.pull_codec]
    policies = strategy.policies(workers)
    if isinstance(strategy, Downpour):
        return ServerTerms(
            policies, strategy.servers, strategy.push_every, strategy.overlap, local=True,
            pushed=pushed, pulled=pulled, alone=strategy.warmstart_steps,
        )  # fmt: skip
    bounded = strategy.staleness_bound is not None and not strategy.backup_workers
    return ServerTerms(
        policies, strategy.servers, fixed=bounded, pushed=pushed, pulled=pulled, spare=strategy.backup_workers
    )


@behave.register(Pipeline)
def _(strategy: Pipeline, scene: Scene) -> Timeline:
    return _pipelined(strategy, scene, 1)


@behave.register(TensorParallel)
def _(strategy: TensorParallel, scene: Scene) -> Timeline:
    return on_devices(synchronous(scene, tensor_parallel_steps(scene, 1), Way(), overlap=False), scene.workers)


@behave.register(Hybrid)
def _(strategy: Hybrid, scene: Scene) -> Timeline:
    outer, inner = strategy.outer, strategy.inner
    if isinstance(outer, ParameterServer | Downpour):
        return _served_replicas(outer, inner, scene)
    if not isinstance(outer, Mirrored | ParameterAveraging) or (
        isinstance(outer, ParameterAveraging) and not isinstance(outer.period, int)
    ):
        raise UsageError(
            f"a hybrid whose outer strategy is {outer.name} cannot be simulated; use hr.Mirrored(...), "
            "hr.ParameterAveraging(...) with a number of rounds as its period, hr.ParameterServer(...) or "
            "hr.Downpour(...)"
        )
    devices = inner.processes().workers
    replicas = scene.workers // devices
    every = outer.period if isinstance(outer, ParameterAveraging) else 1
    assert isinstance(every, int)
    if isinstance(inner, Pipeline):
        return _pipelined(inner, scene, replicas, every)
    steps = tensor_parallel_steps(scene, replicas)
    firsts = scene.hosts[::devices]
    side_by_side = sum(host.name == firsts[0].name for host in scene.hosts[:devices])
    way = scene.network.all_reduce(firsts, scene.assumptions.algorithm, side_by_side)
    # Each device exchanges its slice with those that hold the same.
    own = replace(way, s_per_byte=way.s_per_byte / devices, moved=way.moved / devices)
    alone = replace(scene, hosts=firsts)
    if every > 1:
        return on_devices(averaging(alone, steps, own, every, 0), devices)
    return on_devices(synchronous(alone, steps, own, overlap=False), devices)


def _served_replicas(outer: ParameterServer | Downpour, inner: Strategy, scene: Scene) -> Timeline:
    """To its servers a replica is one worker; each of its ranks speaks to servers of its own part."""
    devices = inner.processes().workers
    replicas = scene.workers // devices
    notes: tuple[str, ...] = ()
    busy, largest = np.ones((replicas, devices)), 1.0
    if isinstance(inner, Pipeline):
        of_pipeline = pipeline_terms(inner, scene, replicas)
        stages, needed, note = stages_of(scene, of_pipeline, replicas)
        notes = (note,) if note else ()
        pipelined_s, busy_s = one_step(of_pipeline, stages, slowness(scene, of_pipeline.schedule, replicas))
        sizes = gradient_bytes(scene.model, of_pipeline.schedule, needed)
        # All wait for the stage with the most parameters.
        busy, largest = busy_s / pipelined_s[:, None], max(sizes) * devices / sum(sizes)
        plain = device_steps(scene, replicas)
        steps: Sequence[DeviceStep] = [
            DeviceStep(float(own_s), 0.0, each.optimizer_s / devices, each.fixed_s)
            for own_s, each in zip(pipelined_s, plain, strict=True)
        ]
    else:
        steps = tensor_parallel_steps(scene, replicas)
    terms = server_terms(outer, replicas)
    cards = len({host.name for host in scene.hosts[:devices]})
    terms = replace(terms, pushed=terms.pushed * largest, pulled=terms.pulled * largest, cards=cards)
    timeline = served(replace(scene, hosts=scene.hosts[::devices]), steps, terms)
    moved = timeline.moved_bytes / devices / largest
    if isinstance(outer, Downpour) and outer.fetch_every != outer.push_every:
        notes = (*notes, FETCHES)
    found = on_devices(replace(timeline, moved_bytes=moved, notes=(*timeline.notes, *notes)), devices)
    # Of the time that a replica computes, each rank is busy for its own part, and waits for the others meanwhile.
    updates = np.bincount(found.worker, found.update_s, scene.workers)
    return replace(found, busy_s=updates + (found.busy_s - updates) * busy.reshape(-1))


def pipeline_stages(strategy: Pipeline, scene: Scene, replicas: int) -> tuple[tuple[StageCost, ...], PipelineTerms]:
    """Returns what the stages of a pipeline need."""
    terms = pipeline_terms(strategy, scene, replicas)
    return stages_of(scene, terms, replicas)[1], terms


def pipeline_terms(strategy: Pipeline, scene: Scene, replicas: int) -> PipelineTerms:
    """Returns how each of so many replicas makes micro-batches of its share."""
    schedule = strategy.schedule_of(scene.workers // replicas)
    require_enough(scene.examples, replicas, schedule.micro_batches)
    count = schedule.micro_batches
    again = {"never": 0.0, "except_last": (count - 1) / count, "always": 1.0}[strategy.recompute]
    return PipelineTerms(schedule, again, strategy.partition, strategy.cost, strategy.limit_bytes)


def _pipelined(strategy: Pipeline, scene: Scene, replicas: int, every: int = 1) -> Timeline:
    terms = pipeline_terms(strategy, scene, replicas)
    stages, needed, note = stages_of(scene, terms, replicas)
    timeline = staged(scene, terms, replicas, stages, needed, every)
    return replace(timeline, notes=(*timeline.notes, note) if note else timeline.notes)


def tensor_parallel_steps(scene: Scene, replicas: int) -> Sequence[DeviceStep]:
    """Returns what a step of replicas takes whose layers are divided over devices.

    A layer is taken to be divided evenly, and each pair of layers to need an all-reduce of its output in forward, and
    one in backward (Megatron's columns, then rows).

    Raises:
        UsageError: the layers are not known.
    """
    devices = scene.workers // replicas
    found = []
    for replica, step in enumerate(device_steps(scene, replicas)):
        if not step.layers:
            raise UsageError(
                "tensor_parallel exchanges what is between layers, and the model's file has no layers; profile the "
                "model, or write [[layers]]"
            )
        hosts = scene.hosts[replica * devices : (replica + 1) * devices]
        way = scene.network.all_reduce(hosts, scene.assumptions.algorithm)
        crossing_s = sum(way.seconds(layer.crossing_bytes) for layer in step.layers[1::2])
        found.append(
            DeviceStep(
                step.forward_s / devices + crossing_s,
                step.backward_s / devices + crossing_s,
                step.optimizer_s / devices,
                step.fixed_s,
            )
        )
    return found
