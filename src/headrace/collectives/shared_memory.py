"""Collectives of the processes of one host, through shared memory.

A tensor is copied through a ring of two slots a rank, piece by piece, so that what one rank wrote is still in the cache
when the others read it:

    piece      0        1        2
    slot A   write    .        write      while slot B of piece 1 is being read,
    slot B     .      write    .          slot A may be written again: one barrier a piece

With two ranks each adds the other's slot to its own tensor. With more, rank r adds the r-th part of all slots
into slot 0 and the others copy it from there, which costs a second barrier and saves world - 2 passes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from headrace.collectives.base import ProcessGroup, add_in_order
from headrace.errors import UnfitMachine
from headrace.shared_memory.barrier import Barrier, never
from headrace.shared_memory.control_page import NUMBERS, ControlPage
from headrace.shared_memory.ends import FinishedRanks
from headrace.shared_memory.segment import SharedSegment

_SLOT_BYTES_OF_TWO = 384 * 1024
"""Two slots of each of two ranks stay in the cache of a core."""
_SLOT_BYTES_OF_MORE = 2 * 1024 * 1024
"""More ranks than cores are switched at every barrier, which costs more than a cache miss: fewer barriers."""
_DIRECT_BYTES = 16 * 1024


def slot_bytes(world: int) -> int:
    """Returns the length of each of a rank's two slots."""
    return _SLOT_BYTES_OF_TWO if world <= 2 else _SLOT_BYTES_OF_MORE


class SharedMemoryGroup(ProcessGroup):
    """The group of a host's processes, which all map the same control page.

    `check` is called while waiting, and raises where a peer was lost; `ends` is None where the page tells it; `is_gone`
    tells of a rank whether it is lost without ending the run, see `Barrier`.
    """

    def __init__(
        self,
        page: ControlPage,
        rank: int,
        check: Callable[[], None],
        ends: FinishedRanks | None = None,
        is_gone: Callable[[int], bool] = never,
    ) -> None:
        self.rank = rank
        self.world = len(page.ranks)
        self._page = page
        self.ends = ends or FinishedRanks([record.heartbeat for record in page.ranks])
        self._barrier = Barrier(page, rank, check, self.ends, is_gone)
        self.start_barrier = self._barrier.start
        self._check = check
        self._segments: list[SharedSegment] = []
        self._turn = 0
        self._slot_bytes = slot_bytes(self.world)
        self._slots: tuple[Tensor, ...] = ()
        self._rings: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        self.groups: list[SharedMemoryGroup] = []

    def subgroup(self, members: Sequence[int]) -> SharedMemoryGroup:
        nbytes = ControlPage.nbytes(len(members))
        own = SharedSegment.create(nbytes, "group") if self.rank == members[0] else None
        if own:
            self._page.ranks[self.rank].segment_offer.publish(os.getpid(), own.descriptor, nbytes)
        self.barrier()
        (segment,) = self._opened(own, members[:1])
        page = ControlPage(segment, len(members))
        # Which loops have ended is in the run's page.
        own_ends = self.ends.among(members)
        self.groups.append(SharedMemoryGroup(page, list(members).index(self.rank), self._check, own_ends))
        return self.groups[-1]

    def barrier(self) -> None:
        self._barrier.meet()

    def check(self, peer: int | None = None, broken: str = "") -> None:
        self._check()
        self._barrier.notice()

    def sum(self, values: Sequence[float]) -> list[float]:
        if len(values) > NUMBERS:
            return [*self.sum(values[:NUMBERS]), *self.sum(values[NUMBERS:])]
        self._turn ^= 1
        own = self._page.ranks[self.rank].numbers[self._turn]
        for index, value in enumerate(values):
            own[index] = value
        self.barrier()
        every = [record.numbers[self._turn] for record in self._page.ranks]
        return [add_in_order(numbers[index] for numbers in every) for index in range(len(values))]

    def share(self, nbytes: int) -> tuple[Tensor, ...]:
        own = SharedSegment.create(nbytes, f"rank-{self.rank}", lasting=True) if nbytes else None
        descriptor = own.descriptor if own else -1
        self._page.ranks[self.rank].segment_offer.publish(os.getpid(), descriptor, nbytes)
        self.barrier()
        offers = [record.segment_offer.nbytes for record in self._page.ranks]
        opened = iter(self._opened(own, [rank for rank, size in enumerate(offers) if size]))
        return tuple(next(opened).tensor() if size else torch.empty(0, dtype=torch.uint8) for size in offers)

    def _opened(self, own: SharedSegment | None, ranks: Sequence[int]) -> list[SharedSegment]:
        """Opens what ranks have offered, or takes this one's own; raises on all ranks if one of them could not."""
        problem: UnfitMachine | None = None
        opened: list[SharedSegment] = []
        try:
            for rank in ranks:
                opened.append(own if rank == self.rank and own else self._page.ranks[rank].segment_offer.open())
        except UnfitMachine as error:
            problem = error
        self._segments += opened
        # Where a rank has died since it made its offer, this tells of its death.
        (failed,) = self.sum([float(problem is not None)])
        if failed:
            raise problem or UnfitMachine(
                "another rank could not open the shared memory of this host; its error says why"
            )
        return opened

    def all_reduce(self, tensor: Tensor) -> None:
        if not tensor.is_contiguous():
            raise ValueError("all_reduce needs a contiguous tensor")
        if self.world == 1:
            return
        flat = tensor.view(-1)
        self.moved_bytes += flat.nbytes * (2 if self.world == 2 else 3)
        length = self._slot_bytes // flat.element_size()
        # Not `split`, which costs as much as to add a small tensor.
        for start in range(0, flat.numel(), length):
            piece = flat[start : start + length]
            sources = self._exchange(piece)
            if self.world == 2:
                # Its own slot is still in the cache; a + b and b + a are the same bits.
                piece.add_(sources[1 - self.rank])
            elif flat.nbytes <= _DIRECT_BYTES:
                torch.add(sources[0], sources[1], out=piece)
                for source in sources[2:]:
                    piece.add_(source)
            else:
                self._add_in_parts(piece, sources)

    def gather(self, tensor: Tensor) -> Tensor:
        every = tensor.new_empty(self.world, len(tensor))
        self.moved_bytes += self.world * len(tensor)
        for start in range(0, len(tensor), self._slot_bytes):
            piece = tensor[start : start + self._slot_bytes]
            for place, source in zip(every, self._exchange(piece), strict=True):
                place[start : start + len(piece)] = source
        return every

    def all_to_all(self, pieces: Tensor) -> Tensor:
        given = torch.empty_like(pieces)
        each = self._slot_bytes // self.world
        self.moved_bytes += 2 * (self.world - 1) * pieces.shape[1]
        for start in range(0, pieces.shape[1], each):
            part = pieces[:, start : start + each]
            for place, source in zip(given, self._exchange(part), strict=True):
                place[start : start + each] = source.view(part.shape)[self.rank]
        return given

    def all_to_all_uneven(self, pieces: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[Tensor]:
        others = [rank for rank in range(self.world) if rank != self.rank]
        # What a rank sends, one piece behind the other; where this rank's begins in what each of them sends.
        sent = torch.cat([pieces[rank] for rank in others]) if others else pieces[0][:0]
        totals = [sum(row) - row[rank] for rank, row in enumerate(sizes)]
        starts = [sum(size for to, size in enumerate(row[: self.rank]) if to != s) for s, row in enumerate(sizes)]
        given = [
            pieces[rank] if rank == self.rank else sent.new_empty(sizes[rank][self.rank]) for rank in range(self.world)
        ]
        for start in range(0, max(totals), self._slot_bytes):
            slots = self._post(sent[start : start + self._slot_bytes])
            for rank in others:
                low = max(starts[rank], start)
                high = min(starts[rank] + len(given[rank]), start + self._slot_bytes)
                if low < high:
                    given[rank][low - starts[rank] : high - starts[rank]] = slots[rank][low - start : high - start]
        self.moved_bytes += len(sent) + sum(len(given[rank]) for rank in others)
        return given

    def close(self) -> None:
        for group in self.groups:
            group.close()
        for segment in self._segments:
            segment.close()
        self._segments.clear()
        self._slots = ()
        self._rings.clear()

    def _exchange(self, piece: Tensor) -> list[Tensor]:
        """Writes this rank's piece to its next slot, and returns all ranks' pieces, flat, when they are there."""
        length = piece.numel()
        return [slot[:length] for slot in self._post(piece)]

    def _post(self, piece: Tensor) -> list[Tensor]:
        """Writes this rank's piece, which may be as long as a slot; returns all ranks' slots when they have written."""
        ring = self._rings.get(piece.dtype) or self._ring(piece.dtype)
        self._turn ^= 1
        slots = [pair[self._turn] for pair in ring]
        own = slots[self.rank][: piece.numel()]
        (own if piece.dim() == 1 else own.view(piece.shape)).copy_(piece)
        self.barrier()
        return slots

    def _ring(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """Returns both slots of every rank as tensors of a type; kept, because views take longer than small sums."""
        self._slots = self._slots or self.share(2 * self._slot_bytes)
        half = self._slot_bytes // dtype.itemsize
        typed = (region.view(dtype) for region in self._slots)
        self._rings[dtype] = [(slots[:half], slots[half:]) for slots in typed]
        return self._rings[dtype]

    def _add_in_parts(self, piece: Tensor, sources: list[Tensor]) -> None:
        count = piece.numel()
        low, high = count * self.rank // self.world, count * (self.rank + 1) // self.world
        total = sources[0][low:high]
        for source in sources[1:]:
            total.add_(source[low:high])
        self.barrier()
        piece.copy_(sources[0])
