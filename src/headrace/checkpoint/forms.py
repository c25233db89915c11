"""Tensors that a safetensors file has no form for, as several that it has: sparse ones, complex128, extra state.

    buffer/adjacency    sparse, COO  ─► buffer/adjacency|coo[5,5].indices, ...|coo[5,5].values
    parameter/wave      complex128   ─► parameter/wave|complex128        float64, real and imaginary parts last
    extra/layers.0      a tree       ─► extra/layers.0|json, extra/layers.0|0, ...|1    its tensors by number

Nothing is pickled: extra state must be made of tensors and of what JSON has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from headrace.checkpoint.header import COMPLEX, FORM
from headrace.errors import UsageError
from headrace.modules import stateful_modules

_JSON = "|json"
_TUPLE = "tuple"
_TENSOR = "tensor"
_MAKE: dict[str, Callable[..., Tensor]] = {
    "coo": torch.sparse_coo_tensor,
    "csr": torch.sparse_csr_tensor,
    "csc": torch.sparse_csc_tensor,
    "bsr": torch.sparse_bsr_tensor,
    "bsc": torch.sparse_bsc_tensor,
}
_LAYOUTS = {
    torch.sparse_coo: "coo",
    torch.sparse_csr: "csr",
    torch.sparse_csc: "csc",
    torch.sparse_bsr: "bsr",
    torch.sparse_bsc: "bsc",
}


def encode(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns dense tensors of the types that the safetensors library has."""
    encoded: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for part, value in _parts(name, tensor):
            if value.dtype == torch.complex128:
                encoded[part + COMPLEX] = torch.view_as_real(value.resolve_conj())
            else:
                encoded[part] = value
    return encoded


def decode(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns what `encode` was given; a ValueError if the parts of a tensor do not fit together."""
    decoded: dict[str, Tensor] = {}
    sparse: dict[tuple[str, str, str], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.endswith(COMPLEX):
            name, tensor = name.removesuffix(COMPLEX), torch.view_as_complex(tensor.clone())
        match = FORM.fullmatch(name)
        if match:
            whole, kind, size, part = match.groups()
            sparse.setdefault((whole, kind, size), {})[part] = tensor
        else:
            decoded[name] = tensor
    for (whole, kind, size), parts in sparse.items():
        decoded[whole] = _joined(whole, kind, [int(length) for length in size.split(",") if length], parts)
    return decoded


def pack(tensors: Mapping[str, Tensor]) -> bytes:
    """Returns tensors of any form as a safetensors file."""
    dense = {name: tensor.contiguous() for name, tensor in encode(tensors).items()}
    content: bytes = save(dense)
    return content


def unpack(content: bytes) -> dict[str, Tensor]:
    """Returns what `pack` was given."""
    return decode(load(content))


def _parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    kind = _LAYOUTS.get(tensor.layout)
    if kind is None:
        yield name, tensor
        return
    tensor = tensor.detach()
    head = f"{name}|{kind}[{','.join(map(str, tensor.shape))}]"
    if kind == "coo":
        tensor = tensor.coalesce()
        yield f"{head}.indices", tensor.indices()
    else:
        by_row = kind in ("csr", "bsr")
        yield f"{head}.compressed", tensor.crow_indices() if by_row else tensor.ccol_indices()
        yield f"{head}.indices", tensor.col_indices() if by_row else tensor.row_indices()
    yield f"{head}.values", tensor.values()


def _joined(name: str, kind: str, size: Sequence[int], parts: Mapping[str, Tensor]) -> Tensor:
    order = ("indices", "values") if kind == "coo" else ("compressed", "indices", "values")
    try:
        given = [parts[part].clone() for part in order]
        joined = _MAKE[kind](*given, size=tuple(size), check_invariants=True)
        return joined.coalesce() if kind == "coo" else joined
    except (KeyError, RuntimeError) as error:
        raise ValueError(f"the parts of its sparse tensor {name!r} do not fit together: {error}") from error


def extra_states(module: nn.Module, of: Callable[[str], bool] = lambda name: True) -> dict[str, Tensor]:
    """Returns what the modules with `get_extra_state` have beside tensors, as tensors by name.

    `of` chooses among these modules, by name.

    Raises:
        UsageError: it has something that is no tensor and that JSON has no word for.
    """
    found: dict[str, Tensor] = {}
    for name, owner in stateful_modules(module):
        if not of(name):
            continue
        tensors: list[Tensor] = []
        text = json.dumps(_plain(owner.get_extra_state(), tensors, name))
        found[f"extra/{name}{_JSON}"] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        for index, tensor in enumerate(tensors):
            found[f"extra/{name}|{index}"] = tensor.detach().cpu().clone()
    return found


def load_extra_states(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Gives the modules of a module what `extra_states` returned; those that it has nothing of stay as they are."""
    for name, owner in stateful_modules(module):
        text = saved.get(f"extra/{name}{_JSON}")
        if text is not None:
            tree = json.loads(text.numpy().tobytes())
            owner.set_extra_state(_tree(tree, saved, f"extra/{name}|"))


def _plain(value: Any, tensors: list[Tensor], module: str) -> Any:
    """Returns a tree as JSON: dicts and tuples as marked lists, tensors as their numbers in `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return {_TENSOR: len(tensors) - 1}
    if isinstance(value, Mapping):
        return {"dict": [[_plain(key, tensors, module), _plain(each, tensors, module)] for key, each in value.items()]}
    if type(value) in (tuple, list):
        items = [_plain(each, tensors, module) for each in value]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise UsageError(
        f"get_extra_state of the module {module!r} has a {type(value).__name__}, and nothing is pickled; return "
        "tensors, numbers, texts, None, and dicts, lists and tuples of them"
    )


def _tree(plain: Any, saved: Mapping[str, Tensor], place: str) -> Any:
    if isinstance(plain, list):
        return [_tree(each, saved, place) for each in plain]
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == _TENSOR:
        return saved[f"{place}{int(content)}"].clone()
    if kind == _TUPLE:
        return tuple(_tree(each, saved, place) for each in content)
    return {_tree(key, saved, place): _tree(each, saved, place) for key, each in content}
