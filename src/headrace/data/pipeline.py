"""What the data is: definitions. Nothing is read, shuffled or copied before a `Loader` runs them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.data.source import ArraySource, Source, as_tensor
from headrace.errors import DataError

__all__ = ["Pipeline", "Processes", "Transform", "from_arrays"]


@dataclass(frozen=True)
class Transform:
    """A function that every example goes through.

    Attributes:
        function: takes an example and returns one.
        draws: whether it has a parameter `rng` for a `numpy.random.Generator`.
    """

    function: Callable[..., Any]
    draws: bool


@dataclass(frozen=True)
class Processes:
    """Processes that read ahead for one worker, as a torch `DataLoader` was told to have.

    Attributes:
        count: how many; at least 1.
        prefetch_factor: batches that each may be ahead.
        start_method: how they begin, "fork" or "spawn"; None for Python's own choice.
        worker_init_fn: what each calls first, with its number.
        timeout_s: longest wait for a batch; 0 for no limit.
    """

    count: int
    prefetch_factor: int | None = None
    start_method: str | None = None
    worker_init_fn: Callable[[int], None] | None = None
    timeout_s: float = 0.0


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A data set and what is done to it, for any number of workers.

    Attributes:
        source: where examples come from.
        shuffled: whether every epoch has an order of its own; else the source's.
        seed: what the orders and the transforms' random numbers follow; None for the job's.
        transforms: what every example goes through, in turn.
        processes: who reads, if not the worker itself.

    Raises:
        DataError: the source is empty.
    """

    source: Source
    shuffled: bool = False
    seed: int | None = None
    transforms: tuple[Transform, ...] = ()
    processes: Processes | None = None

    def __post_init__(self) -> None:
        if len(self.source) == 0:
            raise DataError("the data set is empty: it has 0 examples; training needs at least 1")

    def __len__(self) -> int:
        return len(self.source)

    def shuffle(self, seed: int | None = None) -> Pipeline:
        """Gives every epoch an order of its own, over the whole data set.

        Args:
            seed: what the orders follow; None for the job's.
        """
        return dataclasses.replace(self, shuffled=True, seed=seed)

    def map(self, fn: Callable[..., Any]) -> Pipeline:
        """Lets every example go through a function.

        Args:
            fn: takes one example, a tuple or a dict as the data has it, and returns one. If it has a
                parameter `rng`, it gets a `numpy.random.Generator` there that depends on (seed, epoch,
                index) alone, so that augmentation is the same for any number of workers.
        """
        return dataclasses.replace(self, transforms=(*self.transforms, Transform(fn, _takes_rng(fn))))


def from_arrays(*arrays: Any) -> Pipeline:
    """Returns a pipeline over tensors or numpy arrays with one entry an example, or over one dict of them.

    An example of `from_arrays(images, labels)` is a tuple `(image, label)`; of a dict it is a dict.

    Args:
        arrays: `(examples, ...)` each. They are used where they are, so leave them unchanged meanwhile.

    Raises:
        DataError: their lengths differ, they are empty, or are neither tensors nor arrays.
    """
    if len(arrays) == 1 and isinstance(arrays[0], Mapping):
        named = {str(key): as_tensor(value, f"the array {key!r}") for key, value in arrays[0].items()}
        return Pipeline(ArraySource(named))
    numbered = (as_tensor(value, f"array {position}") for position, value in enumerate(arrays))
    return Pipeline(ArraySource(tuple(numbered)))


def _takes_rng(fn: Callable[..., Any]) -> bool:
    try:
        return "rng" in inspect.signature(fn).parameters
    except ValueError:  # some built-in functions do not tell their parameters
        return False
