"""Threads that send to each other as devices do: a send ends when the other side receives, one operation after another.

A stand-in for NCCL's send and receive. What is sent is read when both sides have met, which may be long after the call,
and what is received is NaN until then.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import monotonic

from torch import Tensor

from headrace.collectives.base import Peers
from headrace.collectives.threads import ThreadCollective, ThreadGroup

_PATIENCE_S, _SLICE_S = 120.0, 0.05
_NAN = 255

Piece = tuple[Tensor, int]


@dataclass
class Operation:
    """What a rank has begun: what is left of it."""

    sends: deque[Piece]
    receives: deque[Piece]


@dataclass
class Meeting:
    """The operations of all ranks, those first that were begun first."""

    world: int
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.running: list[deque[Operation]] = [deque() for _ in range(self.world)]
        self.most = 0
        self.nbytes = 0

    def go_on(self) -> None:
        """Does all that can be done."""
        while any([self._pair(*pair) for pair in self._pairs()]):
            for own in self.running:
                while own and not (own[0].sends or own[0].receives):
                    own.popleft()
        self.changed.notify_all()

    def _pairs(self) -> list[tuple[int, int]]:
        return [(a, b) for a in range(self.world) for b in range(self.world) if self.running[a] and self.running[b]]

    def _pair(self, source: int, target: int) -> bool:
        if not (self.running[source] and self.running[target]):
            return False
        sender, receiver = self.running[source][0], self.running[target][0]
        sent = next((each for each in sender.sends if each[1] == target), None)
        got = next((each for each in receiver.receives if each[1] == source), None)
        if sent is None or got is None:
            return False
        assert sent[0].shape == got[0].shape, "one side has agreed on something else"
        got[0].copy_(sent[0])
        self.nbytes += sent[0].nbytes
        for pieces, piece in ((sender.sends, sent), (receiver.receives, got)):
            del pieces[next(index for index, each in enumerate(pieces) if each is piece)]
        return True


class Rendezvous(Peers):
    """A rank's end of a meeting; `group` tells when another rank has failed."""

    def __init__(self, group: ThreadCollective, meeting: Meeting) -> None:
        self.rank = group.rank
        self._group, self._meeting = group, meeting

    def exchange(self, sends: Sequence[Piece], receives: Sequence[Piece]) -> Callable[[], None]:
        meeting = self._meeting
        assert sends or receives
        assert all(tensor.is_contiguous() and peer != self.rank for tensor, peer in (*sends, *receives))
        for tensor, _ in receives:
            tensor.fill_(_NAN)
        operation = Operation(deque(sends), deque(receives))
        with meeting.changed:
            meeting.most = max(meeting.most, len(sends) + len(receives))
            meeting.running[self.rank].append(operation)
            meeting.go_on()

        def left() -> int:
            return len(operation.sends) + len(operation.receives)

        def wait() -> None:
            give_up = monotonic() + _PATIENCE_S
            with meeting.changed:
                while left():
                    self._group.check()
                    assert monotonic() < give_up, f"rank {self.rank} waits for ever, for {left()} to be met"
                    meeting.changed.wait(_SLICE_S)

        return wait


@dataclass
class Devices:
    """Makes the ends of one meeting, for `with_replicas`."""

    meeting: Meeting

    def __call__(self, group: ThreadGroup, rank: int) -> ThreadCollective:
        collective = ThreadCollective(group, rank)
        collective.peers = Rendezvous(collective, self.meeting)
        return collective
