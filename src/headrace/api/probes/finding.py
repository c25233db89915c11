"""What a probe finds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

NAMED = 3
"""Most names that a finding has; of the others it says how many."""


class Scope(StrEnum):
    """Where a finding makes a difference: `headrace doctor job.py` says all of them."""

    SHARES = "several shares of a batch"
    WORKERS = "several workers, each with a share"
    PROCESSES = "several processes"
    OWN_MEANS = "several workers, each with the mean of its own share"
    PIECES = "several micro-batches in one process"
    EQUALITY = "a comparison with one device"
    EVALUATION = "evaluations, whatever the strategy"
    START = "how the model begins, whatever the strategy"
    STATE = "what checkpoints have not, whatever the strategy"


@dataclass(frozen=True)
class Finding:
    """One thing about a job that is told before the start.

    Attributes:
        what: what was found, with the numbers.
        where: the layer, buffer or part of the job.
        remedy: what to do about it.
        scope: where it makes a difference.
        refused: whether a run to which it matters is refused: nothing could make its numbers right.
    """

    what: str
    where: str
    remedy: str
    scope: Scope
    refused: bool = False

    @property
    def line(self) -> str:
        """The finding as one line."""
        return f"{self.where}: {self.what}; {self.remedy}"


def names_of(names: list[str]) -> str:
    """Returns the first names, quoted, and how many more there are."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(repr(name) for name in names[:NAMED]) + more
