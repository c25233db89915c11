"""What the schedules are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
