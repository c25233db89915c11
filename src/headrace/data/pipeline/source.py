"""Sources of examples by index, and how examples become a batch."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import default_collate

from headrace.errors import DataError, UsageError
from headrace.trees import UNSIGNED, map_tensors, nbytes

_MOST_HASHED = 1 << 30
"""Most bytes of arrays that are hashed to recognize them: a second or two."""

_SAMPLED = 16
"""Most examples whose bytes are compared between hosts."""

SOURCE = "the source"
"""What messages and measurements call the first stage of a pipeline."""

_SMALL = 1 << 15
"""Numbers that torch copies on one thread (`at::internal::GRAIN_SIZE`)."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """One pass over the data.

    Attributes:
        seed: of its order and its random numbers.
        number: counted from 0.

    Examples:
        >>> first, second = hr.data.Epoch(seed=0, number=0), hr.data.Epoch(seed=0, number=1)
        >>> first == second
        False
    """

    seed: int
    number: int


class Source(ABC):
    """Examples by index. Several threads may read one, and several processes copies of one, at the same time.

    Examples:
        >>> class Squares(hr.data.Source):
        ...     def __len__(self):
        ...         return 10
        ...     def example(self, index, epoch):
        ...         return index**2
        >>> Squares().example(3, hr.data.Epoch(0, 0))
        9
    """

    @abstractmethod
    def __len__(self) -> int:
        """Number of examples."""

    @abstractmethod
    def example(self, index: int, epoch: Epoch) -> Any:
        """Returns one example: a tuple, a dict, or whatever the data set is made of."""

    @property
    def identity(self) -> str:
        """Identifies the data, so that a cache of it can be found again; "" if it cannot be identified."""
        return ""

    def gather(self, indices: Tensor, epoch: Epoch) -> Any:
        """Returns the batch of the examples at `indices`, `(examples,)` int64."""
        wanted = indices.tolist()
        if not wanted:
            # The shapes are those of an example.
            return emptied(self.collate([self._named_in_errors(0, epoch)]))
        return self.collate(self.many(wanted, epoch))

    def many(self, indices: list[int], epoch: Epoch) -> Sequence[Any]:
        """Returns several examples."""
        return [self._named_in_errors(index, epoch) for index in indices]

    def collate(self, examples: Sequence[Any]) -> Any:
        """Returns the batch of one or more examples."""
        return collate(examples)

    def key(self, index: int) -> str:
        """Returns the name of an example for messages."""
        return f"example {index}"

    def nbytes(self, index: int) -> int | None:
        """Returns about how many bytes an example is read from; None if unknown."""
        return None

    @property
    def stacks(self) -> bool:
        """Whether `collate` is the default."""
        return type(self).collate is Source.collate

    def _named_in_errors(self, index: int, epoch: Epoch) -> Any:
        try:
            return self.example(index, epoch)
        except DataError:
            # Its message names the example.
            raise
        except Exception as error:
            raise unreadable(self.key(index), SOURCE, error) from error

    @property
    def lasting(self) -> bool:
        """Whether an example is the same in every epoch."""
        return True

    @property
    def one_reader(self) -> bool:
        """Whether it is read by one reader at a time, unless the user says otherwise."""
        return False


class ArraySource(Source):
    """Tensors `(examples, ...)` in host memory, in a tuple or by name."""

    def __init__(self, arrays: tuple[Tensor, ...] | Mapping[str, Tensor]) -> None:
        named = arrays if isinstance(arrays, Mapping) else dict(enumerate(arrays))
        if not named:
            raise DataError("the data has no arrays; give at least one, from_arrays(images, labels)")
        lengths = {name: len(array) for name, array in named.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name}: {length}" for name, length in lengths.items())
            raise DataError(
                f"the arrays differ in length ({listed}); each needs one entry for every example, so cut "
                f"them to {min(lengths.values())} or find what is missing"
            )
        self._names = tuple(arrays) if isinstance(arrays, Mapping) else None
        self._arrays = tuple(named.values())
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length

    def example(self, index: int, epoch: Epoch) -> Any:
        return self._tree([array[index] for array in self._arrays])

    @property
    def identity(self) -> str:
        if sum(map(nbytes, self._arrays)) > _MOST_HASHED:
            return ""
        return f"arrays {_fingerprint(self._names, self._arrays)}"

    def sample_digest(self) -> str:
        """Returns a digest of the arrays' shapes and types, and of a few examples from the first to the last."""
        rows = torch.linspace(0, self._length - 1, min(_SAMPLED, self._length)).long()
        shapes = [(tuple(array.shape), str(array.dtype)) for array in self._arrays]
        return _fingerprint(self._names, shapes, [take_rows(array, rows) for array in self._arrays])

    def gather(self, indices: Tensor, epoch: Epoch) -> Any:
        return self._tree([take_rows(array, indices) for array in self._arrays])

    def _tree(self, tensors: list[Tensor]) -> Any:
        if self._names is None:
            return tuple(tensors)
        return dict(zip(self._names, tensors, strict=True))


def _fingerprint(*values: Any) -> str:
    # Imported for those alone that keep a cache, or compare their data with other hosts'.
    from headrace.data.cache.fingerprint import fingerprint

    return fingerprint(*values)


def require_whole(what: str, value: Any, least: int = 1, remedy: str = "") -> None:
    """Raises a UsageError unless `value` is an int of at least `least`; `what` is "size must be", say."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"{what} a whole number of at least {least}, got {value!r}{remedy}")


def unreadable(which: str, who: str, error: Exception) -> DataError:
    """Returns the error for an example that user code could not read or transform."""
    return DataError(f"{which} cannot be had: {who} raised {type(error).__name__}: {error}").with_remedy(
        "repair that example, or leave it out of the data"
    )


def take_rows(array: Tensor, indices: Tensor) -> Tensor:
    """Returns the entries of an array `(examples, ...)` at `indices`, `(rows,)` int64."""
    if array.dim() == 1 and array.dtype in UNSIGNED:
        # Of these types, `index_select` takes rows, but not single numbers.
        return array[indices]
    return array.index_select(0, indices)


def as_tensor(value: Any, where: str) -> Tensor:
    """Returns a tensor or array `(examples, ...)` as a tensor in host memory, without a copy if possible."""
    if isinstance(value, np.ndarray):
        value = _from_numpy(value, where)
    if not isinstance(value, Tensor):
        raise DataError(
            f"{where} is a {type(value).__name__}, not a tensor or array; convert it by torch.as_tensor(...)"
        )
    if value.dim() == 0:
        raise DataError(f"{where} is a single number; it needs a first dim with one entry for every example")
    if value.device.type != "cpu":
        raise DataError(f"{where} lies on {value.device}; give it as .cpu(), workers bring their share to their device")
    return value.detach()


def _from_numpy(array: np.ndarray[Any, Any], where: str) -> Tensor:
    # torch supports neither foreign byte order, nor negative strides, nor numbers that lie between others' bytes.
    size = max(array.itemsize, 1)
    if not array.dtype.isnative or any(stride < 0 or stride % size for stride in array.strides):
        array = array.astype(array.dtype.newbyteorder("="), order="C")
    try:
        with warnings.catch_warnings():
            # It warns about read-only memory (of a mapped file); nothing writes to it here.
            warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
            return torch.from_numpy(array)
    except TypeError as error:
        raise DataError(
            f"{where} has numpy's type {array.dtype}, which no tensor has; encode it as numbers first"
        ) from error


def collate(examples: Sequence[Any]) -> Any:
    """Stacks examples as torch's `default_collate` does, but keeps tuples as tuples."""
    try:
        return _collated(list(examples))
    except DataError:
        raise
    except (RuntimeError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise DataError(
            f"{len(examples)} examples do not make one batch: {error}; give them one form in a map"
        ) from error


def _collated(examples: list[Any]) -> Any:
    first = examples[0]
    if type(first) in (tuple, list):
        return type(first)(_collated(list(column)) for column in zip(*examples, strict=True))
    if type(first) is dict:
        return {name: _collated(column) for name, column in _columns(examples).items()}
    if type(first) in (Tensor, np.ndarray):
        return _stacked(examples)
    return default_collate(examples)


def _columns(examples: Sequence[Mapping[Any, Any]]) -> dict[Any, list[Any]]:
    """Returns the values of dicts by name; a DataError if one has other names than the first."""
    names = examples[0].keys()
    for example in examples:
        if example.keys() != names:
            name = next(iter(names ^ example.keys()))
            raise DataError(
                f"some examples of a batch have {name!r} and others have not; give all the same names in a map, or "
                "leave out those without it by a filter"
            )
    return {name: [example[name] for example in examples] for name in names}


def _tensors(examples: Sequence[Any]) -> list[Tensor]:
    try:
        return [
            _from_numpy(example, "an example") if isinstance(example, np.ndarray) else torch.as_tensor(example)
            for example in examples
        ]
    except (RuntimeError, TypeError, ValueError) as error:
        raise DataError(f"an example of a batch is no tensor: {error}; make it numbers in a map") from error


def _stacked(examples: Sequence[Any]) -> Tensor:
    tensors = _tensors(examples)
    first = tensors[0]
    other = next((tensor for tensor in tensors if tensor.shape != first.shape), None)
    if other is not None:
        raise DataError(
            f"examples of a batch differ in shape, {list(first.shape)} and {list(other.shape)}: let .batch(pad=0) fill "
            "them up along their first dim, or give them one shape in a map"
        )
    alike = all(tensor.dtype == first.dtype and tensor.device.type == "cpu" for tensor in tensors)
    if not alike or first.numel() * len(tensors) < _SMALL:
        return torch.stack(tensors)
    # By numpy, since torch would take threads from training.
    batch = first.new_empty((len(tensors), *first.shape))
    for row, tensor in zip(_bytes(batch.view(len(tensors), -1)), tensors, strict=True):
        row[:] = _bytes(tensor.contiguous().flatten())
    return batch


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    """Returns the memory of a tensor whose last dim is contiguous."""
    return tensor.detach().resolve_conj().view(torch.uint8).numpy()


def emptied(batch: Any) -> Any:
    """Returns the batch of no examples: tensors have length 0, and lists of text, bytes and the like are empty."""
    if type(batch) is dict:
        return {name: emptied(value) for name, value in batch.items()}
    if type(batch) is list and not all(isinstance(item, Tensor | Mapping | tuple | list) for item in batch):
        return []
    if type(batch) in (tuple, list):
        return type(batch)(map(emptied, batch))
    return map_tensors(lambda tensor: tensor[:0], batch)


def padded(examples: Sequence[Any], value: float, length: int | None = None) -> Any:
    """Returns the batch of examples that differ in their first dim, padded with `value` at its end.

    They are padded to `length`, or to the longest of them.
    """
    first = examples[0]
    if isinstance(first, Mapping):
        return {name: padded(column, value, length) for name, column in _columns(examples).items()}
    if isinstance(first, tuple):
        return tuple(padded(column, value, length) for column in zip(*examples, strict=True))
    if not isinstance(first, Tensor | np.ndarray | list):
        return collate(examples)
    tensors = _tensors(examples)
    if any(tensor.dim() == 0 for tensor in tensors):
        return collate(tensors)
    if len({(tensor.shape[1:], tensor.dtype) for tensor in tensors}) > 1:
        shapes = sorted({f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for tensor in tensors})
        raise DataError(f"examples of a batch differ in more than their first dim: {' and '.join(shapes[:4])}")
    longest = max(len(tensor) for tensor in tensors)
    if length is not None and longest > length:
        raise DataError(f"an example is {longest} long, and pad_to is {length}; cut it in a map, or raise pad_to")
    batch = tensors[0].new_full((len(tensors), length or longest, *tensors[0].shape[1:]), value)
    for row, tensor in zip(batch, tensors, strict=True):
        row[: len(tensor)] = tensor
    return batch
