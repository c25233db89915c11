"""A link on which messages are lost, doubled, late or cut off, as a seed has it: for tests and for measurements.

Real links lose nothing without an end, and neither double nor exchange what they carry. Whatever must also hold between
them and over what comes after them is tried here, with every fault by itself and all of them at once.

    request lost    ──► ╳            reply lost    ──►      ◄── ╳
    doubled         ──► ──►          late          ──►₂ ──►₁    (behind the next ones)
    cut             ──► and no more  silent        nothing either way, and no end
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from time import monotonic

from torch import Tensor

from headrace.transport.base import ClientTransport

_LATEST = 3
"""So many later messages may overtake a late one."""

_Request = tuple[bytes, Sequence[int], bytes]
_Reply = tuple[bytes, memoryview]


@dataclass(frozen=True)
class Odds:
    """Shares of the messages that go one way; whatever is left over arrives.

    Attributes:
        lost: arrive never.
        doubled: arrive twice, the second time late.
        late: are overtaken by the next ones.
        cut: are the last ones: a request still arrives half of the time, a reply does not; then the link ends.
        silent: are the last ones, and neither end is told.
    """

    lost: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    cut: float = 0.0
    silent: float = 0.0


class Faults:
    """What becomes of one message after the other. Two with the same seed say the same.

    Args:
        seed: of everything random.
        requests: of what a link sends.
        replies: of what it receives.

    Attributes:
        happened: how often, by name: "request lost", "reply cut".
    """

    def __init__(self, seed: int, requests: Odds, replies: Odds) -> None:
        self.happened: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._names = ["", *(field.name for field in fields(Odds))]
        self._weights = {
            way: [1.0 - sum(astuple(odds)), *astuple(odds)] for way, odds in (("request", requests), ("reply", replies))
        }

    def next(self, way: str) -> str:
        """Returns what becomes of the next "request" or "reply": a field's name of `Odds`, or "" if it arrives."""
        (fate,) = self._random.choices(self._names, self._weights[way])
        if fate:
            self.happened[f"{way} {fate}"] += 1
        return fate

    def delay(self) -> int:
        """Returns how many later messages overtake a late one."""
        return self._random.randint(1, _LATEST)

    def arrives(self) -> bool:
        """Whether a request arrives before its link is cut."""
        return self._random.random() < 0.5


class FaultyLink(ClientTransport):
    """A link to which things happen.

    Args:
        link: a sound one; it is closed with this one.
        faults: perhaps of several links, one after the other.
    """

    def __init__(self, link: ClientTransport, faults: Faults) -> None:
        self.window = link.window
        self._link = link
        self._faults = faults
        self._silent = False
        self._cut = False
        self._requests: list[tuple[int, _Request]] = []
        self._replies: list[tuple[int, _Reply]] = []
        self._arrived: deque[_Reply] = deque()

    @property
    def moved_bytes(self) -> int:  # type: ignore[override]
        """Payload that has really gone through it."""
        return self._link.moved_bytes

    def push_slot(self, slot: int) -> Tensor:
        return self._link.push_slot(slot)

    def joined_push_slots(self, slots: range) -> Tensor | None:
        return self._link.joined_push_slots(slots)

    def send(self, message: bytes, slots: Sequence[int] = (), blob: bytes = b"") -> None:
        self._look()
        if self._silent:
            return
        fate = self._faults.next("request")
        if fate == "silent":
            self._silent = True
            return
        if fate == "cut" and not self._faults.arrives():
            self._end()
        if fate != "lost" and fate != "late":
            self._link.send(message, slots, blob)
        if fate == "cut":
            self._end()
        overtaken = [(left - 1, request) for left, request in self._requests]
        self._requests = [each for each in overtaken if each[0]]
        for left, request in overtaken:
            if not left:
                self._link.send(*request)
        if fate in ("doubled", "late"):
            self._requests.append((self._faults.delay(), (message, slots, blob)))

    def receive(self, timeout_s: float) -> _Reply | None:
        deadline = monotonic() + timeout_s
        while True:
            self._look()
            if self._arrived:
                return self._arrived.popleft()
            received = self._link.receive(max(0.0, deadline - monotonic()))
            if received is not None and not self._silent:
                self._take(received)
            elif received is None:
                # Whatever is late comes in the end.
                self._arrived.extend(reply for _, reply in self._replies)
                self._replies.clear()
                if not self._arrived:
                    return None

    def fetch(self, slot: int, into: Tensor) -> int:
        return self._link.fetch(slot, into)

    def current_version(self, slot: int) -> int | None:
        return self._link.current_version(slot)

    def reply_slot(self, slot: int) -> Tensor:
        return self._link.reply_slot(slot)

    def close(self) -> None:
        self._link.close()

    def _take(self, received: _Reply) -> None:
        fate = self._faults.next("reply")
        if fate == "cut":
            self._end()
        self._silent = self._silent or fate == "silent"
        if fate in ("", "doubled"):
            self._arrived.append(received)
        overtaken = [(left - 1, reply) for left, reply in self._replies]
        self._replies = [each for each in overtaken if each[0]]
        self._arrived.extend(reply for left, reply in overtaken if not left)
        if fate in ("doubled", "late"):
            self._replies.append((self._faults.delay(), received))

    def _look(self) -> None:
        if self._cut:
            raise ConnectionResetError("the link was cut on purpose")

    def _end(self) -> None:
        self._cut = True
        self._link.close()
        self._look()
