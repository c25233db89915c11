"""Tensors that a safetensors file has no form for, as several that it has: sparse ones, complex128, extra state.

    buffer/adjacency    sparse, COO  ─► buffer/adjacency|coo[5,5].indices, ...|coo[5,5].values
    parameter/wave      complex128   ─► parameter/wave|complex128        float64, real and imaginary parts last
    extra/layers.0      a tree       ─► extra/layers.0|json, extra/layers.0|0, ...|1    its tensors by number

Nothing is pickled: extra state must be made of tensors and of what JSON has.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from headrace.checkpoint.header import COMPLEX, FORM
from headrace.errors import UsageError
from headrace.modules import stateful_modules
from headrace.trees import as_json, from_json

_JSON = "|json"
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
    states: dict[str, Tensor] = {}
    for name, owner in stateful_modules(module):
        if not of(name):
            continue
        tensors: list[Tensor] = []
        try:
            text = json.dumps(as_json(owner.get_extra_state(), tensors))
        except TypeError as error:
            raise UsageError(
                f"get_extra_state of the module {name!r} has {error}, and nothing is pickled; return "
                "tensors, numbers, texts, None, and dicts, lists and tuples of them"
            ) from None
        states[f"extra/{name}{_JSON}"] = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        for index, tensor in enumerate(tensors):
            states[f"extra/{name}|{index}"] = tensor.detach().cpu().clone()
    return states


def load_extra_states(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Gives the modules of a module what `extra_states` returned; those that it has nothing of stay as they are."""
    for name, owner in stateful_modules(module):
        text = saved.get(f"extra/{name}{_JSON}")
        if text is not None:
            tree = json.loads(text.numpy().tobytes())
            owner.set_extra_state(from_json(tree, lambda index, name=name: saved[f"extra/{name}|{index}"].clone()))  # type: ignore[misc]
