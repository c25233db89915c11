"""Pipelines, and replicas that are pipelines: the schedules of real runs with computed times.

An action occupies its rank while it computes; what crosses to another stage is under way meanwhile, and comes
`transfer` later. Replicas go through the same order of actions, so that one sweep carries the times of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from headrace.errors import UsageError
from headrace.pipeline.partition import Terms, costs, read, split
from headrace.pipeline.schedules.schedule import PipelineSchedule, held_by_stage, in_flight
from headrace.policies.behaviour import GradientSum, ParameterMean, Stages
from headrace.prediction.simulation.network import Way
from headrace.prediction.simulation.scene import Scene, Seconds
from headrace.prediction.simulation.sweep import StageTimes, Swept, busy_seconds, program, sweep
from headrace.prediction.simulation.timeline import Passes, Timeline, of_rounds
from headrace.spec.cluster import Host
from headrace.spec.compute import LayerSpec
from headrace.spec.model import ModelSpec
from headrace.spec.plan import StageCost

_DRAWN = 2
"""Steps whose passes are kept."""


def stages_of(scene: Scene) -> tuple[list[StageTimes], tuple[StageCost, ...], str]:
    """Returns what the stages take for a micro-batch, what they need, and a note where layers were not known.

    Raises:
        UsageError: a micro-batch would be empty.
    """
    schedule, replicas, terms = scene.schedule, scene.replicas, scene.behaviour.division
    assert isinstance(terms, Stages)
    if scene.examples // replicas < schedule.micro_batches:
        raise UsageError(
            f"{schedule.micro_batches} micro-batches of {scene.examples // replicas} examples would be empty; use a "
            f"global_batch_size of at least {replicas * schedule.micro_batches}, or fewer micro-batches"
        )
    micro = micro_batch(scene)
    part = max(scene.shares()) / schedule.micro_batches / micro
    ranks = [scene.hosts[rank] for rank in range(schedule.ranks)]
    placed = [ranks[rank] for rank in schedule.placement()]
    firsts = range(0, replicas * schedule.ranks, schedule.ranks)
    # Replicas wait for the one with the slowest way.
    ways = tuple(
        scene.network.slowest([(scene.hosts[first + one], scene.hosts[first + other]) for first in firsts])
        for one, other in pairwise(schedule.placement())
    )
    rates = scene.cluster.bandwidths([(one.name, other.name) for one, other in pairwise(placed)])
    partition = terms.partition if isinstance(terms.partition, str) else tuple(map(str, terms.partition))
    of_terms = (schedule, terms.recompute, partition, terms.cost, terms.limit_bytes)
    key = (*of_terms, ways, rates, scene.assumptions.input_gradient_share, scene.step_key(ranks[0], micro), part)
    if key not in scene.memo:
        scene.memo[key] = _stages(scene, terms, ranks[0], micro, part, ways, rates)
    known: tuple[list[StageTimes], tuple[StageCost, ...], str] = scene.memo[key]
    return known


def micro_batch(scene: Scene) -> int:
    """Returns the examples of the largest micro-batch of the replica with the most examples."""
    return -(-max(scene.shares()) // scene.schedule.micro_batches)


def _stages(
    scene: Scene,
    terms: Stages,
    host: Host,
    micro: int,
    part: float,
    ways: Sequence[Way],
    rates: Sequence[float],
) -> tuple[list[StageTimes], tuple[StageCost, ...], str]:
    """Takes stages for the largest micro-batch; a mean one is `part` of it, and takes as much of its time."""
    schedule, step = scene.schedule, scene.step(host, micro)
    layers, note = step.layers, ""
    if not layers:
        layers = _equal_layers(scene.model, schedule.stages(), step.forward_s, step.backward_s, scene, micro)
        note = "the model's layers are not known: its stages are taken to be equal, and to send nothing"
    model = replace(scene.model, layers=layers, parameters=scene.model.parameters if step.layers else ())
    partition_terms = Terms(
        terms.cost,
        held=held_by_stage(schedule),
        limit_bytes=terms.limit_bytes,
        again=terms.recompute,
        link_bytes_per_s=(np.inf, *rates),
    )
    if isinstance(terms.partition, str):
        partition = split(model, schedule.stages(), partition_terms)
    else:
        partition = read(layers, terms.partition, schedule.stages())
    named = {layer.name: layer for layer in layers}
    # The gradients of all micro-batches but the first are added to what is there.
    adding_s = step.accumulate_s * (1 - 1 / schedule.micro_batches) / max(1, model.trainable_bytes)
    times = []
    for stage, names in enumerate(partition):
        own = [named[name] for name in names]
        forward = part * sum(layer.forward_s for layer in own)
        backward = part * sum(layer.backward_s for layer in own)
        crossing = round(part * own[-1].crossing_bytes)
        after = stage + 1 < len(partition)
        way = ways[stage] if after else Way()
        shares = scene.assumptions.input_gradient_share
        times.append(
            StageTimes(
                forward,
                backward * shares + forward * terms.recompute,
                backward * (1 - shares) + adding_s * sum(layer.parameter_bytes for layer in own),
                way.seconds(crossing) if after else 0.0,
                crossing if way.moved else 0,
            )
        )
    return times, costs(model, partition, partition_terms), note


def _equal_layers(
    model: ModelSpec, stages: int, forward_s: float, backward_s: float, scene: Scene, micro: int
) -> tuple[LayerSpec, ...]:
    saved = scene.model.compute.at(micro).saved_bytes if scene.model.compute else 0
    size = model.trainable_bytes // stages
    return tuple(
        LayerSpec(f"part {stage}", (), size, forward_s / stages, backward_s / stages, saved // stages, 0)
        for stage in range(stages)
    )


def staged(scene: Scene, average_every: int = 1) -> Timeline:
    """Simulates replicas that are pipelines, and that all-reduce each stage's gradients every so many rounds."""
    schedule, ranks, replicas, rounds = scene.schedule, scene.schedule.ranks, scene.replicas, scene.assumptions.steps
    stages, needed, note = stages_of(scene)
    factors = pass_factors(scene)
    sizes = gradient_bytes(scene, needed)
    update_s = update_seconds(scene, sizes)
    ways = [between_replicas(scene, rank) for rank in range(ranks)]
    free = np.zeros((ranks, replicas))
    shape = (rounds, replicas, ranks)
    ended, compute, exchange = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    passes: list[Passes] = []
    for step in range(rounds):
        swept = sweep(schedule, stages, free, factors[step].T)
        synced = np.empty_like(free)
        for rank in range(ranks):
            done = swept.rank_ended[rank]
            after = done
            if replicas > 1 and ((step + 1) % average_every == 0 or step + 1 == rounds):
                after = np.full(replicas, done.max() + ways[rank].seconds(sizes[rank]))
            compute[step, :, rank] = done - free[rank]
            exchange[step, :, rank] = after - done
            synced[rank] = after + update_s[:, rank]
            ended[step, :, rank] = synced[rank]
        if step < _DRAWN and scene.drawn:
            passes += [_passes(step, rank, schedule, swept) for rank in range(ranks)]
        free = synced
    flat = (rounds, replicas * ranks)
    updating = np.broadcast_to(update_s, shape)
    busy = (factors * busy_seconds(schedule, stages) + updating).sum(axis=0).reshape(-1)
    timeline = of_rounds(
        ended.reshape(flat), compute.reshape(flat), exchange.reshape(flat), updating.reshape(flat), busy
    )
    moved = 2 * sum(way.moved * size for way, size in zip(ways, sizes, strict=True)) / ranks / average_every
    # Each crossing goes there and a gradient of its size back, and is sent and received.
    crossed = 4 * schedule.micro_batches * sum(stage.crossing_bytes for stage in stages) / ranks
    return replace(timeline, passes=tuple(passes), moved_bytes=moved + crossed, notes=(note,) if note else ())


def pass_factors(scene: Scene) -> Seconds:
    """Returns how many times as long as its stage says each rank's passes take, (rounds, replicas, ranks)."""
    shape = (scene.assumptions.steps, scene.replicas, scene.schedule.ranks)
    return scene.variation(scene.assumptions.steps, scene.workers).reshape(shape) * slowness(scene)


def slowness(scene: Scene) -> Seconds:
    """Returns how many times as long as on the first rank's host a pass takes on each rank's, (replicas, ranks)."""
    seconds = np.array([step.forward_s + step.backward_s for step in scene.steps(micro_batch(scene))])
    seconds = seconds.reshape(scene.replicas, scene.schedule.ranks)
    return np.asarray(seconds / seconds[0, 0])


def one_step(schedule: PipelineSchedule, stages: Sequence[StageTimes], slower: Seconds) -> tuple[Seconds, Seconds]:
    """Returns how long each replica's step takes without variation, and how long each of its ranks computes in it.

    Args:
        slower: as of `slowness`, (replicas, ranks).
    """
    swept = sweep(schedule, stages, np.zeros(slower.T.shape), slower.T)
    return np.asarray(swept.rank_ended.max(axis=0)), slower * busy_seconds(schedule, stages)


def gradient_bytes(scene: Scene, needed: Sequence[StageCost]) -> list[float]:
    """Returns the bytes of the gradients of each rank: in proportion to its parameters, or equal ones."""
    schedule = scene.schedule
    sizes = [0.0] * schedule.ranks
    for stage, cost in enumerate(needed):
        sizes[schedule.rank_of(stage)] += cost.parameter_bytes
    whole = sum(sizes)
    return [scene.model.trainable_bytes * (size / whole if whole else 1 / schedule.ranks) for size in sizes]


def update_seconds(scene: Scene, sizes: Sequence[float]) -> Seconds:
    """Returns what each rank's update takes, (replicas, ranks): the optimizer goes through what the rank holds."""
    steps = scene.steps(max(1, scene.examples // scene.replicas))
    optimizer_s = np.array([step.optimizer_s for step in steps]).reshape(scene.replicas, -1)
    fixed_s = np.array([step.fixed_s for step in steps]).reshape(scene.replicas, -1)
    whole = sum(sizes)
    return np.asarray(optimizer_s * [size / whole if whole else 1 / len(sizes) for size in sizes] + fixed_s)


def between_replicas(scene: Scene, rank: int) -> Way:
    """Returns the all-reduce of one rank's gradients over all replicas."""
    ranks = scene.schedule.ranks
    hosts = scene.hosts[rank::ranks]
    first = [host.name for host in scene.hosts[:ranks]]
    side_by_side, exchange = first.count(hosts[0].name), scene.behaviour.exchange
    if isinstance(exchange, GradientSum) and exchange.parts > 1:
        terms = exchange.parts, exchange.gathers
        return scene.network.divided(hosts, scene.assumptions.algorithm, *terms, side_by_side)
    if isinstance(exchange, ParameterMean):
        return scene.network.average(hosts, scene.assumptions.algorithm, side_by_side)
    return scene.network.gradients(hosts, scene.assumptions.algorithm, side_by_side)


def _passes(step: int, rank: int, schedule: PipelineSchedule, swept: Swept) -> Passes:
    own = list(program(schedule).actions(rank))
    return Passes(
        step,
        rank,
        in_flight(action for _, action in own),
        tuple(action.stage for _, action in own),
        tuple(action.micro_batch for _, action in own),
        tuple(action.kind.value for _, action in own),
        tuple(float(swept.began[place, 0]) for place, _ in own),
        tuple(float(swept.ended[place, 0]) for place, _ in own),
    )
