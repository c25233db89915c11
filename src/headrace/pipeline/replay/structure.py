"""What a module returns: tensors, numbers and other objects, in trees of tuples, dicts and dataclasses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from headrace.errors import JobError
from headrace.trees import map_leaves

_CONSTANTS = (type(None), bool, int, float, str, torch.Size, torch.dtype, torch.device)


@dataclass(frozen=True)
class TensorLeaf:
    """Stands in a template for a tensor."""

    index: int


@dataclass(frozen=True)
class OpaqueLeaf:
    """Stands in a template for an object that cannot cross a cut; `kind` is its type's name.

    `given` is its place in the arguments of the call that returns it; "" for one that the call has made.
    """

    kind: str
    given: str = ""


def _refuse(absent: AbsentObject, *_: object, **__: object) -> NoReturn:
    missing(absent.__dict__["_what"])


class AbsentObject:
    """Stands for an object that a module of another stage has made. Any use of it is an error."""

    def __init__(self, what: str) -> None:
        self.__dict__["_what"] = what

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            # copy, pytree and isinstance ask for names that an object need not have.
            raise AttributeError(name)
        _refuse(self)

    __bool__ = __len__ = __getitem__ = __iter__ = __call__ = __setattr__ = _refuse


class AbsentTensor(Tensor):
    """Stands for a tensor that a module of another stage has made, and that nothing of this stage needs."""

    what: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        whats = [each.what for each in args if type(each) is AbsentTensor]
        missing(whats[0] if whats else "a tensor")


def absent_tensor(what: str) -> Tensor:
    """Returns a tensor any use of which is an error."""
    made = torch.empty(0).as_subclass(AbsentTensor)
    made.__dict__["what"] = what
    return made


def missing(what: str) -> NoReturn:
    """Refuses the use of what is on another stage."""
    raise JobError(
        f"forward uses {what}, which is on another stage and did not use it for the examples that the model was traced "
        "with; give every batch the same form, or put what makes it and what uses it into one submodule"
    )


def map_parts(function: Callable[[str, Any], Any], tree: Any, name: str = "output") -> Any:
    """Returns the tree with `function(name, leaf)` in the place of every leaf; looks into dataclasses, too."""

    def part(place: str, leaf: Any) -> Any:
        if not is_dataclass(leaf) or isinstance(leaf, type | TensorLeaf | OpaqueLeaf):
            return function(place, leaf)
        made = copy.copy(leaf)
        for each in fields(leaf):
            value = map_parts(function, getattr(leaf, each.name), f"{place}.{each.name}")
            object.__setattr__(made, each.name, value)
        return made

    return map_leaves(part, tree, name)


def template(tree: Any, arguments: Any = ()) -> tuple[Any, list[Tensor]]:
    """Returns the tree with leaves in the places of tensors and of objects that cannot be sent; and the tensors.

    `arguments` are those of the call that has returned it, which may have handed on objects that it got.
    """
    places: dict[int, str] = {}
    tensors: list[Tensor] = []

    def leaf(name: str, value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return TensorLeaf(len(tensors) - 1)
        if isinstance(value, _CONSTANTS):
            return value
        if not places:
            places.update({id(each): place for place, each in leaves_of(arguments)})
        return OpaqueLeaf(type(value).__name__, places.get(id(value), ""))

    return map_parts(leaf, tree), tensors


def leaves_of(tree: Any) -> list[tuple[str, Any]]:
    """Returns a template's leaves with their places, by which two templates are compared."""
    found: list[tuple[str, Any]] = []

    def note(name: str, leaf: Any) -> Any:
        found.append((name, leaf))
        return leaf

    map_parts(note, tree)
    return found


def fill(tree: Any, tensor: Callable[[int], Any], what: str, arguments: Any = ()) -> Any:
    """Returns a template with tensors in their places; what cannot be sent is `AbsentObject`, as `what`."""

    def leaf(name: str, value: Any) -> Any:
        if isinstance(value, TensorLeaf):
            return tensor(value.index)
        if not isinstance(value, OpaqueLeaf):
            return value
        return dict(leaves_of(arguments))[value.given] if value.given else AbsentObject(f"{what}, a {value.kind}")

    return map_parts(leaf, tree)
