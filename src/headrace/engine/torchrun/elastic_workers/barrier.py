"""The barrier of workers on several hosts that may be lost, at the store that rank 0 serves."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from time import sleep

import torch
from torch import Tensor

from headrace.collectives.elastic import ElasticBarrier, ElasticGroup
from headrace.engine.torchrun.key_value import StoreClient
from headrace.errors import PeerLost, Replaced
from headrace.shared_memory.barrier import MemberLost
from headrace.shared_memory.control_page import ControlPage
from headrace.shared_memory.ends import FinishedRanks

_DECIDED = 2
"""Numbers of the page that come before those of a meeting."""

_LOOK_EVERY_S = 0.01


def member_name(prefix: str, rank: int, incarnation: int) -> str:
    """Returns what a process is called where workers meet that may be lost."""
    return f"{prefix}/{rank}/{incarnation}"


def await_others(
    store: StoreClient,
    key: str,
    own: int,
    ranks: Sequence[int],
    is_gone: Callable[[int], bool],
    check: Callable[[], None],
) -> None:
    """Says that rank `own` has come to a place in the store, and waits for those of `ranks` that are not gone."""
    store.add(f"{key}/{own}", 1)
    for rank in ranks:
        while not (store.add(f"{key}/{rank}", 0) or is_gone(rank)):
            check()
            sleep(_LOOK_EVERY_S)


class StoreBarrier(ElasticBarrier):
    """Of the members of several hosts. The store decides who has come, so that all who live see the same.

    Each meeting brings the first member's `stop_after` and `save_after` into every page. `prefix` is the
    run's, `rank` this process's; the store is closed with the barrier.
    """

    one_memory = False

    def __init__(
        self,
        store: StoreClient,
        prefix: str,
        page: ControlPage,
        rank: int,
        first_host: str,
        check: Callable[[], None],
        ends: FinishedRanks,
    ) -> None:
        self._store, self._prefix = store, prefix
        self._page, self._rank, self._first_host = page, rank, first_host
        self._check_run, self._ends = check, ends
        self._incarnation = page.ranks[rank].restarts
        self._place = (0, 0)

    def restart(self, meeting: int) -> None:
        self._place = (meeting, 0)

    def meet(self, members: Sequence[tuple[int, int]], numbers: Tensor) -> list[Tensor]:
        meeting, turn = self._place
        self._place = (meeting, turn + 1)
        names = [member_name(self._prefix, *member) for member in members]
        check = partial(self._check, [rank for rank, _ in members])
        try:
            told = self._store.meet(
                f"{self._prefix}/met/{meeting}/{turn}",
                member_name(self._prefix, self._rank, self._incarnation),
                struct.pack("2d", self._page.stop_after, self._page.save_after) + numbers.numpy().tobytes(),
                names,
                check,
            )
        except ConnectionError as error:
            self._check_run()
            raise PeerLost(0, self._first_host, f"the launcher's store on its host is lost: {error}") from error
        if not told:
            raise Replaced(self._rank, self._incarnation + 1)
        for (rank, _), value in zip(members, told, strict=True):
            if value is None:
                raise MemberLost(rank)
        every = [torch.frombuffer(bytearray(value or b""), dtype=torch.float64) for value in told]
        # They only grow, and the first member may be another one than before.
        latest = torch.stack([each[:_DECIDED] for each in every]).max(dim=0).values
        self._page.stop_after, self._page.save_after = map(int, latest.tolist())
        return [each[_DECIDED:] for each in every]

    def is_gone(self, member: int, incarnation: int) -> bool:
        return self._page.ranks[member].restarts > incarnation

    def close(self) -> None:
        self._store.close()

    def _check(self, members: Sequence[int]) -> None:
        self._check_run()
        for member in members:
            # One whose loop has ended waits for this one, and has come to all barriers that it was to come to.
            self._ends.check_far(member, self._rank)


def group_by_store(
    store: StoreClient,
    prefix: str,
    page: ControlPage,
    rank: int,
    first_host: str,
    members: Sequence[tuple[int, int]],
    check: Callable[[], None],
) -> ElasticGroup:
    """Returns the group of workers of several hosts; it has a connection of its own to the store."""
    ends = FinishedRanks([record.heartbeat for record in page.ranks])
    barrier = StoreBarrier(store.clone(), prefix, page, rank, first_host, check, ends)
    return ElasticGroup(barrier, rank, members, check, ends)
