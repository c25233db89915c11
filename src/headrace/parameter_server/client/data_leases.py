"""A worker's portions of the data, leased from the first server."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from headrace.parameter_server.client.client import Client
from headrace.parameter_server.client.gradients import LeaderClient
from headrace.parameter_server.wire.messages import Kind, Message
from headrace.training.synchronization import DataLeases, Lease, SyncPoint

_LOOK_EVERY_S = 0.005

Stretch = Callable[[int, int], tuple[int, int]]
"""From rounds that are done and the next fence to that fence, or an earlier one, and the rounds of a block up to it."""


class SideWork(Protocol):
    """What a worker has going on beside its steps, on links of its own."""

    @property
    def moved_bytes(self) -> int:
        """Payload that went over those links."""

    def renew(self) -> None:
        """Lets what goes on come to its end, and brings the parameters up to date."""

    def resume(self) -> None:
        """Is told that the next lease begins."""

    def close(self) -> None:
        """Ends it all, and the links."""


class ServerDataLeases(DataLeases):
    """A lease is of a block: so many rounds, or what is left of them before the next fence.

    How many may change at a fence, where all meet; whoever gets a lease is told.

    Args:
        client: of this worker.
        leads: whether this worker brings the parameters to begin with.
        servers: how many there are.
        parts: portions of a round.
        stretch: where all meet, returns from how many rounds are done and the next fence where the next fence is to be,
            perhaps an earlier one, and the rounds of a block up to there.
        aside: brings the parameters up to date where all meet; None to pull them.
        rests: whether others, who may not be far ahead of this worker, need not wait for it while it waits for data.
        alone: rounds from the run's begin on that worker 0 does alone, to the end of a block.

    Attributes:
        lease: the one that is held, or has just been pushed; -1 for none, or where somebody else commits it.
        late: whether its push was refused because it came too late, so that others have to do it.
        weight, share: what the gradient of the last step is worth.
        left: rounds of the lease that are still to be computed.
        span: rounds of a lease, but for the last before a fence.
        met: rounds that were done where all met last.
    """

    def __init__(
        self,
        client: Client | LeaderClient,
        leads: bool,
        servers: int,
        parts: int,
        stretch: Stretch | None = None,
        aside: SideWork | None = None,
        alone: int = 0,
        rests: bool = False,
    ) -> None:
        self.lease = -1
        self.late = False
        self.weight, self.share = 0.0, 0.0
        self.left, self.span = 0, 1
        self.met = 0
        self._client = client
        self._leads = leads
        self._servers = servers
        self._parts = parts
        self._stretch = stretch or steady(1)
        self._aside = aside
        self._alone = alone
        self._rests = rests
        # Blocks are counted on over fences, so that no lease has the number of another.
        self._fence = 0

    def begin(self) -> None:
        # Of a replica, one rank may hold nothing that is trained.
        while self._servers and not self._client.ask(0, Message(Kind.BEGIN, flag=self._leads)):
            time.sleep(_LOOK_EVERY_S)
        self.renew()

    def ask(self, leaves: bool = False) -> None:
        if leaves:
            self._leave()
            return
        self._client.tell(Message(Kind.ASK, flag=self.late, lease=self.lease))
        self.lease, self.late = -1, False

    def next(self) -> Lease | SyncPoint:
        answer = self._client.lease(self._rests)
        begin, first, until, self.span, block, which, *members = answer.numbers
        round_ = min(until, begin + (block - first) * self.span)
        if answer.kind == Kind.SYNC_POINT:
            self._fence, self.met = block, round_
            return SyncPoint(round_, which, tuple(zip(members[::2], members[1::2], strict=True)))
        if self._client.rested:
            # Meanwhile others have gone on, and what is made of old parameters would be late.
            self.renew()
        if self._aside:
            self._aside.resume()
        self.lease = answer.lease
        self.left = min(self.span, until - round_)
        return Lease(round_, which, self._parts, self.left, answer.lease)

    def weigh(self, weight: float, share: float) -> None:
        self.weight, self.share = weight, share
        self.left -= 1

    def halt(self) -> None:
        self._client.tell(Message(Kind.HALT))

    def advance(self, done: int, until: int) -> None:
        until, span = self._stretch(done, until)
        for server in range(self._servers):
            self._client.ask(server, Message(Kind.SETTLE, lease=done))
        alone = blocks(done, max(done, self._alone), span)
        ahead = self._fence + blocks(done, until, span)
        self._client.tell(Message(Kind.ADVANCE, lease=self._fence, numbers=(ahead, alone, done, until, span)))

    @property
    def moved_bytes(self) -> int:  # type: ignore[override]
        return self._client.moved_bytes + (self._aside.moved_bytes if self._aside else 0)

    def renew(self) -> None:
        if self._aside:
            self._aside.renew()
        else:
            self._client.pull()

    def end(self) -> None:
        for server in range(self._servers):
            self._client.ask(server, Message(Kind.END))

    def close(self) -> None:
        if self._aside:
            self._aside.close()
        self._client.close()

    def _leave(self) -> None:
        if self._aside:
            self._aside.renew()
        if self.lease >= 0:
            self._client.tell(Message(Kind.COMMIT, flag=self.late, lease=self.lease))
        for server in range(self._servers):
            self._client.ask(server, Message(Kind.LEAVE))


def steady(span: int) -> Stretch:
    """Returns what leaves fences where they are, and makes all blocks of so many rounds."""
    return lambda _, until: (until, span)


def blocks(first: int, until: int, span: int) -> int:
    """Returns how many blocks of `span` rounds there are from one fence to the next."""
    return -(-(until - first) // span)
