"""Moves units between workers, in the places where `fully_shard` would call NCCL or gloo.

    gather    rank 0   │ its part of the unit ─► slot ─┐            ┌─► copies the unit from the slot
              rank 1   │ its part of the unit ─► slot ─┴─ barrier ──┴─► copies the unit from the slot

    scatter   rank 0   │ its gradient of the unit ─► region ─┐            ┌─► adds up part 0 of all regions
              rank 1   │ its gradient of the unit ─► region ─┴─ barrier ──┴─► adds up part 1 of all regions

So among the workers of one host; over several hosts, and among accelerators, a gather is an all-gather, and a scatter
a reduce-scatter.

Every rank says what it does with which unit first, and looks whether the others do the same. Among accelerators that
would keep hosts from running ahead, so that from the second step on they compare once a step what they have called.
Sums in host memory are taken in rank order, so that two runs get the same bits.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Collection, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.collectives.base import Collective, ProcessGroup, gather_bytes
from headrace.collectives.spent import counted
from headrace.errors import UsageError
from headrace.shared_memory.layout import LINE, on_lines

_DEEDS = ("gathers", "sums the gradients of", "has summed the gradients of")
_GATHER, _SCATTER, _AGAIN = range(3)


class OwnGradients:
    """What is known of this rank's gradients. Hooks of tensors hold it, and what these hold Python may never collect.

    Attributes:
        seen: names of the parameters that this rank has made a gradient of.
        silent: whether they count as zeros, and are not seen.
        others: names of the parameters whose gradients count all the same: they are of other ranks' examples.
    """

    def __init__(self, others: Collection[str] = ()) -> None:
        self.seen: set[str] = set()
        self.silent = False
        self.others = frozenset(others)

    def note(self, name: str, parameter: Tensor) -> None:
        """Notes that there is a gradient of a parameter, or lets it go."""
        if self.silent and name not in self.others:
            parameter.grad = None
        else:
            self.seen.add(name)


class UnitLink(ABC):
    """Gathers units and sums their gradients, one after the other; all ranks do it together."""

    def __init__(self, group: ProcessGroup, units: Sequence[str]) -> None:
        self._group = group
        self._units = units
        self._meetings = 0

    @abstractmethod
    def space(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Returns memory for a unit that `gather` is to fill next, flat: to be copied before the gather after that."""

    @abstractmethod
    def gather(self, unit: int, whole: Tensor, own: Tensor) -> None:
        """Fills what `space` gave with the parts of all ranks, by rank; `own` is this rank's, and may lie in it."""

    def parts(self, unit: int, own: Tensor) -> Sequence[Tensor]:
        """Returns the parts of all ranks, by rank, as bytes that stay until the next call; `own` is this rank's."""
        whole = self.space(self._group.world * len(own), own.dtype)
        self.gather(unit, whole, own)
        return whole.view(torch.uint8).view(self._group.world, own.nbytes).unbind()

    @abstractmethod
    def region(self, unit: int, elements: int, dtype: torch.dtype) -> Tensor:
        """Returns this rank's memory for the gradient of a unit, flat, to be filled and given to `scatter`."""

    @abstractmethod
    def scatter(self, unit: int, part: Tensor, gradient: Tensor) -> None:
        """Replaces `part` by the sum of this rank's part of all ranks' gradients; `gradient` is what `region` gave."""

    @abstractmethod
    def settle(self) -> None:
        """Ends a step: raises UsageError if ranks have done different things. All ranks call it."""

    @abstractmethod
    def _exchange(self, own: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Returns what every rank says, by rank."""

    def _meet(self, deed: int, unit: int, nbytes: int) -> None:
        """Waits until all ranks are about to do the same; raises UsageError if one does something else."""
        self._meetings += 1
        own = (self._meetings, deed, unit, nbytes)
        for peer, theirs in enumerate(self._exchange(own)):
            if theirs != own:
                raise self._parted(peer, own, theirs)

    def _parted(self, peer: int, own: tuple[int, ...], theirs: tuple[int, ...]) -> UsageError:
        there = self._said(theirs) if theirs[0] == own[0] else "does something else"
        return self._differ(self._group.rank, self._said(own), peer, there)

    def _differ(self, rank: int, here: str, peer: int, there: str) -> UsageError:
        return UsageError(
            f"rank {rank} {here}, and rank {peer} {there}: all ranks gather a unit together, so "
            "each must run the same units, in the same order and as often, whatever its examples are; put what only "
            "some examples need into a larger unit, or make the whole model one, units=[]"
        )

    def _said(self, header: Sequence[int]) -> str:
        _, deed, unit, nbytes = header
        return f"{_DEEDS[deed]} {self._title(unit)} ({nbytes:,} bytes)"

    def _title(self, unit: int) -> str:
        return repr(self._units[unit] or "the rest of the model")


class SharedLink(UnitLink):
    """Among the workers of one host: shared memory for the largest unit, which all use one after the other.

    `summed_bytes` are those of the largest gradient: of a unit that is frozen there is none.
    """

    def __init__(self, group: ProcessGroup, units: Sequence[str], largest_bytes: int, summed_bytes: int) -> None:
        super().__init__(group, units)
        part_bytes = on_lines(-(-largest_bytes // group.world))
        # Of two meetings in turn: which meeting, what is done, with which unit, how many bytes.
        self._headers = [region.view(torch.int64).numpy().reshape(2, 4) for region in group.share(LINE)]
        self._slots = group.share_one(2 * part_bytes * group.world).chunk(2)
        self._regions = group.share(on_lines(summed_bytes))
        self._summed = -1
        self._turn = 0

    def space(self, elements: int, dtype: torch.dtype) -> Tensor:
        # The other slot may still be read by ranks that are behind.
        self._turn ^= 1
        return self._slots[self._turn][: elements * dtype.itemsize].view(dtype)

    def gather(self, unit: int, whole: Tensor, own: Tensor) -> None:
        place = whole[self._group.rank * len(own) :][: len(own)]
        if place.data_ptr() != own.data_ptr():
            place.copy_(own)
        self._meet(_GATHER, unit, whole.nbytes)
        self._group.moved_bytes += own.nbytes + whole.nbytes

    def region(self, unit: int, elements: int, dtype: torch.dtype) -> Tensor:
        if self._group.world == 1:
            # No other rank adds it up.
            return torch.empty(elements, dtype=dtype)
        if self._summed == self._meetings:
            # No rank may still add up what was here.
            self._meet(_AGAIN, unit, 0)
        return self._regions[self._group.rank][: elements * dtype.itemsize].view(dtype)

    def settle(self) -> None:
        """Does nothing: each call was compared."""

    def scatter(self, unit: int, part: Tensor, gradient: Tensor) -> None:
        if self._group.world == 1:
            part.copy_(gradient)
            return
        self._meet(_SCATTER, unit, gradient.nbytes)
        self._summed = self._meetings
        self._group.moved_bytes += 2 * gradient.nbytes
        start = self._group.rank * part.nbytes
        first, *others = (region[start : start + part.nbytes].view(part.dtype) for region in self._regions)
        part.copy_(first)
        for other in others:
            part.add_(other)

    def _exchange(self, own: tuple[int, ...]) -> list[tuple[int, ...]]:
        turn = own[0] & 1
        self._headers[self._group.rank][turn] = own
        self._group.barrier()
        return [tuple(header[turn].tolist()) for header in self._headers]


class CollectiveLink(UnitLink):
    """By the collectives of a `carrier`: between hosts the group itself, among accelerators their own, for `device`."""

    def __init__(
        self,
        group: ProcessGroup,
        units: Sequence[str],
        carrier: Collective,
        device: torch.device,
    ) -> None:
        super().__init__(group, units)
        self._carrier = carrier
        self._device = device
        # What was called without a meeting since the last `settle`: a deed and a unit, as one number.
        self._calls = array("i")
        self._agreed = False

    def space(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(elements, dtype=dtype, device=self._device)

    def gather(self, unit: int, whole: Tensor, own: Tensor) -> None:
        self._agree(_GATHER, unit, whole.nbytes)
        self._carrier.all_gather_into(whole, own)

    def region(self, unit: int, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(elements, dtype=dtype, device=self._device)

    def settle(self) -> None:
        if not self._carrier.queued:
            return
        own, self._calls = self._calls, array("i")
        self._agreed = True
        digests = self._group.gather_numbers([zlib.crc32(own.tobytes())])
        if any(digest != digests[0] for digest in digests):
            self._refuse([array("i", each) for each in gather_bytes(self._group, own.tobytes())])

    def _refuse(self, every: Sequence[array[int]]) -> NoReturn:
        """Raises UsageError of the first call in which ranks differ."""
        first = every[0]
        peer, place = next(
            (peer, place)
            for place in range(max(map(len, every)))
            for peer, calls in enumerate(every)
            if calls[place : place + 1] != first[place : place + 1]
        )
        raise self._differ(0, self._called(first, place), peer, self._called(every[peer], place))

    def _called(self, calls: array[int], place: int) -> str:
        if place >= len(calls):
            return f"has ended the step after {len(calls)} calls"
        unit, deed = divmod(calls[place], len(_DEEDS))
        return f"{_DEEDS[deed]} {self._title(unit)}"

    def _agree(self, deed: int, unit: int, nbytes: int) -> None:
        """Sees to it that all ranks are about to do the same, or that `settle` finds out."""
        if self._agreed:
            self._calls.append(unit * len(_DEEDS) + deed)
        else:
            self._meet(deed, unit, nbytes)

    def scatter(self, unit: int, part: Tensor, gradient: Tensor) -> None:
        self._agree(_SCATTER, unit, gradient.nbytes)
        self._carrier.reduce_scatter(part, gradient)

    def _exchange(self, own: tuple[int, ...]) -> list[tuple[int, ...]]:
        every = self._group.gather(torch.tensor(own).view(torch.uint8)).view(torch.int64)
        return [tuple(row) for row in every.tolist()]


class UnitGather:
    """The all-gather of one unit, as `fully_shard` calls it: it copies a unit before it gathers the next."""

    def __init__(self, link: UnitLink, unit: int) -> None:
        self._link = link
        self._unit = unit

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory for the whole unit."""
        (elements,) = size
        return self._link.space(int(elements), dtype)

    @counted
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        self._link.gather(self._unit, output_tensor, input_tensor)


class UnitScatter:
    """The reduce-scatter of one unit, as `fully_shard` calls it."""

    def __init__(self, link: UnitLink, unit: int) -> None:
        self._link = link
        self._unit = unit
        self._filled = False

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory for the whole gradient, which the others see, and then for this rank's part of the sum."""
        self._filled = not self._filled
        if not self._filled:
            return torch.empty(*size, dtype=dtype, device=device)
        (elements,) = size
        return self._link.region(self._unit, int(elements), dtype)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        self._link.scatter(self._unit, output_tensor, input_tensor)
