"""What every schedule is: an order of actions for each rank; when each action runs, how long ranks idle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


class PassKind(StrEnum):
    """What a rank does with a micro-batch in a stage. A backward pass is one action, or two."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward for the input"
    BACKWARD_WEIGHT = "backward for the weights"


_MARKS = {PassKind.FORWARD: "", PassKind.BACKWARD: "'", PassKind.BACKWARD_INPUT: "'", PassKind.BACKWARD_WEIGHT: '"'}


@dataclass(frozen=True)
class Action:
    """One pass of a micro-batch through a stage."""

    stage: int
    micro_batch: int
    kind: PassKind = PassKind.FORWARD

    @property
    def backward(self) -> bool:
        """Whether it is a backward pass, or a part of one."""
        return self.kind is not PassKind.FORWARD

    @property
    def makes(self) -> Action:
        """The action that others wait for: of a whole backward pass the part that makes the input's gradient."""
        return replace(self, kind=PassKind.BACKWARD_INPUT) if self.kind is PassKind.BACKWARD else self


@dataclass(frozen=True)
class PipelineSchedule(ABC):
    """In which order the ranks of a pipeline do the passes of a batch.

    A schedule with several stages a rank (`chunks`), or with another placement of stages, overrides `stages` or
    `rank_of`.
    """

    ranks: int
    micro_batches: int
    chunks: int = 1

    def stages(self) -> int:
        """Returns into how many stages the model is cut."""
        return self.ranks

    def rank_of(self, stage: int) -> int:
        """Returns the rank that holds a stage."""
        return stage % self.ranks

    @abstractmethod
    def actions(self, rank: int) -> Iterator[Action]:
        """Yields what a rank does with a batch, in order."""

    def orders(self) -> list[list[Action]]:
        """Returns what each rank does."""
        return [list(self.actions(rank)) for rank in range(self.ranks)]

    def placement(self) -> list[int]:
        """Returns the rank of each stage."""
        return [self.rank_of(stage) for stage in range(self.stages())]

    def held(self, stage: int) -> int:
        """Returns the most micro-batches of which a stage keeps something at a time, until its last backward pass."""
        return in_flight((each for each in self.actions(self.rank_of(stage)) if each.stage == stage), weights=True)


@lru_cache(maxsize=64)
def held_by_stage(schedule: PipelineSchedule) -> tuple[int, ...]:
    """Returns of how many micro-batches each stage keeps something at most; a plan asks for it again and again."""
    return tuple(schedule.held(stage) for stage in range(schedule.stages()))


@dataclass(frozen=True)
class ActionSpan:
    """When a rank does an action, in seconds or in units."""

    rank: int
    action: Action
    start: float
    stop: float


def timed(
    orders: Sequence[Iterable[Action]], cost: Callable[[Action], float] = lambda action: 1.0, transfer: float = 0.0
) -> tuple[ActionSpan, ...]:
    """Returns when each action runs, each as soon as it can, by rank and time.

    A value or gradient takes `transfer` from one stage to the next. Raises a `ValueError` if ranks wait for each other.
    """
    left = [list(order) for order in orders]
    last = max((action.stage for order in left for action in order), default=0)
    done: dict[Action, float] = {}
    spans: list[list[ActionSpan]] = [[] for _ in left]
    while any(left):
        moved = False
        for rank, order in enumerate(left):
            while order and all(before in done for before in needs(order[0], last)):
                action = order.pop(0)
                needed = needs(action, last)
                ready = [done[before] + transfer * (before.stage != action.stage) for before in needed]
                start = max([*ready, spans[rank][-1].stop if spans[rank] else 0.0])
                stop = done[action.makes] = start + cost(action)
                spans[rank].append(ActionSpan(rank, action, start, stop))
                moved = True
        if not moved:
            raise ValueError(f"all ranks wait, and {sum(map(len, left))} actions are left")
    return tuple(span for each in spans for span in each)


def bubble(spans: Sequence[ActionSpan]) -> float:
    """Returns the part of the time, from the first start to the last stop, in which the ranks idle, on average."""
    length = max(span.stop for span in spans) - min(span.start for span in spans)
    busy = sum(span.stop - span.start for span in spans)
    return 1.0 - busy / (length * len({span.rank for span in spans})) if length else 0.0


def in_flight(actions: Iterable[Action], weights: bool = False) -> int:
    """Returns how many forward passes of one rank wait at most for their backward pass at a time.

    Of a backward pass in two parts the second one ends the wait if `weights`, else the first.
    """
    neutral = PassKind.BACKWARD_INPUT if weights else PassKind.BACKWARD_WEIGHT
    count = most = 0
    for action in actions:
        if action.kind is not neutral:
            count += 1 if action.kind is PassKind.FORWARD else -1
        most = max(most, count)
    return most


def draw(spans: Sequence[ActionSpan]) -> str:
    """Draws a schedule whose actions take a unit each, one row a rank.

    2 is the forward of micro-batch 2, 2' its backward, a dot a unit in which nothing is done. Of a backward in two
    parts 2' is that for the input and 2" that for the weights. Where ranks have several stages, a letter says which of
    the rank's own it is.
    """
    ranks = 1 + max(span.rank for span in spans)
    several = any(span.action.stage >= ranks for span in spans)
    cells = [["."] * round(max(span.stop for span in spans)) for _ in range(ranks)]
    for span in spans:
        letter = _LETTERS[span.action.stage // ranks] if several else ""
        cells[span.rank][round(span.start)] = f"{letter}{span.action.micro_batch}{_MARKS[span.action.kind]}"
    width = max(len(cell) for row in cells for cell in row)
    rows = (" ".join(cell.ljust(width) for cell in row).rstrip() for row in cells)
    return "\n".join(f"rank {rank}   {row}" for rank, row in enumerate(rows))


def needs(action: Action, last: int) -> list[Action]:
    """Returns what must be done before an action, as `Action.makes`; `last` is the last stage."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind is PassKind.FORWARD:
        return [Action(stage - 1, micro_batch)] if stage else []
    if action.kind is PassKind.BACKWARD_WEIGHT:
        return [Action(stage, micro_batch, PassKind.BACKWARD_INPUT)]
    behind = [Action(stage + 1, micro_batch, PassKind.BACKWARD_INPUT)] if stage < last else []
    return [Action(stage, micro_batch), *behind]
