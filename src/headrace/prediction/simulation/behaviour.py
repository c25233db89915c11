"""From what a strategy's workers do to the timeline of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from headrace.errors import UsageError
from headrace.policies.behaviour import GradientSum, NeighbourMean, ParameterMean, ServerTerms, Stages
from headrace.policies.period import AutoPeriod, Measured, first_period, first_stretch, next_period, next_stretch
from headrace.prediction.simulation.network import Way
from headrace.prediction.simulation.rounds import averaging, gossip, synchronous
from headrace.prediction.simulation.scene import DeviceStep, Scene
from headrace.prediction.simulation.served import served
from headrace.prediction.simulation.staged import gradient_bytes, one_step, slowness, staged, stages_of
from headrace.prediction.simulation.timeline import Timeline, on_devices, one_after_another

_DRIFT = "how far workers drift apart is not simulated: it would make the period shorter, if anything"


def behave(scene: Scene) -> Timeline:
    """Returns what the workers do.

    Raises:
        UsageError: something that is needed is not known, or the options fit no model and no cluster like this.
    """
    exchange, division = scene.behaviour.exchange, scene.behaviour.division
    if isinstance(exchange, ServerTerms):
        timeline = _served_parts(scene, exchange) if division else served(scene, device_steps(scene), exchange)
    elif isinstance(division, Stages):
        timeline = staged(scene, _rounds_between(scene))
    elif division:
        timeline = _sliced(scene)
    else:
        timeline = _whole(scene)
    return replace(timeline, notes=(*timeline.notes, *scene.behaviour.notes))


def device_steps(scene: Scene, by_speed: bool = False) -> list[DeviceStep]:
    """Returns what a step of each worker takes, or of each replica's slowest."""
    ranks = scene.workers // scene.replicas
    known: dict[tuple[str, int], DeviceStep] = {}
    slowest = []
    for replica, share in enumerate(scene.shares(by_speed)):
        hosts = scene.hosts[replica * ranks : (replica + 1) * ranks]
        for host in hosts:
            if (host.name, share) not in known:
                known[host.name, share] = scene.step(host, share)
        steps = (known[host.name, share] for host in hosts)
        slowest.append(max(steps, key=lambda step: step.forward_s + step.backward_s))
    return slowest


def _coded(way: Way, sent: float) -> Way:
    return way.part(sent)


def _rounds_between(scene: Scene) -> int:
    """Returns the rounds from one exchange of replicas that several devices hold to the next."""
    exchange = scene.behaviour.exchange
    if not isinstance(exchange, ParameterMean):
        return 1
    assert isinstance(exchange.period, int)
    return exchange.period


def _whole(scene: Scene) -> Timeline:
    """Simulates workers that each have the whole model, without servers or with those that average."""
    exchange, algorithm = scene.behaviour.exchange, scene.assumptions.algorithm
    if isinstance(exchange, NeighbourMean):
        return gossip(scene, device_steps(scene), exchange.topology, exchange.period)
    if isinstance(exchange, ParameterMean):
        if exchange.through:
            return _averaging_servers(scene, exchange, exchange.through)
        way = _coded(scene.network.all_reduce(scene.hosts, algorithm), exchange.sent)
        return averaging(scene, device_steps(scene), way, exchange.period, exchange.post_local)
    if not isinstance(exchange, GradientSum):
        return averaging(scene, device_steps(scene), Way(), scene.assumptions.steps, 0)
    steps = device_steps(scene, exchange.by_speed)
    if exchange.central:
        way = scene.network.all_reduce(scene.hosts, "ring")
        return synchronous(scene, steps, way, overlap=False, parts=scene.workers)
    way = scene.network.all_reduce(scene.hosts, algorithm)
    several = len({host.name for host in scene.hosts}) > 1
    overlap = exchange.overlap and (several or scene.cluster.device != "cpu")
    return synchronous(scene, steps, _coded(way, exchange.sent) if several else way, overlap)


def _averaging_servers(scene: Scene, mean: ParameterMean, terms: ServerTerms) -> Timeline:
    """Simulates workers that average through servers, and whose leases change their length at sync points alone.

    All workers meet there; the length is decided as real workers decide it. Drift is not known, and taken to allow any.
    """
    steps, rounds, assumed, target = device_steps(scene), scene.assumptions.steps, scene.assumptions, mean.period
    quickest_s = min((s.forward_s + s.backward_s + s.fixed_s + s.optimizer_s for s in steps), default=0.0)
    if terms.patience_s < quickest_s:
        raise UsageError(
            f"wait={terms.patience_s:g} s is shorter than one step, which takes {quickest_s:.3g} s: a worker that is a "
            "step behind would never be part of an average; wait longer, or use wait='all'"
        )
    if isinstance(target, int) and not mean.post_local:
        return served(scene, steps, replace(terms, span=target))
    period, done = first_period(target), 0
    parts: list[Timeline] = []
    until, span = first_stretch(target, mean.post_local, 0, rounds)
    while True:
        # The last lease before a sync point may be shorter.
        lengths = [(until - done) // span * span, (until - done) % span]
        for length in lengths:
            if length:
                seed = assumed.seed + 1_000_003 * len(parts)
                apart = replace(scene, assumptions=replace(assumed, steps=length, seed=seed))
                span = min(span, length)
                parts.append(served(apart, steps, replace(terms, span=span)))
        if until >= rounds:
            break
        if isinstance(target, AutoPeriod) and until >= mean.post_local:
            period = next_period(period, _measured(parts[-1], span), target)
        done = until
        until, span = next_stretch(period, target, mean.post_local, done, rounds)
    notes = (_DRIFT,) if isinstance(target, AutoPeriod) else ()
    joined = one_after_another(parts)
    return replace(joined, notes=(*joined.notes, *notes))


def _measured(timeline: Timeline, span: int) -> Measured:
    """Returns what the workers have measured of leases of so many rounds."""
    lasts = timeline.exchange_s[timeline.step % span == span - 1]
    train_s = span * float((timeline.compute_s + timeline.update_s).max())
    return Measured(span, train_s, float(lasts.min()), 0.0)


def _sliced(scene: Scene) -> Timeline:
    """Simulates replicas whose layers devices divide: each device exchanges its slice with those that hold the same."""
    devices, steps, every = scene.behaviour.devices, sliced_steps(scene), _rounds_between(scene)
    firsts = scene.hosts[::devices]
    side_by_side = sum(host.name == firsts[0].name for host in scene.hosts[:devices])
    way = scene.network.all_reduce(firsts, scene.assumptions.algorithm, side_by_side)
    of_slice = way.part(1 / devices)
    alone = replace(scene, hosts=firsts)
    if every > 1:
        return on_devices(averaging(alone, steps, of_slice, every, 0), devices)
    return on_devices(synchronous(alone, steps, of_slice, overlap=False), devices)


def _served_parts(scene: Scene, terms: ServerTerms) -> Timeline:
    """To its servers a replica is one worker; each of its ranks speaks to servers of its own part."""
    devices, replicas = scene.behaviour.devices, scene.replicas
    notes: tuple[str, ...] = ()
    busy, largest = np.ones((replicas, devices)), 1.0
    if isinstance(scene.behaviour.division, Stages):
        stages, needed, note = stages_of(scene)
        notes = (note,) if note else ()
        pipelined_s, busy_s = one_step(scene.schedule, stages, slowness(scene))
        sizes = gradient_bytes(scene, needed)
        # All wait for the stage with the most parameters.
        busy, largest = busy_s / pipelined_s[:, None], max(sizes) * devices / sum(sizes)
        steps: Sequence[DeviceStep] = [
            DeviceStep(float(step_s), 0.0, whole.optimizer_s / devices, whole.fixed_s)
            for step_s, whole in zip(pipelined_s, device_steps(scene), strict=True)
        ]
    else:
        steps = sliced_steps(scene)
    cards = len({host.name for host in scene.hosts[:devices]})
    terms = replace(terms, pushed=terms.pushed * largest, pulled=terms.pulled * largest, cards=cards)
    timeline = served(replace(scene, hosts=scene.hosts[::devices]), steps, terms)
    moved = timeline.moved_bytes / devices / largest
    timeline = on_devices(replace(timeline, moved_bytes=moved, notes=(*timeline.notes, *notes)), devices)
    # Of the time that a replica computes, each rank is busy for its own part, and waits for the others meanwhile.
    updates = np.bincount(timeline.worker, timeline.update_s, scene.workers)
    return replace(timeline, busy_s=updates + (timeline.busy_s - updates) * busy.reshape(-1))


def sliced_steps(scene: Scene) -> Sequence[DeviceStep]:
    """Returns what a step of replicas takes whose layers are divided over devices.

    A layer is taken to be divided evenly, and each pair of layers to need an all-reduce of its output in forward, and
    one in backward (Megatron's columns, then rows).

    Raises:
        UsageError: the layers are not known.
    """
    devices = scene.behaviour.devices
    sliced = []
    for replica, step in enumerate(device_steps(scene)):
        if not step.layers:
            raise UsageError(
                "tensor_parallel exchanges what is between layers, and the model's file has no layers; profile the "
                "model, or write [[layers]]"
            )
        hosts = scene.hosts[replica * devices : (replica + 1) * devices]
        way = scene.network.all_reduce(hosts, scene.assumptions.algorithm)
        crossing_s = sum(way.seconds(layer.crossing_bytes) for layer in step.layers[1::2])
        sliced.append(
            DeviceStep(
                step.forward_s / devices + crossing_s,
                step.backward_s / devices + crossing_s,
                step.optimizer_s / devices,
                step.fixed_s,
            )
        )
    return sliced
