"""Gives every worker the first one's tensors."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from headrace.checkpoint.forms import pack, unpack
from headrace.collectives.base import Collective
from headrace.errors import UsageError
from headrace.modules import beside_frozen, is_dense, restore
from headrace.trees import as_bytes


def broadcast(module: nn.Module, collective: Collective) -> None:
    """Gives every rank rank 0's parameters and buffers, as far as the ranks hold them."""
    broadcast_tensors((*module.parameters(), *module.buffers()), collective)
    _require_same_beside(module, collective)


def broadcast_tensors(tensors: Iterable[Tensor], collective: Collective) -> None:
    """Gives every rank rank 0's values, as far as the ranks hold the tensors."""
    for tensor in tensors:
        if tensor.is_meta:
            continue
        if not is_dense(tensor):
            _broadcast_sparse(tensor, collective)
            continue
        dense = tensor.data.contiguous()
        collective.broadcast(dense)
        if dense.data_ptr() != tensor.data_ptr():
            tensor.data.copy_(dense)


def _require_same_beside(module: nn.Module, collective: Collective) -> None:
    """Refuses scales of frozen parameters that are not rank 0's, whose parameters this rank has now; see modules."""
    beside = beside_frozen(module)
    if not beside:
        return
    names, state = sorted(beside), module.state_dict()
    digests = [zlib.crc32(as_bytes(state[name].cpu().contiguous()).numpy().data) for name in names]
    own = torch.tensor(digests, device=module.get_parameter(beside[names[0]]).device)
    first = own.clone()
    collective.broadcast(first)
    others = [name for name, mine, its in zip(names, own.tolist(), first.tolist(), strict=True) if mine != its]
    if collective.sum([float(bool(others))]) != [0.0]:
        raise UsageError(
            f"{', '.join(map(repr, others or names)):.200}: what the model's state_dict has beside frozen parameters "
            "(scales of numbers in 4 bits) is not the same in each process, and all have the first one's parameters; "
            "build the model from the same base, on the same kind of device"
        )


def _broadcast_sparse(tensor: Tensor, collective: Collective) -> None:
    """Gives every rank rank 0's elements of a sparse tensor."""
    own = torch.frombuffer(bytearray(pack({"": tensor.cpu()})), dtype=torch.uint8)
    # The others' may have other elements, and so another size.
    (size,) = collective.sum([float(len(own)) if collective.rank == 0 else 0.0])
    content = own if collective.rank == 0 else own.new_empty(int(size))
    content = content.to(tensor.device)
    collective.broadcast(content)
    if collective.rank != 0:
        restore(tensor, unpack(content.cpu().numpy().tobytes())[""])
