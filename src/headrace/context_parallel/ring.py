"""How keys and values come to all ranks, block by block, and how the gradients of a block come back to its rank.

step        0        1        2        3
rank 0   block 0  block 1  block 2  block 3        at each step each rank has another block,
rank 1   block 1  block 2  block 3  block 0        so that all may add to its gradient in place
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from headrace.collectives.base import Collective, Peers, ProcessGroup
from headrace.trees import as_bytes

Part = Callable[[int, Tensor], Tensor]
"""From the rank of a block and the block to this rank's part of its gradient, of the block's shape."""


class Ring(ABC):
    """The ranks that divide a sequence: every one of them calls the same methods in the same order."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    @abstractmethod
    def blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yields every rank's contiguous tensor with its rank, this one's first; all have one shape and type.

        A tensor is to be read until the next one is asked for.
        """

    @abstractmethod
    def return_gradients(self, own: Tensor, part: Part) -> Tensor:
        """Returns the sum over ranks of their parts of the gradient of this rank's block."""


class SharedRing(Ring):
    """Ranks that read each other's blocks where they lie, in memory that they share."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__(group.rank, group.world)
        self._group = group
        self._regions: tuple[Tensor, ...] = ()

    def blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        blocks = self._publish(own, own.nbytes)
        for step in range(self.world):
            rank = (self.rank + step) % self.world
            self._group.moved_bytes += own.nbytes * bool(step)
            yield rank, blocks[rank]

    def return_gradients(self, own: Tensor, part: Part) -> Tensor:
        blocks = self._publish(own, 2 * own.nbytes)
        sums = [_as(region[own.nbytes :], own) for region in self._regions]
        for step in range(self.world):
            rank = (self.rank + step) % self.world
            found = part(rank, blocks[rank])
            if step:
                self._group.moved_bytes += 2 * own.nbytes
                sums[rank].add_(found)
            else:
                sums[rank].copy_(found)
            # Before the next one is made.
            del found
            # From here on another rank adds to it.
            self._group.barrier()
        return sums[self.rank].clone()

    def _publish(self, own: Tensor, nbytes: int) -> list[Tensor]:
        """Writes this rank's block where all see it, and returns all ranks' blocks."""
        if not self._regions or len(self._regions[0]) < nbytes:
            # All ranks have as many tokens, and ask for as much.
            self._regions = self._group.share(nbytes)
        else:
            # The others have read what has been there.
            self._group.barrier()
        blocks = [_as(region, own) for region in self._regions]
        blocks[self.rank].copy_(own)
        self._group.barrier()
        return blocks


class PeerRing(Ring):
    """Ranks that send their blocks to the next and receive the previous one's."""

    def __init__(self, rank: int, world: int, peers: Peers) -> None:
        super().__init__(rank, world)
        self._peers = peers

    def blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        for rank, block, wait in self._arriving(own):
            yield rank, block
            wait()

    def return_gradients(self, own: Tensor, part: Part) -> Tensor:
        total = torch.zeros_like(own)
        for rank, block, wait in self._arriving(own):
            found = part(rank, block)
            # One operation after the other, alike on all ranks.
            wait()
            # The sum follows its block, and after the last step is at home.
            total = self._sent_on(total + found)
        return total

    def _arriving(self, own: Tensor) -> Iterator[tuple[int, Tensor, Callable[[], None]]]:
        """Yields each block with its rank while the next is under way, and what waits for that."""
        held = own
        for step in range(self.world):
            coming = torch.empty_like(held)
            wait = self._pass_on(held, coming) if step + 1 < self.world else _nothing
            yield (self.rank - step) % self.world, held, wait
            held = coming

    def _sent_on(self, given: Tensor) -> Tensor:
        taken = torch.empty_like(given)
        self._pass_on(given, taken)()
        return taken

    def _pass_on(self, given: Tensor, taken: Tensor) -> Callable[[], None]:
        if self.world == 1:
            taken.copy_(given)
            return _nothing
        return self._peers.exchange([(given, (self.rank + 1) % self.world)], [(taken, (self.rank - 1) % self.world)])


class CollectiveRing(Ring):
    """Ranks whose collective only sums: all have one block at a time, and add up its gradient."""

    def __init__(self, collective: Collective) -> None:
        super().__init__(collective.rank, collective.world)
        self._collective = collective

    def blocks(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        for rank in range(self.world):
            block = own.clone() if rank == self.rank else torch.zeros_like(own)
            # Bytes, because a sum with zeros would lose the sign of a zero.
            self._collective.all_reduce(as_bytes(block))
            yield rank, block

    def return_gradients(self, own: Tensor, part: Part) -> Tensor:
        kept = own
        for rank, block in self.blocks(own):
            total = part(rank, block).contiguous()
            self._collective.all_reduce(total)
            kept = total if rank == self.rank else kept
        return kept


def ring_of(group: ProcessGroup, devices: Collective | None) -> Ring:
    """Returns the ring of a group's ranks, whose tensors `devices` carries; None for memory that they share."""
    if devices is None:
        return SharedRing(group)
    return PeerRing(group.rank, group.world, devices.peers) if devices.peers else CollectiveRing(devices)


def _nothing() -> None:
    """Waits for nothing."""


def _as(region: Tensor, form: Tensor) -> Tensor:
    return region[: form.nbytes].view(form.dtype).view(form.shape)
