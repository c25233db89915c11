"""When each action of a pipeline's schedule runs, by levels: what waits for nothing on its own level is one step.

A rank does one action after the other, and what crosses from another stage must have come. So the level of an action
is one more than that of the rank's action before, and than that of what crosses to it:

    rank 0   F0 F1 .  B0 B1          levels 0 1 . 3 4
    rank 1   .  F0 B0 F1 B1          levels . 1 2 3 4

A level has at most one action of a rank, and its numbers are taken for all ranks and all replicas together.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from headrace.pipeline.schedules.schedule import Action, PassKind, PipelineSchedule, needs
from headrace.prediction.simulation.scene import Seconds

_KINDS = tuple(PassKind)


@dataclass(frozen=True)
class StageTimes:
    """What the passes of a micro-batch through one stage take, and its crossing into the next stage."""

    forward_s: float
    input_s: float
    weight_s: float
    transfer_s: float = 0.0
    crossing_bytes: int = 0

    def of(self, kind: PassKind) -> float:
        """Returns the seconds of a pass."""
        if kind is PassKind.BACKWARD:
            return self.input_s + self.weight_s
        return {PassKind.FORWARD: self.forward_s, PassKind.BACKWARD_INPUT: self.input_s}.get(kind, self.weight_s)


@dataclass(frozen=True)
class Program:
    """All actions of a schedule, level after level, and of one rank in its order; (actions,) each.

    Attributes:
        kinds: places in `PassKind`.
        waits_for: the place of the action whose output crosses to it; -1 for none.
        crossed: the stage behind which that crosses.
        levels: where each level begins, and the end.
    """

    ranks: NDArray[np.int64]
    stages: NDArray[np.int64]
    micro_batches: NDArray[np.int64]
    kinds: NDArray[np.int64]
    waits_for: NDArray[np.int64]
    crossed: NDArray[np.int64]
    levels: tuple[int, ...]

    def actions(self, rank: int) -> Iterator[tuple[int, Action]]:
        """Yields the places of a rank's actions, and those."""
        for place in np.flatnonzero(self.ranks == rank).tolist():
            stage, micro_batch = int(self.stages[place]), int(self.micro_batches[place])
            yield place, Action(stage, micro_batch, _KINDS[self.kinds[place]])


@functools.lru_cache(maxsize=64)
def program(schedule: PipelineSchedule) -> Program:
    """Returns the levels of a schedule; raises a `ValueError` if ranks wait for each other."""
    orders, last = schedule.orders(), schedule.stages() - 1
    numbers = {kind: number for number, kind in enumerate(_KINDS)}

    def key(action: Action) -> int:
        return (action.stage * schedule.micro_batches + action.micro_batch) * len(_KINDS) + numbers[action.kind]

    # Of each action: its level, rank, stage, micro-batch, kind, what crosses to it, and behind which stage.
    rows: list[tuple[int, ...]] = []
    level_of: dict[int, int] = {}
    places, levels, moved = [0] * len(orders), [0] * len(orders), True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                action = order[places[rank]]
                before = [(each.stage, key(each)) for each in needs(action, last)]
                if any(each not in level_of for _, each in before):
                    break
                # From the stage before, or the gradient of what went to the one behind.
                crossing = next((each for stage, each in before if stage != action.stage), -1)
                level = max(levels[rank], level_of.get(crossing, -1) + 1)
                own = key(action.makes)
                level_of[own], levels[rank] = level, level + 1
                crossed = action.stage if action.backward else action.stage - 1
                kind = numbers[action.kind]
                rows.append((level, rank, action.stage, action.micro_batch, kind, crossing, max(crossed, 0), own))
                places[rank] += 1
                moved = True
    left = sum(len(order) for order in orders) - len(rows)
    if left:
        raise ValueError(f"all ranks wait, and {left} actions are left")
    return _in_levels(rows)


def _in_levels(rows: list[tuple[int, ...]]) -> Program:
    rows.sort()
    level, ranks, stages, micro_batches, kinds, crossing, crossed, keys = np.array(rows, dtype=np.int64).T.copy()
    place_of = {key: place for place, key in enumerate(keys.tolist())} | {-1: -1}
    waits_for = np.array([place_of[each] for each in crossing.tolist()])
    begins = np.searchsorted(level, np.arange(int(level[-1]) + 2))
    return Program(ranks, stages, micro_batches, kinds, waits_for, crossed, tuple(begins.tolist()))


@dataclass(frozen=True)
class Swept:
    """When the ranks of all replicas have done their actions, by place in the program: (actions, replicas).

    Attributes:
        rank_ended: (ranks, replicas).
    """

    began: Seconds
    ended: Seconds
    rank_ended: Seconds


def sweep(schedule: PipelineSchedule, stages: Sequence[StageTimes], starts: Seconds, factors: Seconds) -> Swept:
    """Runs each rank's actions, each as soon as it can.

    Args:
        starts: when each rank of each replica begins, (ranks, replicas).
        factors: how many times longer than in `stages` its passes take, (ranks, replicas).
    """
    known = program(schedule)
    seconds = _seconds(known, stages)[:, None]
    transfer = np.array([stage.transfer_s for stage in stages])[known.crossed, None]
    free = np.array(starts, dtype=float)
    # The last row is what an action waits for to which nothing crosses.
    ended = np.full((len(known.ranks) + 1, free.shape[1]), -np.inf)
    began = np.empty_like(ended[1:])
    for first, stop in pairwise(known.levels):
        ranks = known.ranks[first:stop]
        start = np.maximum(free[ranks], ended[known.waits_for[first:stop]] + transfer[first:stop])
        began[first:stop] = start
        free[ranks] = ended[first:stop] = start + seconds[first:stop] * factors[ranks]
    return Swept(began, ended[:-1], free)


def busy_seconds(schedule: PipelineSchedule, stages: Sequence[StageTimes]) -> Seconds:
    """Returns how long all passes of each rank take together."""
    known = program(schedule)
    return np.bincount(known.ranks, _seconds(known, stages), schedule.ranks).astype(float)


def _seconds(known: Program, stages: Sequence[StageTimes]) -> Seconds:
    return np.array([[stage.of(kind) for kind in _KINDS] for stage in stages])[known.stages, known.kinds]


def bubble_rate(schedule: PipelineSchedule, stage: StageTimes) -> float:
    """Returns the part of the longest rank's time in which it does not compute, of equal stages.

    Qi et al., "Zero bubble pipeline parallelism", 2023, section 5.3: of the time from a rank's first pass to its last,
    the largest of all ranks.
    """
    shape = (schedule.ranks, 1)
    swept = sweep(schedule, [stage] * schedule.stages(), np.zeros(shape), np.ones(shape))
    firsts = [next(program(schedule).actions(rank))[0] for rank in range(schedule.ranks)]
    longest = float((swept.rank_ended - swept.began[firsts]).max())
    chunks = schedule.stages() / schedule.ranks
    ideal = schedule.micro_batches * chunks * (stage.forward_s + stage.input_s + stage.weight_s)
    return (longest - ideal) / longest
