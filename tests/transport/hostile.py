"""Attacks on what a genuine link sends over the network, by a process on the way that does not hold the secret."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import zmq

from headrace.transport.base import Slots, TransportLayout
from headrace.transport.frames import Frame, FrameKind, control_frame, numbered
from headrace.transport.remote_server import RemoteServerTransport
from headrace.transport.zeromq import Keys
from transport.middle import FIRST, Middle, frame

__all__ = ["ATTACKS", "FRAMES", "NOTHING", "SLOTS", "Attacker", "record"]

SLOTS = Slots([8])
FRAMES = 4
"""Genuine ones, after the hello, of two frames each."""

ATTACKS = (
    *("forged", "forged length", "forged flags", "truncated", "grown", "broken off"),
    *("replayed at once", "replayed later", "reordered", "removed", "reflected", "of another link", "of another run"),
    "skipped",
)
NOTHING = "nothing"
"""Changes nothing: all must be heard, or the attacks would prove nothing."""

_HARMLESS = ("forged flags", NOTHING)
"""The flags outside are not what the port goes by: it decrypts its own."""

_PADDING = range(8, 80)
"""Of HELLO: zeros that are not read, there so that an answer is not longer than a question."""

_DEADLINE_S = 30.0


def genuine(trial: int = 0) -> list[Frame]:
    """Returns what a link says: its hello, then messages that are all different, also from those of other trials."""
    messages = [
        numbered(control_frame(FrameKind.LAST, b"genuine %d of %d" % (number, trial)), 1 + number)
        for number in range(FRAMES)
    ]
    return [control_frame(FrameKind.HELLO, TransportLayout(SLOTS, SLOTS).hello()), *messages]


@dataclass
class Trial:
    """One attack on one link: what the port has heard of it, some of it while the next one ran already."""

    kind: str
    target: int
    expected: list[bytes]
    heard: list[bytes] = field(default_factory=list)

    def wrong(self) -> str:
        """Says what the port should not have heard; "" if there is nothing."""
        # A message is two frames, and the hello is the first.
        last = self.target + 1 if self.kind == "replayed at once" else self.target
        most = FRAMES if self.kind in _HARMLESS else max(0, (last - FIRST) // 2 - 1)
        if self.heard == self.expected[: len(self.heard)] and len(self.heard) <= most:
            return ""
        return f"{self.kind} frame {self.target}: the port heard {self.heard}"


_TRIALS: dict[int, Trial] = {}
"""The last ones in this process, by number: a port may hear them late."""

_KEPT = 100
_NUMBERS = itertools.count()


class Attacker:
    """Lets genuine links speak to a port, and changes what they say.

    Args:
        port: of the run that is attacked.
        strange: frames that a link of another run has sent.
        rng: decides.
        quiet_s: after this time the link ends, if the port has not ended it.
    """

    def __init__(
        self, port: RemoteServerTransport, strange: Sequence[bytes], rng: random.Random, quiet_s: float = 1.0
    ) -> None:
        self._port = port
        self._strange = list(strange)
        self._rng = rng
        self._quiet_s = quiet_s
        self._middle = Middle(port.address)
        self._context: zmq.Context[Any] = zmq.Context()
        self._earlier: list[bytes] = []

    def close(self) -> None:
        """Ends what it has opened."""
        self._context.term()
        self._middle.close()

    def attack(self, kind: str) -> str:
        """Attacks one frame of one link; returns what was wrong, "" if the port has heard nothing but what was sent."""
        middle, rng = self._middle, self._rng
        del middle.seen[:]
        middle.over.clear()
        last = FIRST + 2 * FRAMES
        # Later ones follow, so that the port would notice a frame that is missing.
        target = rng.randrange(FIRST if kind in ("removed", "reordered", "replayed later") else 0, last)
        if kind == "skipped":
            # Both of its frames, which leaves a sound stream; the last has no follower that would show it.
            target = FIRST + 2 * rng.randrange(1, FRAMES)
        held: list[bytes] = []
        number = next(_NUMBERS)
        said = genuine(number)
        trial = _TRIALS[number] = Trial(kind, target, [b"genuine %d of %d" % (each, number) for each in range(FRAMES)])
        _TRIALS.pop(number - _KEPT, None)

        def alter(number: int, sent: bytes, heard: Sequence[bytes]) -> list[bytes]:
            if number == target + 1 and held:
                return [sent, held.pop()]
            if kind == "skipped" and number in (target, target + 1):
                return []
            if number != target:
                return [sent]
            if kind == "reordered":
                held.append(sent)
                return []
            return self._altered(kind, number, sent, heard)

        middle.alter = alter
        worker = self._context.socket(zmq.DEALER)
        worker.linger, worker.reconnect_ivl = 0, -1
        Keys(self._port.secret).protect_client(worker)
        worker.connect(middle.address)
        # A link that is cut off early has no peer for the rest.
        with suppress(zmq.Again):
            for parts in said:
                worker.send_multipart(parts, zmq.NOBLOCK)
        return self._listen(worker, trial)

    def _listen(self, worker: zmq.Socket[bytes], trial: Trial) -> str:
        """Hears the port until the connection has ended; returns what was wrong."""
        began, last = monotonic(), [*_TRIALS][-1]
        quiet_s = _DEADLINE_S / 2 if trial.kind == NOTHING else self._quiet_s
        touched = {last}
        while not (over := self._middle.over.is_set()) or worker is not None:
            touched |= self._hear(0.001)
            all_heard = len(trial.heard) == FRAMES
            if worker is not None and (over or monotonic() - began > quiet_s or all_heard):
                worker.close()
                worker = None  # type: ignore[assignment]
            if monotonic() - began > _DEADLINE_S:
                raise TimeoutError("the port has not ended an attacked connection")
        touched |= self._hear(0.0)
        self._earlier = list(self._middle.seen) or self._earlier
        if trial.kind == NOTHING and len(trial.heard) < FRAMES:
            return f"{NOTHING} was changed, and the port heard {trial.heard}"
        return "; ".join(said for number in sorted(touched) if (said := _TRIALS[number].wrong()))

    def _hear(self, wait_s: float) -> set[int]:
        """Notes what the port hears; returns the trials that it is of."""
        heard = [mail.message for mail in self._port.receive(wait_s) if mail.message]
        numbers = [int(message.rpartition(b" ")[2]) for message in heard]
        for number, message in zip(numbers, heard, strict=True):
            _TRIALS[number].heard.append(message)
        return set(numbers)

    def _altered(self, kind: str, number: int, sent: bytes, heard: Sequence[bytes]) -> list[bytes]:
        rng = self._rng
        head = 9 if sent[0] & 2 else 2
        body, flags = bytearray(sent[head:]), sent[0]
        if kind == NOTHING:
            return [sent]
        if kind == "forged":
            at = rng.randrange(len(body))
            while number == 0 and at in _PADDING:
                at = rng.randrange(len(body))
            body[at] ^= 1 << rng.randrange(8)
            return [sent[:head] + body]
        if kind == "forged length":
            length = rng.choice([0, len(body) - 1, 255, 1 << 20, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
            return [bytes([flags | 2]) + length.to_bytes(8, "big") + body]
        if kind == "forged flags":
            return [bytes([flags ^ rng.choice([1, 4, 8, 64, 128])]) + sent[1:]]
        if kind == "truncated":
            return [frame(bytes(body[: rng.randrange(len(body))]), flags)]
        if kind == "grown":
            return [frame(bytes(body) + rng.randbytes(rng.randrange(1, 300)), flags)]
        if kind == "broken off":
            return [sent[: rng.randrange(1, len(sent))], b""]
        if kind == "replayed at once":
            return [sent, sent]
        if kind == "replayed later":
            return [rng.choice(self._middle.seen[:-1])]
        if kind == "removed":
            return []
        if kind == "reflected":
            return [rng.choice(heard) if heard else rng.choice(self._strange)]
        return [rng.choice(self._earlier or self._strange if kind == "of another link" else self._strange)]


def record(secret: bytes) -> list[bytes]:
    """Returns the frames that a link of a run with this secret sends."""
    port = RemoteServerTransport(SLOTS, SLOTS, secret=secret)
    attacker = Attacker(port, [], random.Random(0))
    middle = attacker._middle
    worker = attacker._context.socket(zmq.DEALER)
    Keys(secret).protect_client(worker)
    worker.connect(middle.address)
    for parts in genuine():
        worker.send_multipart(parts)
    deadline = monotonic() + _DEADLINE_S
    heard = 0
    while heard < FRAMES:
        assert monotonic() < deadline
        heard += len(port.receive(0.01))
    frames = list(middle.seen)
    worker.close(0)
    attacker.close()
    port.close()
    return frames
