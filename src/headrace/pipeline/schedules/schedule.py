"""What schedules are made of, and what one costs: when each action runs, how long ranks idle, what they hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Action:
    """One thing that a rank of a pipeline does.

    Attributes:
        stage: of which stage; those of rank r are r, r + ranks, r + 2 ranks and so on.
        micro_batch: for which piece of the batch.
        backward: in which direction.
    """

    stage: int
    micro_batch: int
    backward: bool = False


Schedule = Callable[[int, int, int, int], Iterator[Action]]
"""From a rank, how many ranks, micro-batches and stages a rank there are, to what that rank does, in order."""

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class ActionSpan:
    """When a rank does an action, in seconds, or in units.

    Attributes:
        rank: who.
        action: what.
        start, stop: when.
    """

    rank: int
    action: Action
    start: float
    stop: float


def timed(
    schedule: Schedule,
    ranks: int,
    micro_batches: int,
    chunks: int = 1,
    cost: Callable[[Action], float] = lambda action: 1.0,
    transfer: float = 0.0,
) -> tuple[ActionSpan, ...]:
    """Returns when each action runs, each as soon as it can, by rank and time.

    Args:
        schedule: what each rank does, in order.
        ranks, micro_batches, chunks: the schedule's.
        cost: how long an action takes.
        transfer: how long what one stage has made is on its way to the next.

    Raises:
        ValueError: the schedule cannot be run: its ranks wait for each other.
    """
    left = [list(schedule(rank, ranks, micro_batches, chunks)) for rank in range(ranks)]
    done: dict[Action, float] = {}
    spans: list[list[ActionSpan]] = [[] for _ in range(ranks)]
    while any(left):
        moved = False
        for rank in range(ranks):
            while left[rank] and all(before in done for before in _needs(left[rank][0], ranks * chunks)):
                action = left[rank].pop(0)
                ready = [
                    done[before] + transfer * (before.stage != action.stage)
                    for before in _needs(action, ranks * chunks)
                ]
                start = max([*ready, spans[rank][-1].stop if spans[rank] else 0.0])
                done[action] = start + cost(action)
                spans[rank].append(ActionSpan(rank, action, start, done[action]))
                moved = True
        if not moved:
            raise ValueError(f"all ranks wait, and {sum(map(len, left))} actions are left")
    return tuple(span for each in spans for span in each)


def bubble(spans: Sequence[ActionSpan]) -> float:
    """Returns the part of the time, from the first start to the last stop, in which the ranks idle, on average."""
    length = max(span.stop for span in spans) - min(span.start for span in spans)
    busy = sum(span.stop - span.start for span in spans)
    return 1.0 - busy / (length * len({span.rank for span in spans})) if length else 0.0


def in_flight(actions: Iterable[Action]) -> int:
    """Returns how many forward passes one rank has done at most whose backward has not been."""
    count = most = 0
    for action in actions:
        count += -1 if action.backward else 1
        most = max(most, count)
    return most


def draw(spans: Sequence[ActionSpan]) -> str:
    """Draws a schedule whose actions take a unit each, one row a rank.

    2 is the forward of micro-batch 2, 2' its backward, a dot a unit in which nothing is done. Where ranks have several
    stages, a letter says which of the rank's own it is.
    """
    ranks = 1 + max(span.rank for span in spans)
    several = any(span.action.stage >= ranks for span in spans)
    cells = [["."] * round(max(span.stop for span in spans)) for _ in range(ranks)]
    for span in spans:
        letter = _LETTERS[span.action.stage // ranks] if several else ""
        cells[span.rank][round(span.start)] = f"{letter}{span.action.micro_batch}{chr(39) * span.action.backward}"
    width = max(len(cell) for row in cells for cell in row)
    rows = (" ".join(cell.ljust(width) for cell in row).rstrip() for row in cells)
    return "\n".join(f"rank {rank}   {row}" for rank, row in enumerate(rows))


def _needs(action: Action, stages: int) -> list[Action]:
    stage, micro_batch = action.stage, action.micro_batch
    if not action.backward:
        return [Action(stage - 1, micro_batch)] if stage else []
    behind = [Action(stage + 1, micro_batch, backward=True)] if stage + 1 < stages else []
    return [Action(stage, micro_batch), *behind]
