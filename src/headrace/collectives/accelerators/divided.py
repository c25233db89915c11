"""Exchanges of accelerators by which each rank gives or gets a part of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headrace import internals
from headrace.collectives.base import Collective
from headrace.collectives.watchdog.call_log import CallLog


class DividedTensors(Collective):
    """By a backend of torch.distributed; what calls give is there for what the device does next."""

    queued = True
    _backend: Any
    _log: CallLog

    def gather(self, tensor: Tensor) -> Tensor:
        every = tensor.new_empty(self.world, len(tensor))
        self._gather_into(b"gather", every, tensor.contiguous())
        # It goes to each of the others, and each sends one.
        self.moved_bytes += 2 * (self.world - 1) * len(tensor)
        return every

    def all_to_all(self, pieces: Tensor) -> Tensor:
        given = torch.empty_like(pieces)
        exchange = self._backend.alltoall_base
        self._call(b"all_to_all", pieces, exchange, given, pieces, [], [], dist.AllToAllOptions())()
        self.moved_bytes += 2 * (self.world - 1) * pieces.shape[1]
        return given

    def all_to_all_uneven(self, pieces: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[Tensor]:
        own = pieces[self.rank]
        outgoing = [0 if rank == self.rank else len(piece) for rank, piece in enumerate(pieces)]
        incoming = [0 if rank == self.rank else row[self.rank] for rank, row in enumerate(sizes)]
        sent = torch.cat([own[:0], *(piece for rank, piece in enumerate(pieces) if rank != self.rank)])
        given = own.new_empty(sum(incoming))
        if every := sum(size for s, row in enumerate(sizes) for t, size in enumerate(row) if s != t):
            exchange, options = self._backend.alltoall_base, dist.AllToAllOptions()
            # Each rank sends others; what all together send is the same on all.
            self._call(b"all_to_all", sent, exchange, given, sent, incoming, outgoing, options, nbytes=every)()
        self.moved_bytes += len(sent) + len(given)
        parts = given.split(incoming)
        return [own if rank == self.rank else part for rank, part in enumerate(parts)]

    def all_gather_into(self, every: Tensor, own: Tensor) -> None:
        if own.nbytes:
            # As bytes, because backends lack some types.
            self._gather_into(b"all_gather", every.view(torch.uint8), own.view(torch.uint8))
            self.moved_bytes += 2 * (self.world - 1) * own.nbytes

    def reduce_scatter(self, own: Tensor, every: Tensor) -> None:
        if own.nbytes:
            # Backends lack complex numbers, whose sum is that of both parts.
            real = [torch.view_as_real(each).view(-1) if each.is_complex() else each for each in (own, every)]
            scatter = internals.scatter_sums(self._backend)
            self._call(b"reduce_scatter", real[1], scatter, *real, dist.ReduceScatterOptions())()
            self.moved_bytes += 2 * (self.world - 1) * own.nbytes

    def _gather_into(self, name: bytes, every: Tensor, own: Tensor) -> None:
        self._call(name, own, internals.gather_into(self._backend), every.view(-1), own)()

    def _call(
        self, name: bytes, tensor: Tensor, verb: Callable[..., Any], *arguments: Any, nbytes: int | None = None
    ) -> Callable[[], None]:
        """Begins a collective; returns what waits for it, on the device where its backend can.

        `nbytes` is what all ranks must call it with, where that is not the size of the tensor.
        """
        log = self._log
        log.begin(name, tensor.nbytes if nbytes is None else nbytes, tensor.dtype)
        with log.explaining():
            work = verb(*arguments)
        log.follow(work)
        return partial(log.wait, work)
