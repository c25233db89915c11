"""One worker's part of one global batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Share:
    """What the data gives to one worker in one round.

    Attributes:
        batch: a tree of tensors `(examples, ...)`; of length 0 where the last batch had none for this worker.
        examples: how many this worker has.
        of: how many the global batch has.
        epoch: which visit of the data, from 0.
    """

    batch: Any
    examples: int
    of: int
    epoch: int
