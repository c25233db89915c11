"""The batches of all processes side by side, as Accelerate gives them: each process has one batch of the loader.

the loader's batches, of 3  | 4 0 7 | 2 6 1 | 9 3 5 | 8 |
for two processes           | 4 0 7   2 6 1 | 9 3 5   8 4 0 |    the last is completed by the first examples
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.utils.data import IterableDataset

from headrace.errors import UsageError


class Groups:
    """Joins the examples of small batches to batches of `whole` examples, and says which is the last.

    Args:
        whole: examples of a batch of all processes.
        multiple: a last batch is completed to a multiple of it, by the first examples; dropped with `drop_last`.
        drop_last: leaves out a last batch that is not whole.

    Attributes:
        count: batches of the iteration; None until its last one is given.
        real: examples of the last batch without those that complete it.
    """

    def __init__(self, whole: int, multiple: int, drop_last: bool) -> None:
        self.whole, self.multiple, self.drop_last = whole, multiple, drop_last
        self.count: int | None = None
        self.real = 0

    def join(self, parts: Iterable[Sequence[Any]]) -> Iterator[list[Any]]:
        """Yields the batches, each when it is known whether another one follows."""
        self.count = None
        held: list[Any] = []
        first: list[Any] = []
        pending: list[Any] = []
        given = size = 0
        for part in parts:
            size = size or len(part)
            if len(pending) % size:
                raise UsageError(
                    f"the loader has a batch of {len(pending) % size} examples between others of {size}, and batches "
                    "are divided evenly among processes: only the last may be shorter. Give it drop_last=True, or "
                    "batches of one size"
                )
            first += part[: self.multiple - len(first)]
            pending += part
            if len(pending) >= self.whole:
                if held:
                    yield held
                    given += 1
                held, pending = pending, []
        self.real = len(held)
        if pending and not self.drop_last:
            if held:
                yield held
                given += 1
            self.real = len(pending)
            held = [*pending, *itertools.islice(itertools.cycle(first), -len(pending) % self.multiple)]
        if held:
            self.count = given + 1
            yield held


class JoinedBatches:
    """A batch sampler: the batches of another one, joined for all processes."""

    def __init__(self, batches: Any, processes: int, size: int, drop_last: bool) -> None:
        whole = processes * size
        self._batches, self._processes = batches, processes
        self.groups = Groups(whole, whole, drop_last)
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[list[Any]]:
        return self.groups.join(list(batch) for batch in self._batches)

    def __len__(self) -> int:
        parts = len(self._batches)
        return parts // self._processes if self.drop_last else -(-parts // self._processes)


class JoinedStream(IterableDataset[Any]):
    """The examples of an iterable data set, the last batch completed so that all processes have as many.

    Each process gets an equal part of what is left, as Accelerate divides it, which need not be a whole batch.
    """

    def __init__(self, dataset: Any, processes: int, whole: int, drop_last: bool) -> None:
        self.dataset = dataset
        self.groups = Groups(whole, processes, drop_last)

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(self.groups.join([example] for example in self.dataset))

    def __len__(self) -> int:
        examples = len(self.dataset)
        left = examples % self.groups.whole
        return examples - left + (0 if self.groups.drop_last else left + -left % self.groups.multiple)


def set_epoch(loader: Any, epoch: int) -> None:
    """Tells a loader's samplers and data set which epoch it is, where they ask for it."""
    for each in (loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None), loader.dataset):
        tell: Callable[[int], object] | None = getattr(each, "set_epoch", None)
        if tell is not None:
            tell(epoch)
