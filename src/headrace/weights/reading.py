"""Reads tensors, or parts of them, from safetensors files into memory that is there, several pieces at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor, nn

from headrace.devices import HOST
from headrace.weights.files import StoredTensor

_CHUNK = 8 << 20
_AT_ONCE = 8
_LEAST_RUN = 16 << 10
"""Bytes of a slice that lie together, from which on they are read by themselves: shorter ones with all between them."""

Target = tuple[StoredTensor, int, Tensor]
"""A stored tensor, the first of its elements that are wanted, and where they go, `(elements,)`, contiguous."""


@dataclass(frozen=True)
class StoredValues:
    """Where the first values of a model's parameters and buffers are.

    Attributes:
        tensors: by the first of the names that the model has for each.
    """

    tensors: Mapping[str, StoredTensor]

    def read(self, module: nn.Module, tensors: Iterable[tuple[str, Tensor]] | None = None) -> None:
        """Reads a model's parameters and buffers, or named ones of them, whole.

        What is not stored, or has no memory, stays as it is.
        """
        every = chain(module.named_parameters(), module.named_buffers()) if tensors is None else tensors
        found = {name: each.detach() for name, each in every if name in self.tensors and not each.is_meta}
        apart = {
            name: torch.empty(each.shape, dtype=each.dtype) for name, each in found.items() if not each.is_contiguous()
        }
        self.read_parts((name, 0, apart.get(name, each).view(-1)) for name, each in found.items())
        for name, value in apart.items():
            found[name].copy_(value)

    def only(self, names: Iterable[str]) -> StoredValues:
        """Returns where the values of some parameters and buffers are."""
        return StoredValues({name: self.tensors[name] for name in names if name in self.tensors})

    def sliced(self, runs: Mapping[str, int], rank: int, world: int) -> StoredValues:
        """Returns where a rank's slices are: of named tensors every `world`-th run of so many elements."""
        found = dict(self.tensors)
        for name in runs.keys() & found.keys():
            found[name] = replace(found[name], run=runs[name], rank=rank, world=world)
        return StoredValues(found)

    def read_parts(self, parts: Iterable[tuple[str, int, Tensor]]) -> None:
        """Reads elements of flattened tensors: a name, the first element, and where they go, flat and contiguous."""
        fill((self.tensors[name], start, part) for name, start, part in parts if name in self.tensors)


def fill(targets: Iterable[Target]) -> None:
    """Reads elements into tensors, several chunks at once; a DataError if a file cannot be read, or has changed."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        # Each result is asked for, so that an error is raised.
        for _ in pool.map(_fill_chunk, _chunks(targets)):
            pass


def _chunks(targets: Iterable[Target]) -> Iterator[Target]:
    for stored, start, target in targets:
        most = max(1, _CHUNK // getattr(torch, stored.dtype).itemsize // stored.world)
        for at in range(0, len(target), most):
            yield stored, start + at, target[at : at + most]


def _fill_chunk(chunk: Target) -> None:
    stored, start, target = chunk
    dtype = getattr(torch, stored.dtype)
    in_place = target.dtype == dtype and target.device.type == HOST
    content = target if in_place else torch.empty(len(target), dtype=dtype)
    if not stored.run:
        _read(stored, start, content)
    elif stored.extents[0].file.remote is None and stored.run * dtype.itemsize >= _LEAST_RUN:
        at = 0
        while at < len(content):
            length = min(len(content) - at, stored.run - (start + at) % stored.run)
            _read(stored, stored.place(start + at), content[at : at + length])
            at += length
    elif len(content):
        first = stored.place(start)
        between = torch.empty(stored.place(start + len(content) - 1) + 1 - first, dtype=dtype)
        _read(stored, first, between)
        places = stored.place(torch.arange(start, start + len(content)))
        content.copy_(between[places - first])
    if not in_place:
        target.copy_(content)


def _read(stored: StoredTensor, start: int, content: Tensor) -> None:
    at = 0
    for extent in stored.parts(start, len(content)):
        part = content[at : at + extent.elements]
        extent.file.read_into(extent.begin, part.view(torch.uint8).numpy().data)
        at += extent.elements


def chunks(stored: StoredTensor) -> Iterator[Tensor]:
    """Yields the bytes of a tensor, one chunk after the other."""
    dtype = getattr(torch, stored.dtype)
    most = _CHUNK // dtype.itemsize
    for start in range(0, stored.elements, most):
        content = torch.empty(min(most, stored.elements - start), dtype=dtype)
        _read(stored, start, content)
        yield content.view(torch.uint8)


def same_content(one: StoredTensor, other: StoredTensor) -> bool:
    """Tells whether two stored tensors have the same form and bytes."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(torch.equal(each, again) for each, again in zip(chunks(one), chunks(other), strict=True))
