"""Are a loader's first batches made of their examples one by one, and does reading change the data set?"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, TensorDataset, default_collate

from headrace.api.probes.finding import names_of
from headrace.data.pipeline.parts import COMBINES, PADS, differences
from headrace.training.user_code.trial import drawn
from headrace.training.user_code.untouched import same_generators, untouched

_LOOKS = 3
"""Batches that are looked at: the examples of one may be all alike."""
_MOST = 64
"""Attributes of a data set that are looked at."""


@dataclass(frozen=True)
class SaidBatch:
    """A batch with a line for the user."""

    batch: Any
    line: str


class WatchedCollate:
    """A user's collate function; its first batches say whether parts of it are made otherwise, or its data set changes.

    It also runs in reading processes.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], dataset: Any = None) -> None:
        self._collate, self._dataset = collate, dataset
        self._begun, self._left = _state(dataset), _LOOKS

    def __call__(self, examples: list[Any]) -> Any:
        if len(examples) < 2 or not self._left:
            return self._collate(examples)
        self._left -= 1
        line = self._of_state() or ("" if self._collate is default_collate else self._of_parts(examples))
        batch = self._collate(examples)
        if not line and self._left == _LOOKS - 1:
            line = self._of_reading()
        return SaidBatch(batch, line) if line else batch

    def _of_state(self) -> str:
        now = _state(self._dataset)
        changed = [name for name, value in self._begun.items() if name in now and value != now[name]]
        if not changed:
            return ""
        return (
            f"reading changes {names_of(changed)} of the data set, of which each process has its own, equal at the "
            "start: what it counts or draws is another thing than in one process; let an example depend on its index "
            "alone"
        )

    def _of_reading(self) -> str:
        """Returns a line where two examples are others when they are read together."""
        dataset, together = self._dataset, getattr(self._dataset, "__getitems__", None)
        if dataset is None or isinstance(dataset, list | TensorDataset):
            return ""

        def read(*indices: int) -> list[Any]:
            # Copies, as they may be views of what the next read writes to.
            return copy.deepcopy(together([*indices]) if callable(together) else [dataset[index] for index in indices])

        with torch.random.fork_rng(devices=[]), same_generators(), untouched(dataset):
            begins = drawn()
            try:
                found = dict(differences(read(0, 1), [read(0), read(1)], "example"))
            except Exception:
                # One that has other keys, or too few examples.
                return ""
            if not found or drawn() != begins:
                return ""
        return (
            f"examples that are read together are others than those read alone ({names_of(list(found))}): the data set "
            "combines or counts them, or gives views of one buffer, and each process reads its share; let an example "
            "depend on its index alone, in memory of its own"
        )

    def _of_parts(self, examples: list[Any]) -> str:
        """Returns a line where batches of parts of the examples are not the parts of their batch."""
        with torch.random.fork_rng(devices=[]), same_generators():
            begins = drawn()
            batches = []
            for low, high in ((0, len(examples)), (0, 1), (1, len(examples))):
                with untouched(self._collate, examples):
                    try:
                        batches.append(self._collate(examples[low:high]))
                    except Exception:
                        # One that takes no part says so where it is given its share.
                        return ""
            if drawn() != begins:
                return ""
        found = dict(differences(batches[0], batches[1:]))
        if not found:
            return ""
        problem = COMBINES if COMBINES in found.values() else PADS
        return (
            f"a batch {problem}, see {names_of(list(found))}, and each process makes one of its share: the result is "
            "that of one process only where model and loss do not look at it (what is padded and masked)"
        )


def _state(dataset: Any) -> dict[str, Any]:
    """Returns numbers and generators in attributes of a data set, also of those inside it, as far as they compare."""
    found: dict[str, Any] = {}
    waiting = deque([("", dataset)])
    for _ in range(_MOST):
        if not waiting or len(found) >= _MOST:
            break
        path, value = waiting.popleft()
        items = value if isinstance(value, dict) else getattr(value, "__dict__", {})
        for name, each in islice(items.items(), _MOST):
            where = f"{path}{name}"
            if isinstance(each, int | float):
                found[where] = each
            elif isinstance(each, random.Random):
                found[where] = each.getstate()
            elif isinstance(each, torch.Generator):
                found[where] = each.get_state().tolist()
            elif isinstance(each, np.random.Generator):
                found[where] = repr(each.bit_generator.state)
            elif isinstance(each, np.random.RandomState):
                found[where] = repr(each.get_state())
            elif isinstance(each, Dataset | dict):
                waiting.append((f"{where}.", each))
    return found
