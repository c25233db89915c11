"""Gives every worker the first one's tensors."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from headrace.checkpoint.forms import pack, unpack
from headrace.collectives.base import Collective
from headrace.modules import is_dense, restore


def broadcast(module: nn.Module, collective: Collective) -> None:
    """Gives every rank rank 0's parameters and buffers, as far as the ranks hold them."""
    broadcast_tensors((*module.parameters(), *module.buffers()), collective)


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
