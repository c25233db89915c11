"""Batches and outputs: tensors in any tree of dicts, tuples, named tuples and lists."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""Types that torch stores and converts, and for which most of its operations are missing."""


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Returns the tree with `function(tensor)` in the place of every tensor."""
    return map_leaves(lambda _, leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def nbytes(tree: Any) -> int:
    """Returns how many bytes the tensors of a tree take."""
    if isinstance(tree, Tensor):
        return tree.numel() * tree.element_size()
    if isinstance(tree, Mapping):
        return sum(map(nbytes, tree.values()))
    return sum(map(nbytes, tree)) if isinstance(tree, tuple | list) else 0


def map_leaves(function: Callable[[str, Any], Any], tree: Any, name: str = "batch") -> Any:
    """Returns the tree with `function(name, leaf)` in the place of every leaf, whatever it is.

    Args:
        function: told where the leaf is, `batch['image'][0]`.
        tree: dicts keep their kind, where they can be written to, and named tuples too.
    """
    if isinstance(tree, Mapping):
        mapped = {key: map_leaves(function, value, f"{name}[{key!r}]") for key, value in tree.items()}
        return like(tree, mapped)
    if isinstance(tree, tuple | list):
        items = [map_leaves(function, value, f"{name}[{index}]") for index, value in enumerate(tree)]
        make: Callable[[Any], Any] = getattr(type(tree), "_make", type(tree))
        return make(items)
    return function(name, tree)


def like(tree: Mapping[Any, Any], mapped: dict[Any, Any]) -> Mapping[Any, Any]:
    """Returns mapped values as a mapping of the same kind as the tree, where that can be written to; else as a dict."""
    if type(tree) is dict or not isinstance(tree, MutableMapping):
        return mapped
    # Outputs that are dicts with attributes (Hugging Face's) are copied, since their constructors differ.
    made = copy.copy(tree)
    for key, value in mapped.items():
        made[key] = value
    return made


def widened(output: Any, half: torch.dtype | None) -> Any:
    """Returns a model's output, any tree, with its tensors of the half precision `half` widened to float32.

    Metrics, means of many numbers, would be wrong in half precision.
    """
    return output if half is None else map_tensors(lambda each: each.float() if each.dtype == half else each, output)
