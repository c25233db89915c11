"""What a module returns: tensors, numbers and other objects, in trees of tuples, dicts and dataclasses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from headrace.errors import JobError
from headrace.trees import like

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


class AbsentObject:
    """Stands for an object that a module of another stage has made. Any use of it is an error."""

    def __init__(self, what: str) -> None:
        self.__dict__["_what"] = what

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            # copy, pytree and isinstance ask for names that an object need not have.
            raise AttributeError(name)
        missing(self.__dict__["_what"])

    def __bool__(self) -> bool:
        missing(self.__dict__["_what"])

    def __len__(self) -> int:
        missing(self.__dict__["_what"])

    def __getitem__(self, key: Any) -> Any:
        missing(self.__dict__["_what"])

    def __iter__(self) -> Any:
        missing(self.__dict__["_what"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        missing(self.__dict__["_what"])

    def __setattr__(self, name: str, value: Any) -> None:
        missing(self.__dict__["_what"])


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
    if is_dataclass(tree) and not isinstance(tree, type | Mapping | TensorLeaf | OpaqueLeaf):
        made = copy.copy(tree)
        for each in fields(tree):
            value = map_parts(function, getattr(tree, each.name), f"{name}.{each.name}")
            object.__setattr__(made, each.name, value)
        return made
    if isinstance(tree, Mapping):
        return like(tree, {key: map_parts(function, each, f"{name}[{key!r}]") for key, each in tree.items()})
    if isinstance(tree, tuple | list) and not isinstance(tree, torch.Size):
        items = [map_parts(function, value, f"{name}[{index}]") for index, value in enumerate(tree)]
        make: Callable[[Any], Any] = getattr(type(tree), "_make", type(tree))
        return make(items)
    return function(name, tree)


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
    map_parts(lambda name, leaf: found.append((name, leaf)), tree)
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
