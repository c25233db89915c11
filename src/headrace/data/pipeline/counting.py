"""How many examples does a batch hold that a user's collate function made: one may leave out those that are broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from headrace.errors import DataError
from headrace.trees import map_tensors


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
