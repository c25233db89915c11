"""A worker's data, leased from the first server."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from headrace.collectives.base import ProcessGroup
from headrace.parameter_server.client.client import Client
from headrace.parameter_server.wire import Kind, Message, floats_in, numbers_of
from headrace.training.synchronization import DataLeases, Lease, SyncPoint

_POLL_S = 0.005

_SHARED_NUMBERS = 6
"""Numbers of a grant or sync point that all ranks of a replica need: all but the members, as none is lost alone."""

Steer = Callable[[Lease, tuple[float, ...]], tuple[float, ...] | None]
"""Does what a lease without data asks for, given its report, and returns the report of it; None for a lease of data."""

NextSyncPoint = Callable[[int, int], tuple[int, int]]
"""From the rounds done and the planned next sync point to the actual one, and the rounds of a lease until then."""


class BackgroundWork(ABC):
    """What a worker does beside its steps, on connections of its own; `moved_bytes` is what these have carried."""

    moved_bytes: int = 0

    @abstractmethod
    def renew(self) -> None:
        """Blocks until the work has ended, and brings the parameters up to date."""

    def finish(self) -> None:  # noqa: B027  (a worker may push and fetch at once)
        """Blocks until the work has ended."""

    def resume(self) -> None:  # noqa: B027  (most have nothing to resume)
        """Called when the next lease begins."""

    def close(self) -> None:  # noqa: B027  (the client may be closed elsewhere)
        """Ends the work, and closes its connections."""


@dataclass(frozen=True)
class LeasedStep:
    """One step of a lease, with its gradient's weight and share, see `DataLeases.weigh`; `last` if the lease ends."""

    lease: int
    weight: float
    share: float
    last: bool


class ServerDataLeases(DataLeases):
    """Leases data for one replica, whose ranks each have one of these: the first rank asks, and tells the others.

    A lease is of `span` rounds, or of those left before the next sync point. The span may change at a sync point.

    Args:
        background: brings the parameters up to date at a sync point; None to pull them.
        alone: rounds from the run's start that only worker 0 computes, to the end of a lease.
        rests: whether other workers, if their lead is bounded, need not wait for this one while it waits for data.

    Attributes:
        steer: where some leases are no data, see `PortionTable`; None where all are.
        lease: the one that is held, or has just been pushed; -1 for none, or if the background work commits it.
        late: whether its push was refused because it came too late, so that it is given out again; a portion is late
            because another worker was faster, so that it is done.
        step: what is computed now; None in a step without data.
        span: rounds of a lease, except the last before a sync point.
        report: numbers that came with the lease, or go back with it; see `PortionTable`.
    """

    def __init__(
        self,
        client: Client,
        group: ProcessGroup,
        leads: bool,
        parts: int,
        next_sync_point: NextSyncPoint | None = None,
        background: BackgroundWork | None = None,
        alone: int = 0,
        rests: bool = False,
    ) -> None:
        self.lease = -1
        self.late = False
        self.step: LeasedStep | None = None
        self.report: tuple[float, ...] = ()
        self._left, self.span = 0, 1
        self.synced_round = 0
        self.client, self.leads = client, leads
        self._group = group
        self._parts = parts
        self._next_sync_point = next_sync_point or fixed_span(1)
        self._background = background
        self._alone = alone
        self._rests = rests
        self.steer: Steer | None = None
        # Leases are numbered on over sync points, so that no two have the same number.
        self._sync_point = 0
        # With `prepare`: whether a request is open while a lease is held, and what it was answered.
        self._open = False
        self._early: Message | None = None

    def begin(self) -> None:
        # A rank of a replica may have no trainable parameter, and so no server.
        while self.client.servers and not self.client.ask(0, Message(Kind.BEGIN, flag=self.leads)):
            time.sleep(_POLL_S)
        self.renew()

    def ask(self, leaves: bool = False) -> None:
        if not leaves:
            # An open request is answered when there is data, or all have committed.
            kind = Kind.COMMIT if self._open else Kind.ASK
            self._tell(self._done(kind))
            self._open = self.prepare is not None
            self.lease, self.late, self.report = -1, False, ()
            return
        if self._background:
            self._background.renew()
        if self.lease >= 0:
            self._tell(self._done(Kind.COMMIT))
        self.client.ask_all(Message(Kind.LEAVE))

    def next(self) -> Lease | SyncPoint:
        answer, self._early, self.following = self._early, None, None
        if answer is None:
            answer, self._open = self._receive(), False
        round_, number, which, members = self._parse(answer)
        if answer.kind == Kind.SYNC_POINT:
            self._sync_point, self.synced_round = number, round_
            # There workers are compared and saved, and one model is left.
            self.client.exact = True
            if self._background:
                # A replica's lease is done when its first rank has pushed; the other ranks may push still.
                self._background.finish()
            return SyncPoint(round_, which, tuple(zip(members[::2], members[1::2], strict=True)))
        if self.client.rested:
            # Others have gone on meanwhile, so that a gradient of the old parameters would be late.
            self.renew()
        if self._background:
            self._background.resume()
        lease = self._lease_of(answer)
        self.lease, self._left, self.report = lease.lease, lease.rounds, floats_in(members)
        if self.steer is not None:
            reply = self.steer(lease, self.report)
            if reply is not None:
                self.report = reply
                self.ask()
                return self.next()
            # A line search evaluates the same examples at points that the model may never be at.
            self.records = not self.report[0]
        if self.prepare is not None:
            self._look_ahead()
        return lease

    def weigh(self, weight: float, share: float, loss: Tensor | None = None) -> None:
        self._left -= 1
        self.step = None if self.lease < 0 else LeasedStep(self.lease, weight, share, last=not self._left)
        if self.steer is not None:
            self.report = (0.0 if loss is None else loss.item(), weight)

    def halt(self) -> None:
        self._tell(Message(Kind.HALT))

    def advance(self, done: int, until: int) -> None:
        until, span = self._next_sync_point(done, until)
        self.client.exact = False
        self.client.ask_all(Message(Kind.SETTLE, lease=done))
        alone = leases_between(done, max(done, self._alone), span)
        ahead = self._sync_point + leases_between(done, until, span)
        self._tell(Message(Kind.ADVANCE, lease=self._sync_point, numbers=(ahead, alone, done, until, span)))

    @property
    def moved_bytes(self) -> int:  # type: ignore[override]
        return self.client.moved_bytes + (self._background.moved_bytes if self._background else 0)

    def renew(self) -> None:
        if self._background:
            self._background.renew()
        else:
            self.client.pull()

    def end(self) -> None:
        self.client.ask_all(Message(Kind.END))

    def close(self) -> None:
        if self._background:
            self._background.close()
        self.client.close()

    def _look_ahead(self) -> None:
        """Asks for the lease after the one that is held; it may be there at once, or later, or never."""
        if not self._open:
            self._tell(Message(Kind.ASK, lease=-1))
        self._early = self.client.servers[0].granted()
        self._open = self._early is None
        self.following = None if self._early is None else self._lease_of(self._early)

    def _done(self, kind: Kind) -> Message:
        """Returns the message that says what became of the lease that is held."""
        returned = self.late and self.steer is None
        return Message(kind, flag=returned, lease=self.lease, numbers=numbers_of(self.report))

    def _parse(self, answer: Message) -> tuple[int, int, int, list[int]]:
        """Returns round, number, part or meeting, and the rest of a grant or sync point."""
        begin, first, until, self.span, number, which, *rest = answer.numbers
        return min(until, begin + (number - first) * self.span), number, which, rest

    def _lease_of(self, grant: Message) -> Lease:
        round_, _, part, _ = self._parse(grant)
        return Lease(round_, part, self._parts, min(self.span, grant.numbers[2] - round_), grant.lease)

    def _tell(self, message: Message) -> None:
        if self._group.rank == 0:
            self.client.servers[0].tell(message)

    def _receive(self) -> Message:
        """Waits for the next grant or sync point, and returns it on every rank of the replica."""
        if self._group.world == 1:
            return self.client.lease(self._rests)
        sent = [0.0] * (2 + _SHARED_NUMBERS)
        if self._group.rank == 0:
            message = self.client.lease(self._rests)
            sent = [float(message.kind), float(message.lease), *map(float, message.numbers[:_SHARED_NUMBERS])]
        kind, lease, *numbers = map(int, self._group.sum(sent))
        return Message(Kind(kind), lease=lease, numbers=tuple(numbers))


def fixed_span(span: int) -> NextSyncPoint:
    """Returns a `NextSyncPoint` that keeps the planned sync points, and leases of `span` rounds."""
    return lambda _, until: (until, span)


def leases_between(first: int, until: int, span: int) -> int:
    """Returns how many leases of `span` rounds one worker has from round `first` to a sync point at `until`."""
    return -(-(until - first) // span)
