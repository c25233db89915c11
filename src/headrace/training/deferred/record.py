"""What was done to tensors that have no memory: a list of operations, and what any tensor of it has, done again.

A tensor is known by its storage and its place in it, so that views need no entry. An entry makes storages or writes to
some. What a storage has at a point in the list is decided by the entries that write to it before, from the last one on
that overwrites it as a whole, and by what these read. Only they are done again.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from headrace.errors import JobError
from headrace.machine.allocator import give_back
from headrace.modules import memory_of
from headrace.trees import as_bytes, map_leaves, tensors_of


@dataclass(frozen=True)
class Region:
    """A tensor of a recorded storage; stride and offset in elements."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: Tensor) -> Region:
        return Region(
            memory_of(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())
        )

    def within(self, storage: torch.UntypedStorage) -> Tensor:
        """Returns it as a tensor with memory."""
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)

    @property
    def dense(self) -> bool:
        """Whether it has each element between its first and its last one once."""
        expected = 1
        for stride, size in sorted(zip(self.stride, self.size, strict=True)):
            if size == 1:
                continue
            if stride != expected:
                return False
            expected *= size
        return True


@dataclass(frozen=True)
class Entry:
    """An operation that was recorded.

    Attributes:
        args, kwargs: with a `Region` in the place of each tensor without memory.
        made: the tensors of its result, in order; of those that are in `fresh` it makes the storage.
        state: of the generator before it; None where it draws nothing.
        reads: storages whose content it needs.
        overwrites: the one that it gives another content as a whole; None for none.
    """

    func: Any
    args: Any
    kwargs: Mapping[str, Any]
    made: tuple[Region, ...]
    fresh: frozenset[int]
    reads: frozenset[int]
    overwrites: int | None
    state: Tensor | None


class Tape:
    """Operations on storages without memory, in their order."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._bytes: dict[int, int] = {}
        # With these references no other storage gets the address of one that is gone.
        self._references: dict[int, StorageWeakRef] = {}
        self._writers: dict[int, list[int]] = {}

    def has(self, tensor: Tensor) -> bool:
        """Tells whether a tensor is of a recorded storage."""
        return tensor.is_meta and memory_of(tensor) in self._bytes

    def bytes_of(self, storage: int) -> int:
        return self._bytes[storage]

    def living(self) -> set[int]:
        """Returns the storages that tensors still have."""
        return {storage for storage, reference in self._references.items() if not reference.expired()}

    def add(self, entry: Entry, written: Sequence[Tensor], made: Sequence[Tensor]) -> None:
        """Adds an entry that writes to some tensors and has made others."""
        for tensor in made:
            storage = memory_of(tensor)
            if storage in entry.fresh and storage not in self._bytes:
                self._bytes[storage] = tensor.untyped_storage().nbytes()
                self._references[storage] = StorageWeakRef(tensor.untyped_storage())
        for storage in {*map(memory_of, written), *entry.fresh}:
            self._writers.setdefault(storage, []).append(len(self.entries))
        self.entries.append(entry)

    @property
    def digest(self) -> int:
        """A number of 48 bits that differs where other operations, numbers or random states were recorded."""
        found = hashlib.sha256()
        for entry in self.entries:
            map_leaves(partial(_hash, found), (str(entry.func), entry.state, entry.args, dict(entry.kwargs)))
        return int.from_bytes(found.digest()[:6])

    def value(self, view: Region, into: torch.UntypedStorage | None = None) -> Tensor:
        """Returns what a tensor has now, in host memory; nothing else keeps that memory.

        It is in the storage `into`, if there is one, where no operation makes the tensor's own.
        """
        # Small tensors that stay lie between large ones that are gone, whose memory would not be used again.
        give_back()
        order = sorted(self._needed(view.storage, len(self.entries)))
        last: dict[int, int] = {}
        for index in order:
            entry = self.entries[index]
            for storage in (*entry.reads, *entry.fresh, *(() if entry.overwrites is None else (entry.overwrites,))):
                last[storage] = index
        last[view.storage] = len(self.entries)
        storages: dict[int, torch.UntypedStorage] = {}
        if into is not None and not any(view.storage in self.entries[index].fresh for index in order):
            storages[view.storage] = into
        with torch.no_grad():
            for index in order:
                self._do(self.entries[index], storages)
                for storage in [each for each in storages if last.get(each, -1) <= index]:
                    del storages[storage]
            return view.within(self._storage(storages, view.storage))

    def _needed(self, storage: int, end: int) -> set[int]:
        """Returns the entries before `end` that decide what a storage has there."""
        found: set[int] = set()
        waiting = [(-end, storage)]
        seen = set()
        while waiting:
            before, each = heapq.heappop(waiting)
            if (before, each) in seen:
                continue
            seen.add((before, each))
            for index in reversed([index for index in self._writers.get(each, ()) if index < -before]):
                found.add(index)
                entry = self.entries[index]
                for read in entry.reads:
                    heapq.heappush(waiting, (-index, read))
                if entry.overwrites == each:
                    break
        return found

    def _storage(self, storages: dict[int, torch.UntypedStorage], storage: int) -> torch.UntypedStorage:
        # One that a later entry overwrites as a whole has not been made by an entry.
        if storage not in storages:
            storages[storage] = torch.UntypedStorage(self._bytes[storage])
        return storages[storage]

    def _do(self, entry: Entry, storages: dict[int, torch.UntypedStorage]) -> None:
        def real(_: str, leaf: Any) -> Any:
            return leaf.within(self._storage(storages, leaf.storage)) if isinstance(leaf, Region) else leaf

        args = map_leaves(real, entry.args)
        kwargs = {name: map_leaves(real, value) for name, value in entry.kwargs.items()}
        if entry.state is not None:
            kwargs["generator"] = torch.Generator()
            kwargs["generator"].set_state(entry.state)
        result = entry.func(*args, **kwargs)
        for view, tensor in zip(entry.made, tensors_of(result), strict=True):
            if view.storage not in entry.fresh:
                continue
            whole = tensor.untyped_storage()
            size = self._bytes[view.storage]
            here = replace(Region.of(tensor), storage=view.storage)
            if here != view or whole.nbytes() != size:
                raise JobError(
                    f"{entry.func} makes a tensor of another form with memory than without, {here} and {view}, so that "
                    "the model cannot be made in parts; leave out deferred=True"
                )
            storages[view.storage] = whole


def _hash(found: Any, _: str, leaf: Any) -> None:
    """Adds what an operation was given; what says by its address alone which object it is, is left out."""
    if isinstance(leaf, Tensor):
        found.update(as_bytes(leaf.contiguous()).numpy().tobytes())
    elif isinstance(leaf, Region):
        found.update(repr((leaf.dtype, leaf.size)).encode())
    elif isinstance(leaf, str | bool | int | float | complex):
        found.update(repr(leaf).encode())
