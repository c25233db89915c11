"""Tensors in any tree of dicts, tuples, named tuples and lists: batches, outputs, state; and trees as JSON."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from headrace.errors import UsageError

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""Types that torch stores and converts, and for which most of its operations are missing."""
MOST_NUMBERS = 1_000
"""Of a tensor that becomes JSON."""


@runtime_checkable
class Wrapper(Protocol):
    """A tensor that is made of others, as those of quantised state are."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]: ...


def map_inner(function: Callable[[Tensor], Tensor], tensor: Any) -> Any:
    """Returns a tensor with `function(inner)` in the place of every one that it is made of; of a plain one, itself."""
    if not isinstance(tensor, Wrapper):
        return function(tensor)
    names, attributes = tensor.__tensor_flatten__()
    inner = {name: map_inner(function, getattr(tensor, name)) for name in names}
    kind: Any = type(tensor)
    return kind.__tensor_unflatten__(inner, attributes, *_outer(tensor))


def _outer(tensor: Any) -> tuple[torch.Size, tuple[int, ...]]:
    return tensor.shape, tensor.stride()


def parts_of(tensor: Any) -> list[Tensor]:
    """Returns the plain tensors that a tensor is made of; of a plain one, itself."""
    if not isinstance(tensor, Wrapper):
        return [tensor]
    return [part for name in tensor.__tensor_flatten__()[0] for part in parts_of(getattr(tensor, name))]


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the memory of a contiguous tensor as bytes; a ValueError for another, whose bytes lie apart."""
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {list(tensor.shape)} and strides {tensor.stride()} is not contiguous")
    # One value is contiguous whatever its strides are, and torch views only what has a last stride of 1 as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def cloned(tensor: Tensor) -> Tensor:
    """Returns a copy, also of a tensor that is made of others."""
    copied: Tensor = map_inner(torch.clone, tensor)
    return copied


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Returns the tree with `function(tensor)` in the place of every tensor."""
    return map_leaves(lambda _, leaf: function(leaf) if isinstance(leaf, Tensor) else leaf, tree)


def tensors_of(tree: Any) -> list[Tensor]:
    """Returns the tensors of a tree, in its order."""
    if isinstance(tree, Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, tuple | list) else ()
    return [tensor for value in values for tensor in tensors_of(value)]


def nbytes(tree: Any) -> int:
    """Returns how many bytes the tensors of a tree take."""
    if isinstance(tree, Tensor):
        return sum(part.numel() * part.element_size() for part in parts_of(tree))
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


def as_json(value: Any, tensors: list[Tensor]) -> Any:
    """Returns a tree as JSON: dicts and tuples as marked lists, tensors as their numbers in `tensors`.

    A tensor that is made of others is these and its class, which `torch.serialization.add_safe_globals` must name: as
    for torch's own files, nothing that a file names is imported. Raises a TypeError with the type that is none of them.
    """
    if isinstance(value, Wrapper):
        if _qualified(type(value)) not in _wrappers():
            raise TypeError(f"a {type(value).__name__}, which torch.serialization.add_safe_globals does not name,")
        names, attributes = value.__tensor_flatten__()
        inner = {name: getattr(value, name) for name in names}
        return {"wrapper": [_qualified(type(value)), as_json((inner, attributes, *_outer(value)), tensors)]}
    if type(value) not in (Tensor, nn.Parameter) and isinstance(value, Tensor):
        raise TypeError(f"a {type(value).__name__}")
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, Mapping):
        return {"dict": [[as_json(key, tensors), as_json(each, tensors)] for key, each in value.items()]}
    if type(value) in (tuple, list, torch.Size):
        items = [as_json(each, tensors) for each in value]
        return {"tuple": items} if isinstance(value, tuple) else items
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise TypeError(f"a {type(value).__name__}")


def from_json(plain: Any, tensor: Callable[[int], Tensor]) -> Any:
    """Returns the tree of which `as_json` has made this; `tensor` returns one by its number."""
    if isinstance(plain, list):
        return [from_json(each, tensor) for each in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "tensor":
        return tensor(int(content))
    if kind == "tuple":
        return tuple(from_json(each, tensor) for each in content)
    if kind == "dtype":
        return getattr(torch, content)
    if kind == "wrapper":
        name, made = content
        if name not in (known := _wrappers()):
            raise UsageError(
                f"the state holds {name}, which this process does not know; import what it is of, and name it by "
                "torch.serialization.add_safe_globals"
            )
        return known[name].__tensor_unflatten__(*from_json(made, tensor))
    return {from_json(key, tensor): from_json(each, tensor) for key, each in content}


def _wrappers() -> dict[str, Any]:
    return {_qualified(each): each for each in torch.serialization.get_safe_globals() if isinstance(each, type)}


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def plain(value: Any, what: str) -> Any:
    """Returns a value of a scheduler or optimizer as JSON values that `restored` makes exactly the same of.

    Raises a `UsageError` if it holds something that is no number, text or collection of them.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        # As text, because infinity is no JSON number.
        return {"float": repr(float(value))}
    if isinstance(value, Tensor) and value.numel() <= MOST_NUMBERS:
        return {"tensor": plain(value.tolist(), what), "dtype": str(value.dtype).removeprefix("torch.")}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [plain(item, what) for item in value]}
    if isinstance(value, dict):
        kind = "counter" if isinstance(value, Counter) else "dict"
        return {kind: [[plain(key, what), plain(item, what)] for key, item in value.items()]}
    raise UsageError(f"{what} holds a {type(value).__name__}, which a checkpoint cannot keep; use plain numbers")


def holds_tensor(made: Any) -> bool:
    """Tells whether `plain` has made this of something with a tensor."""
    if isinstance(made, dict):
        return "tensor" in made or any(map(holds_tensor, made.values()))
    return isinstance(made, list) and any(map(holds_tensor, made))


def restored(value: Any) -> Any:
    """Returns the value of which `plain` has made this."""
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = ((key, item) for key, item in value.items() if key != "dtype")
    if kind == "float":
        return float(inner)
    if kind == "tensor":
        return torch.tensor(restored(inner), dtype=getattr(torch, value["dtype"]))
    if kind in ("list", "tuple"):
        return {"list": list, "tuple": tuple}[kind](restored(item) for item in inner)
    pairs = {restored(key): restored(item) for key, item in inner}
    return Counter(pairs) if kind == "counter" else pairs


def described(value: Any) -> Any:
    """Returns JSON values that say what a value is: of a class or a function its name, of an object what it holds."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): described(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [described(each) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: described(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if name := getattr(value, "__qualname__", ""):
        return name
    held = getattr(value, "__dict__", None)
    return repr(value) if held is None else {"class": type(value).__qualname__, **described(held)}
