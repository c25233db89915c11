"""Functions of the user's that make a batch of a list of examples, and how many of them such a batch holds.

A collator is given to a pipeline, as those of the transformers library are; the collate function of a `DataLoader` may
also leave out examples that are broken.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from headrace.data.pipeline.source import as_tensor
from headrace.errors import DataError
from headrace.trees import map_leaves, map_tensors


@runtime_checkable
class _OwnGenerator(Protocol):
    """A collator that draws random numbers from an attribute, as those of transformers that mask tokens do."""

    generator: Any
    return_tensors: str


@dataclass(frozen=True)
class Collator:
    """A function that takes a list of examples and returns their batch; `draws` says whether it has a parameter `rng`.

    What it returns becomes a tree of dicts, lists and tensors that have one entry for each example.
    """

    function: Callable[..., Any]
    draws: bool = False

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def __call__(self, examples: Sequence[Any], keys: Sequence[str], rng: Callable[[], np.random.Generator]) -> Any:
        """Returns the batch of one or more examples, whose names for messages are `keys`.

        The collator's random numbers come from `rng()` alone, so that a batch is the same when it is read again.
        """
        function = self.function
        given = {"rng": rng()} if self.draws else {}
        if isinstance(function, _OwnGenerator) and callable(function):
            # A copy, because several threads may read.
            function = copy.copy(function)
            drawn = rng()
            seed = int(drawn.integers(2**63))
            function.generator = torch.Generator().manual_seed(seed) if function.return_tensors == "pt" else drawn
        try:
            batch = function(list(examples), **given)
        except Exception as error:
            which = keys[0] if len(keys) == 1 else f"{keys[0]} to {keys[-1]}"
            said = " ".join(str(error).split())
            raise DataError(
                f"the collator {self.name} cannot make a batch of {which}: {type(error).__name__}: {said:.300}"
            ) from error
        return self._checked(batch, len(examples))

    def _checked(self, batch: Any, count: int) -> Any:
        """Returns the batch with plain dicts, as tensors; a `DataError` if it has not one entry for each example."""
        if isinstance(batch, Mapping):
            # The library's BatchEncoding is a Mapping and no dict.
            batch = {str(name): value for name, value in batch.items()}
            for name, value in batch.items():
                if isinstance(value, list) and value and not isinstance(value[0], str):
                    raise DataError(
                        f"the collator {self.name} returned a list as {name!r}; a batch is made of tensors: "
                        'pad the examples to one length, and give it return_tensors="pt"'
                    )
        elif not isinstance(batch, Tensor | np.ndarray | tuple | list):
            raise DataError(
                f"the collator {self.name} returned a {type(batch).__name__}; a batch is a dict of tensors, or a tuple "
                "of them"
            )
        return map_leaves(lambda name, leaf: self._leaf(name, leaf, count), batch)

    def _leaf(self, name: str, leaf: Any, count: int) -> Any:
        if isinstance(leaf, np.ndarray):
            leaf = as_tensor(leaf, name)
        if isinstance(leaf, Tensor) and (leaf.dim() == 0 or len(leaf) != count):
            raise DataError(
                f"the collator {self.name} returned {name} of shape {tuple(leaf.shape)} for {count} examples; its "
                "first dim must have one entry for each, so that a batch can be split among workers"
            )
        return leaf


def counted(collate: Callable[[Sequence[Any]], Any], examples: Sequence[Any]) -> tuple[Any, int, str]:
    """Returns the batch that `collate` makes of examples, how many it holds, and a line where that cannot be told.

    A batch has one entry for each example in at least one of its tensors or lists; None stands for a broken example.

    Raises:
        DataError: the function fails.
    """
    given, broken = len(examples), sum(example is None for example in examples)
    if broken == given:
        return None, 0, ""
    try:
        batch = collate(examples)
    except DataError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())
        raise DataError(
            f"the collate function cannot make a batch of {given} examples: {type(error).__name__}: {said:.300}; one "
            "that leaves out examples gets lists of which none is left: let it return None for those, or let the data "
            "set give None for a broken example"
        ) from error
    return batch, *count_in(batch, given, given - broken)


def count_in(batch: Any, given: int, whole: int) -> tuple[int, str]:
    """Returns how many of `given` examples a batch holds, `whole` of which were not None; a line if that is unclear."""
    if batch is None:
        return 0, ""
    lengths = set(_lengths(batch))
    likely = {given, whole} & lengths
    if not likely:
        # The batch may be the second dim of all, as of sequences side by side.
        seconds: set[int] = set()
        map_tensors(lambda tensor: seconds.add(tensor.shape[1] if tensor.dim() > 1 else -1), batch)
        if seconds in ({given}, {whole}):
            return seconds.pop(), ""
    if len(likely) == 1:
        return likely.pop(), ""
    if len(lengths) == 1 and not likely:
        (length,) = lengths
        if length < given:
            return length, ""
        if length % whole == 0:
            # Several views of each.
            return whole, ""
    said = ", ".join(map(str, sorted(lengths)[:8])) or "none"
    return given, (
        f"of {given} examples, {given - whole} of them None, the collate function made a batch whose tensors and lists "
        f"have the lengths {said}, so how many it left out cannot be told, and all {given} count; leave broken "
        "examples out of the data set, or use hr.data.from_torch(...).on_error('skip')"
    )


def _lengths(tree: Any) -> Iterator[int]:
    """Yields the lengths of a batch's tensors and of its inner lists and tuples."""
    for child in tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, list | tuple) else (tree,):
        if isinstance(child, Tensor | np.ndarray):
            if child.ndim:
                yield len(child)
        elif isinstance(child, list | tuple):
            yield len(child)
            if not all(isinstance(item, str | bytes | int | float) for item in child):
                yield from _lengths(child)
        elif isinstance(child, Mapping):
            yield from _lengths(child)
