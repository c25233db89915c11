"""From what a strategy's workers do to the timeline of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from headrace.errors import UsageError
from headrace.policies.behaviour import GradientSum, NeighbourMean, ParameterMean, RingOfTokens, ServerTerms, Stages
from headrace.policies.period import AutoPeriod, Measured, first_period, first_stretch, next_period, next_stretch
from headrace.prediction.simulation.network import Way
from headrace.prediction.simulation.rounds import averaging, by_units, gossip, synchronous, without_rest
from headrace.prediction.simulation.scene import DeviceStep, Scene
from headrace.prediction.simulation.served import served
from headrace.prediction.simulation.slices.steps import (
    device_steps,
    inside_ways,
    sliced,
    sliced_model,
    sliced_steps,
    with_sums,
)
from headrace.prediction.simulation.slices.tokens import around_rings, with_experts
from headrace.prediction.simulation.staged import gradient_bytes, one_step, slowness, staged, stages_of
from headrace.prediction.simulation.timeline import Timeline, on_devices, one_after_another
from headrace.spec.cluster import Host

_DRIFT = "how far workers drift apart is not simulated: it would make the period shorter, if anything"


def behave(scene: Scene) -> Timeline:
    """Returns what the workers do.

    Raises:
        UsageError: something that is needed is not known, or the options fit no model and no cluster like this.
    """
    exchange, division = scene.behaviour.exchange, scene.behaviour.division
    if isinstance(exchange, ServerTerms):
        timeline = _served_parts(scene, exchange) if division else served(scene, device_steps(scene), exchange)
    elif isinstance(division, Stages) and division.slices > 1:
        timeline = _sliced_stages(scene, division)
    elif isinstance(division, Stages):
        timeline = staged(scene, _rounds_between(scene))
    elif isinstance(division, RingOfTokens):
        timeline = _in_rings(scene, division.devices)
    elif division:
        timeline = _sliced(scene)
    elif scene.behaviour.experts > 1:
        timeline = with_experts(scene, scene.behaviour.experts)
    else:
        timeline = _whole(scene, device_steps(scene, isinstance(exchange, GradientSum) and exchange.by_speed))
    return replace(timeline, notes=(*timeline.notes, *scene.behaviour.notes))


def _rounds_between(scene: Scene) -> int:
    """Returns the rounds from one exchange of replicas that several devices hold to the next."""
    exchange = scene.behaviour.exchange
    if not isinstance(exchange, ParameterMean):
        return 1
    assert isinstance(exchange.period, int)
    return exchange.period


def _in_rings(scene: Scene, devices: int) -> Timeline:
    """Simulates workers that divide sequences: all have the whole model, and sum the gradients of all tokens."""
    steps, moved = around_rings(scene, devices)
    timeline = _whole(replace(scene, behaviour=replace(scene.behaviour, division=None)), steps)
    return replace(timeline, moved_bytes=timeline.moved_bytes + moved)


def _whole(scene: Scene, steps: Sequence[DeviceStep]) -> Timeline:
    """Simulates workers that each have the whole model, without servers or with those that average."""
    exchange, algorithm = scene.behaviour.exchange, scene.assumptions.algorithm
    if isinstance(exchange, NeighbourMean):
        return gossip(scene, steps, exchange.topology, exchange.period)
    if isinstance(exchange, ParameterMean):
        if exchange.through:
            return _averaging_servers(scene, exchange, exchange.through)
        way = scene.network.average(scene.hosts, algorithm).part(exchange.sent)
        return averaging(scene, steps, way, exchange.period, exchange.post_local)
    if not isinstance(exchange, GradientSum):
        return averaging(scene, steps, Way(), scene.assumptions.steps, 0)
    several = len({host.name for host in scene.hosts}) > 1
    overlap = exchange.overlap and (several or scene.cluster.device != "cpu")
    if exchange.parts > 1:
        way = scene.network.divided(scene.hosts, algorithm, exchange.parts, exchange.gathers)
        return by_units(scene, steps, way.part(exchange.sent), overlap)
    way = scene.network.gradients(scene.hosts, "ring" if exchange.central else algorithm)
    if exchange.central:
        return synchronous(scene, steps, way, overlap=False, parts=scene.workers)
    return synchronous(scene, steps, way.part(exchange.sent) if several else way, overlap)


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


def _between(scene: Scene, hosts: Sequence[Host], side_by_side: int) -> Way:
    """Returns the way of what ranks exchange that hold the same slice of several replicas."""
    exchange, algorithm = scene.behaviour.exchange, scene.assumptions.algorithm
    if isinstance(exchange, GradientSum) and exchange.parts > 1:
        return scene.network.divided(hosts, algorithm, exchange.parts, exchange.gathers, side_by_side)
    if isinstance(exchange, ParameterMean):
        return scene.network.average(hosts, algorithm, side_by_side)
    return scene.network.gradients(hosts, algorithm, side_by_side)


def _sliced(scene: Scene) -> Timeline:
    """Simulates replicas whose layers devices divide: each device exchanges its slice with those that hold the same."""
    devices, steps, every = scene.behaviour.devices, sliced_steps(scene), _rounds_between(scene)
    firsts = scene.hosts[::devices]
    side_by_side = sum(host.name == firsts[0].name for host in scene.hosts[:devices])
    of_slice = _between(scene, firsts, side_by_side).part(sliced(scene.model, devices).held)
    alone = replace(scene, hosts=firsts)
    if every > 1:
        timeline = averaging(alone, steps, of_slice, every, 0)
    else:
        exchange = scene.behaviour.exchange
        parts = exchange.parts if isinstance(exchange, GradientSum) else 1
        timeline = without_rest(alone, synchronous(alone, steps, of_slice, overlap=False, parts=parts))
    return on_devices(with_sums(scene, timeline), devices)


def _sliced_stages(scene: Scene, stages: Stages) -> Timeline:
    """Simulates pipelines whose stages are several devices each, which divide its layers and do the same."""
    count = stages.slices
    hosts = scene.hosts[::count]
    way = max((way for way in inside_ways(scene, count)), key=lambda way: way.s_per_byte)
    layout = sliced(scene.model, count)
    alone = replace(
        scene,
        model=sliced_model(scene.model, layout, way),
        hosts=hosts,
        behaviour=replace(scene.behaviour, division=replace(stages, slices=1)),
        memo={},
    )
    timeline = staged(alone, _rounds_between(scene))
    # Each stage sums what its own layers do.
    timeline = with_sums(scene, timeline, count, 1 / stages.devices)
    return replace(on_devices(timeline, count), passes=timeline.passes)


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
