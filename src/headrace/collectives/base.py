"""Collective operations of workers: every rank calls the same ones in the same order."""

from __future__ import annotations

import functools
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from headrace.collectives.compression import PLAIN, Compression
from headrace.collectives.spent import counted
from headrace.shared_memory.ends import FinishedRanks
from headrace.trees import as_bytes

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class HostMap:
    """The host of each rank of a group, by name, and the address at which the others reach this rank's host.

    `encrypt` is whether this rank's connections from other hosts are encrypted. Where another host's kernel has not
    answered for `silent_s`, a connection to it has ended; 0 for as long as that system waits.
    """

    hosts: tuple[str, ...]
    address: str
    encrypt: bool = True
    silent_s: float = 0.0


class Peers(ABC):
    """The ranks of a group, that send to each other."""

    @abstractmethod
    def exchange(
        self, sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]]
    ) -> Callable[[], None]:
        """Begins to send contiguous tensors and to receive others, each with its rank; returns a function that waits.

        It is one operation, which ends when all has been sent and received, and the next begins then. What goes from
        one rank to another comes in the order in which it is sent. The caller counts the bytes.
        """


class _Divided(ABC):
    """What ranks do with parts of tensors, made of sums of whole ones."""

    rank: int
    world: int

    def __init_subclass__(cls) -> None:
        for name in ("all_reduce", "gather", "all_to_all", "all_to_all_uneven", "barrier"):
            if name in vars(cls):
                setattr(cls, name, counted(vars(cls)[name]))

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> None:
        """Replaces a contiguous tensor, of the same shape and type on all ranks, by the sum over ranks."""

    def gather(self, tensor: Tensor) -> Tensor:
        """Returns every rank's `(nbytes,)` uint8 tensor, by rank, as `(world, nbytes)`; their lengths are equal."""
        every = tensor.new_zeros(self.world, len(tensor))
        every[self.rank] = tensor
        self.all_reduce(every)
        return every

    def all_to_all(self, pieces: Tensor) -> Tensor:
        """Sends row i of a contiguous `(world, nbytes)` uint8 tensor to rank i; returns the rows sent to this rank."""
        return self.gather(pieces.view(-1)).view(self.world, *pieces.shape)[:, self.rank]

    def all_to_all_uneven(self, pieces: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Sends piece i, flat uint8, to rank i; returns what each rank has sent to this one, by rank.

        `sizes[s][t]` is how many bytes rank s sends to rank t, the same on all ranks. What a rank keeps is not sent.
        """
        most = max((size for s, row in enumerate(sizes) for t, size in enumerate(row) if s != t), default=0)
        own = pieces[self.rank]
        if not most:
            return [own if rank == self.rank else own[:0] for rank in range(self.world)]
        padded = own.new_zeros(self.world, most)
        for rank, piece in enumerate(pieces):
            if rank != self.rank:
                padded[rank, : len(piece)] = piece
        given = [row[: sizes[rank][self.rank]] for rank, row in enumerate(self.all_to_all(padded))]
        return [*given[: self.rank], own, *given[self.rank + 1 :]]

    def all_gather_into(self, every: Tensor, own: Tensor) -> None:
        """Fills `every` with all ranks' `own`, by rank; both are flat and contiguous. `own` may be its place in it."""
        if own.nbytes:
            every.view(torch.uint8).view(self.world, own.nbytes).copy_(self.gather(own.view(torch.uint8)))

    def reduce_scatter(self, own: Tensor, every: Tensor) -> None:
        """Replaces `own` by the sum over ranks of their `every`, of which part i is rank i's; both are contiguous."""
        if own.nbytes:
            first, *others = self.all_to_all(every.view(torch.uint8).view(self.world, own.nbytes)).unbind()
            own.copy_(first.view(own.dtype))
            for other in others:
                own.add_(other.view(own.dtype))


class Collective(_Divided):
    """A group of `world` ranks that communicate.

    Every wait has an end: where a peer is lost, the others raise `PeerLost`. Sums are taken in rank order, between
    hosts in the order of hosts, so that all ranks, and two runs, get the same bits.
    """

    moved_bytes = 0
    """Bytes that this rank has written for others and read from them so far."""

    groups: Sequence[Collective] = ()
    """Those of some of the ranks that this one has returned; they are closed with it."""

    peers: Peers | None = None
    """What sends from one rank to another; None where nothing does."""

    queued = False
    """Whether calls return before they are done, in the order of the device's other work: no rank waits in them."""

    in_host = False
    """Whether sums of what lies on devices are made in host memory and stay there, by `near`."""

    near: ProcessGroup | None = None
    """What exchanges tensors that lie in host memory, of devices whose own go there; None where that is shared."""

    alike = False
    """Whether the other ranks are not there, and taken to do what this one does, as in a plan of memory."""

    bucket_bytes = (25 << 20, 25 << 20)
    """Of gradients that are summed while backward runs: the first bucket's, and the most; enough for full speed."""

    def __deepcopy__(self, memo: object) -> Self:
        """Returns itself: a copy of a layer communicates as the layer does."""
        return self

    @abstractmethod
    def barrier(self) -> None:
        """Returns when every rank has called it."""

    def start_all_reduce(self, tensor: Tensor, compression: Compression = PLAIN) -> Callable[[], None]:
        """Begins an `all_reduce`; returns a function that waits for the sum. Between hosts it goes by `compression`."""
        # Not in the background, where it would take the cores that compute.
        self.all_reduce(tensor)
        return lambda: None

    @abstractmethod
    def broadcast(self, tensor: Tensor) -> None:
        """Replaces a contiguous tensor by rank 0's."""

    @abstractmethod
    def sum(self, values: Sequence[float]) -> list[float]:
        """Returns the sums over ranks of a few numbers, in double precision, in rank order."""

    def gather_numbers(self, own: Sequence[float]) -> list[list[float]]:
        """Returns every rank's few numbers, by rank; all have as many."""
        count = len(own)
        # Among zeros, so that the sum tells all of them.
        among = [0.0] * (count * self.world)
        among[count * self.rank : count * (self.rank + 1)] = own
        every = self.sum(among)
        return [every[count * rank : count * (rank + 1)] for rank in range(self.world)]

    def among(self, group: ProcessGroup, members: Sequence[int]) -> Collective | None:
        """Returns what carries tensors as this does, among some of its ranks alone, whose processes are `group`.

        None for the memory that these share. Only these ranks call it.
        """
        return None if group.one_memory else group

    def _count_ring(self, tensor: Tensor) -> None:
        # A ring sends and receives 2 (world - 1) / world of the tensor.
        self.moved_bytes += 4 * (self.world - 1) * tensor.nbytes // self.world

    @abstractmethod
    def close(self) -> None:
        """Releases memory and connections."""


class ProcessGroup(Collective):
    """The processes of a run.

    `one_memory` tells whether they exchange through shared memory: where not, `home` has their hosts. `fixed` tells
    whether the members stay the same, `votes` whether a `commit` may ask for approval. `in_memory` is what `share` is
    left to, of processes that may lie on several hosts and are all on one. `store` returns a store of torch.distributed
    where processes on several hosts have one, which only they can read. `start_barrier` comes to a barrier, and returns
    what waits for the others; None where a barrier cannot be divided. `start_when` is a `start_all_reduce` of a tensor
    that is there when its first argument has been called; None where no thread waits for it. `channels` makes what
    stands for a pipeline's channels where one rank runs alone; None where all are there.
    """

    one_memory: bool = True
    fixed: bool = True
    votes: bool = False
    ends: FinishedRanks
    home: HostMap | None = None
    in_memory: ProcessGroup | None = None
    store: Callable[[], Any] | None = None
    start_barrier: Callable[[], Callable[[], None]] | None = None
    start_when: Callable[[Callable[[], object], Tensor, Compression], Callable[[], None]] | None = None
    channels: Callable[..., Any] | None = None

    def subgroup(self, members: Sequence[int]) -> ProcessGroup:
        """Returns a group of some of the ranks; every rank calls it at the same time, for the one it belongs to."""
        raise NotImplementedError("this group has no groups in it")

    @property
    def members(self) -> list[int]:
        """The ranks' numbers in the run."""
        return list(range(self.world))

    def regroup(self, members: Sequence[tuple[int, int]], meeting: int) -> None:
        """Changes the members, in a group whose members may be lost or join; every new member calls it.

        `members` has each one's rank in the run and its incarnation; `meeting` is greater than at any call before.
        """

    def commit(self, approves: bool | None = None) -> bool:
        """Ends a step of all members: either it is done for all of them, or on each a MemberLost is raised.

        Where members `votes`, each may say whether it approves; the step is only done if all do who are not lost.
        Returns whether it is. Who approves must be able to do the step whatever the others say.
        """
        return True

    def is_gone(self, member: int) -> bool:
        """Whether a member was lost without harm to the others."""
        return False

    def together(self, act: Callable[[], _Result]) -> _Result:
        """Runs `act`, which communicates; runs it again without a member that is lost meanwhile."""
        return act()

    @abstractmethod
    def check(self, peer: int | None = None, broken: str = "") -> None:
        """Raises a PeerLost if a rank is known to be lost, or for a peer to which a connection has `broken` as said.

        A MemberLost if the group goes on without lost ranks, and the next barrier would raise it.
        """

    def broadcast(self, tensor: Tensor) -> None:
        if self.rank != 0:
            tensor.zero_()
        # Bytes, because adding zeros to numbers would lose the sign of a zero.
        self.all_reduce(as_bytes(tensor))

    def share(self, nbytes: int) -> tuple[Tensor, ...]:
        """Returns one zeroed region a rank, by rank, as `(nbytes,)` uint8, which all ranks see.

        Every rank calls it, with a length of its own. What a rank writes is seen by the others after a `barrier`. A
        NotImplementedError if hosts have no memory in common.
        """
        if self.in_memory:
            return self.in_memory.share(nbytes)
        raise NotImplementedError("processes on several hosts share no memory; they exchange by collectives")

    def share_one(self, nbytes: int) -> Tensor:
        """Returns one zeroed region of rank 0's memory, as `(nbytes,)` uint8, which all ranks see; see `share`."""
        return self.share(0 if self.rank else nbytes)[0]


def moved_bytes_of(group: Collective) -> int:
    """Returns the bytes moved by a group and by those in it."""
    return group.moved_bytes + sum(map(moved_bytes_of, group.groups))


def add_in_order(values: Iterable[float]) -> float:
    """Returns the sum, rounded after each addition; `sum` is more exact from Python 3.12 on, and gives other bits."""
    return functools.reduce(operator.add, values, 0.0)


def gather_texts(group: ProcessGroup, text: str) -> list[str]:
    """Returns every rank's text, by rank; every rank of the group calls it."""
    return [content.decode() for content in gather_bytes(group, text.encode())]


def gather_bytes(group: ProcessGroup, content: bytes) -> list[bytes]:
    """Returns every rank's content, by rank; every rank of the group calls it."""
    own = torch.tensor(bytearray(content), dtype=torch.uint8)
    lengths = group.sum([float(len(own)) if rank == group.rank else 0.0 for rank in range(group.world)])
    padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
    padded[: len(own)] = own
    return [bytes(row[: int(n)].numpy()) for row, n in zip(group.gather(padded), lengths, strict=True)]
