"""Pipelines, and replicas that are pipelines: the schedules of real runs with computed times.

An action occupies its rank while it computes; what crosses to another stage is under way meanwhile, and comes
`transfer` later. Replicas go through the same order of actions, so that one sweep carries the times of all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from headrace.errors import UsageError
from headrace.pipeline.partition import Terms, costs, read, split
from headrace.pipeline.schedules.schedule import Action, PassKind, PipelineSchedule, in_flight, needs
from headrace.prediction.simulation.network import Way
from headrace.prediction.simulation.scene import Scene, Seconds
from headrace.prediction.simulation.timeline import Passes, Timeline, of_rounds
from headrace.spec.model import LayerSpec, ModelSpec
from headrace.spec.plan import StageCost

_DRAWN = 2
"""Steps whose passes are kept."""


@dataclass(frozen=True)
class StageTimes:
    """What the passes of a micro-batch through one stage take, and its crossing into the next stage."""

    forward_s: float
    input_s: float
    weight_s: float
    transfer_s: float = 0.0

    def of(self, kind: PassKind) -> float:
        """Returns the seconds of a pass."""
        if kind is PassKind.BACKWARD:
            return self.input_s + self.weight_s
        return {PassKind.FORWARD: self.forward_s, PassKind.BACKWARD_INPUT: self.input_s}.get(kind, self.weight_s)


@dataclass(frozen=True)
class Entry:
    """An action of a rank, and the numbers of the entries that must have ended before, which cross to it or not."""

    rank: int
    action: Action
    here: tuple[int, ...]
    crossing: tuple[int, ...]


@functools.lru_cache(maxsize=16)
def program(schedule: PipelineSchedule) -> tuple[Entry, ...]:
    """Returns all actions of a schedule in an order in which each follows those that it needs.

    Raises a `ValueError` if ranks wait for each other.
    """
    orders, last = schedule.orders(), schedule.stages() - 1
    split_backward = any(action.kind is PassKind.BACKWARD_INPUT for order in orders for action in order)
    gradient = PassKind.BACKWARD_INPUT if split_backward else PassKind.BACKWARD
    places, numbers = [0] * len(orders), dict[Action, int]()
    entries: list[Entry] = []
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                action = order[places[rank]]
                before = needs(action, last, gradient)
                if not all(each in numbers for each in before):
                    break
                here = tuple(numbers[each] for each in before if each.stage == action.stage)
                crossing = tuple(numbers[each] for each in before if each.stage != action.stage)
                numbers[action] = len(entries)
                entries.append(Entry(rank, action, here, crossing))
                places[rank] += 1
                moved = True
    left = sum(len(order) for order in orders) - len(entries)
    if left:
        raise ValueError(f"all ranks wait, and {left} actions are left")
    return tuple(entries)


@dataclass(frozen=True)
class Swept:
    """When the ranks of all replicas have done their actions, by entry of the program: (replicas,) each."""

    began: Sequence[Seconds]
    ended: Sequence[Seconds]
    rank_ended: tuple[Seconds, ...]
    busy: tuple[Seconds, ...]


def sweep(
    schedule: PipelineSchedule,
    stages: Sequence[StageTimes],
    starts: Sequence[Seconds],
    factors: Callable[[int], Seconds | float],
) -> Swept:
    """Runs each rank's actions, each as soon as it can; `factors` says how much slower a rank's step is."""
    free = [np.asarray(start, dtype=float) for start in starts]
    busy: list[Seconds] = [np.zeros_like(start) for start in free]
    scale = [factors(rank) for rank in range(schedule.ranks)]
    began: list[Seconds] = []
    ended: list[Seconds] = []
    for entry in program(schedule):
        rank, action = entry.rank, entry.action
        start = free[rank]
        for number in entry.here:
            start = np.maximum(start, ended[number])
        for number in entry.crossing:
            # From the stage before, or the gradient of what went to the one behind.
            before = action.stage if action.backward else action.stage - 1
            start = np.maximum(start, ended[number] + stages[before].transfer_s)
        seconds = stages[action.stage].of(action.kind) * scale[rank]
        free[rank] = start + seconds
        began.append(start)
        ended.append(free[rank])
        busy[rank] = busy[rank] + seconds
    return Swept(began, ended, tuple(free), tuple(busy))


def bubble_rate(schedule: PipelineSchedule, stage: StageTimes) -> float:
    """Returns the part of the longest rank's time in which it does not compute, of equal stages.

    Qi et al., "Zero bubble pipeline parallelism", 2023, section 5.3: of the time from a rank's first pass to its last,
    the largest of all ranks.
    """
    swept = sweep(schedule, [stage] * schedule.stages(), [np.zeros(1)] * schedule.ranks, lambda rank: 1.0)
    first = {entry.rank: number for number, entry in reversed(list(enumerate(program(schedule))))}
    longest = max(float(swept.rank_ended[rank][0] - swept.began[number][0]) for rank, number in first.items())
    chunks = schedule.stages() / schedule.ranks
    ideal = schedule.micro_batches * chunks * (stage.forward_s + stage.input_s + stage.weight_s)
    return (longest - ideal) / longest


@dataclass(frozen=True)
class PipelineTerms:
    """A pipeline's options, as the runtime has them.

    Attributes:
        recompute: the part of the micro-batches whose forward is done again.
        partition: "auto", or layers a stage.
    """

    schedule: PipelineSchedule
    recompute: float = 0.0
    partition: str | Sequence[int | Sequence[str]] = "auto"
    cost: str = "time"
    limit_bytes: int | None = None


def stages_of(scene: Scene, terms: PipelineTerms, replicas: int) -> tuple[list[StageTimes], tuple[StageCost, ...], str]:
    """Returns what the stages take for a micro-batch, what they need, and a note where layers were not known."""
    schedule = terms.schedule
    micro = max(1, scene.examples // replicas // schedule.micro_batches)
    ranks = [scene.hosts[rank] for rank in range(schedule.ranks)]
    step = scene.step(ranks[0], micro)
    layers, note = step.layers, ""
    if not layers:
        layers = _equal_layers(scene.model, schedule.stages(), step.forward_s, step.backward_s, scene, micro)
        note = "the model's layers are not known: its stages are taken to be equal, and to send nothing"
    model = replace(scene.model, layers=layers, parameters=scene.model.parameters if step.layers else ())
    hosts = [ranks[rank].name for rank in schedule.placement()]
    partition_terms = Terms(
        terms.cost,
        held=tuple(schedule.held(stage) for stage in range(schedule.stages())),
        limit_bytes=terms.limit_bytes,
        again=terms.recompute,
        link_bytes_per_s=(np.inf, *scene.cluster.bandwidths(list(pairwise(hosts)))),
    )
    if isinstance(terms.partition, str):
        partition = split(model, schedule.stages(), partition_terms)
    else:
        partition = read(layers, terms.partition, schedule.stages())
    named = {layer.name: layer for layer in layers}
    times = []
    for stage, names in enumerate(partition):
        own = [named[name] for name in names]
        forward = sum(layer.forward_s for layer in own)
        backward = sum(layer.backward_s for layer in own)
        after = stage + 1 < len(partition)
        way = (
            scene.network.between(ranks[schedule.rank_of(stage)], ranks[schedule.rank_of(stage + 1)])
            if after
            else Way()
        )
        shares = scene.assumptions.input_gradient_share
        times.append(
            StageTimes(
                forward,
                backward * shares + forward * terms.recompute,
                backward * (1 - shares),
                way.seconds(own[-1].crossing_bytes) if after else 0.0,
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


def staged(
    scene: Scene,
    terms: PipelineTerms,
    replicas: int,
    stages: Sequence[StageTimes],
    needed: Sequence[StageCost],
    average_every: int = 1,
) -> Timeline:
    """Simulates replicas that are pipelines, and that all-reduce each stage's gradients every so many rounds."""
    schedule, ranks = terms.schedule, terms.schedule.ranks
    rounds = scene.assumptions.steps
    factors = scene.variation(rounds, replicas * ranks).reshape(rounds, replicas, ranks)
    steps = [scene.step(scene.hosts[rank], max(1, scene.examples // replicas)) for rank in range(ranks)]
    update_s = [step.optimizer_s / ranks + step.fixed_s for step in steps]
    sizes = _gradient_bytes(scene.model, schedule, needed)
    ways = [_between_replicas(scene, rank, ranks, replicas) for rank in range(ranks)]
    free = [np.zeros(replicas)] * ranks
    shape = (rounds, replicas, ranks)
    ended, compute, exchange = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    passes: list[Passes] = []
    for step in range(rounds):
        own = factors[step]
        swept = sweep(schedule, stages, free, lambda rank, own=own: own[:, rank])  # type: ignore[misc]
        synced = []
        for rank in range(ranks):
            done = swept.rank_ended[rank]
            after = done
            if replicas > 1 and ((step + 1) % average_every == 0 or step + 1 == rounds):
                after = np.full(replicas, done.max() + ways[rank].seconds(sizes[rank]))
            compute[step, :, rank] = done - free[rank]
            exchange[step, :, rank] = after - done
            synced.append(after + update_s[rank])
            ended[step, :, rank] = synced[rank]
        if step < _DRAWN and scene.drawn:
            passes += [_passes(step, rank, schedule, swept) for rank in range(ranks)]
        free = synced
    flat = (rounds, replicas * ranks)
    updating = np.broadcast_to(np.array(update_s), shape)
    busy_rank = np.array([sum(stages[a.stage].of(a.kind) for a in schedule.actions(rank)) for rank in range(ranks)])
    busy = (factors * busy_rank + updating).sum(axis=0).reshape(-1)
    timeline = of_rounds(
        ended.reshape(flat), compute.reshape(flat), exchange.reshape(flat), updating.reshape(flat), busy
    )
    moved = 2 * sum(way.moved * size for way, size in zip(ways, sizes, strict=True)) / ranks / average_every
    return replace(timeline, passes=tuple(passes), moved_bytes=moved)


def _gradient_bytes(model: ModelSpec, schedule: PipelineSchedule, needed: Sequence[StageCost]) -> list[float]:
    """Returns the bytes of the gradients of each rank: in proportion to its parameters, or equal ones."""
    own = [0.0] * schedule.ranks
    for stage, cost in enumerate(needed):
        own[schedule.rank_of(stage)] += cost.parameter_bytes
    whole = sum(own)
    return [model.trainable_bytes * (size / whole if whole else 1 / schedule.ranks) for size in own]


def _between_replicas(scene: Scene, rank: int, ranks: int, replicas: int) -> Way:
    """Returns the all-reduce of one rank's gradients over all replicas."""
    hosts = [scene.hosts[replica * ranks + rank] for replica in range(replicas)]
    first = [host.name for host in scene.hosts[:ranks]]
    return scene.network.all_reduce(hosts, scene.assumptions.algorithm, side_by_side=first.count(hosts[0].name))


def _passes(step: int, rank: int, schedule: PipelineSchedule, swept: Swept) -> Passes:
    own = [(number, entry.action) for number, entry in enumerate(program(schedule)) if entry.rank == rank]
    return Passes(
        step,
        rank,
        in_flight(action for _, action in own),
        tuple(action.stage for _, action in own),
        tuple(action.micro_batch for _, action in own),
        tuple(action.kind.value for _, action in own),
        tuple(float(swept.began[number][0]) for number, _ in own),
        tuple(float(swept.ended[number][0]) for number, _ in own),
    )


def require_enough(examples: int, replicas: int, micro_batches: int) -> None:
    """Raises UsageError where a micro-batch would be empty."""
    if examples // replicas < micro_batches:
        raise UsageError(
            f"{micro_batches} micro-batches of {examples // replicas} examples would be empty; use a "
            f"global_batch_size of at least {replicas * micro_batches}, or fewer micro-batches"
        )
