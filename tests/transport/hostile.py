"""Attacks on what a genuine link sends over the network, by a process on the way that does not hold the secret."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
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
)
NOTHING = "nothing"
"""Changes nothing: all must be heard, or the attacks would prove nothing."""

_HARMLESS = ("forged flags", NOTHING)
"""The flags outside are not what the port goes by: it decrypts its own."""

_PADDING = range(8, 80)
"""Of HELLO: zeros that are not read, there so that an answer is not longer than a question."""

_DEADLINE_S = 30.0


def genuine() -> list[Frame]:
    """Returns what a link says: its hello, then messages that are all different."""
    messages = [numbered(control_frame(FrameKind.LAST, b"genuine %d" % number), 1 + number) for number in range(FRAMES)]
    return [control_frame(FrameKind.HELLO, TransportLayout(SLOTS, SLOTS).hello()), *messages]


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
        held: list[bytes] = []

        def alter(number: int, sent: bytes, heard: Sequence[bytes]) -> list[bytes]:
            if number == target + 1 and held:
                return [sent, held.pop()]
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
            for parts in genuine():
                worker.send_multipart(parts, zmq.NOBLOCK)
        heard = self._listen(worker)
        self._earlier = list(middle.seen) or self._earlier
        expected = [b"genuine %d" % number for number in range(FRAMES)]
        # A letter is two frames, and the hello is the first.
        most = (
            max(0, (target - FIRST) // 2 - 1) if kind != "replayed at once" else max(0, (target + 1 - FIRST) // 2 - 1)
        )
        if kind in _HARMLESS:
            most = FRAMES
        if heard != expected[: len(heard)] or len(heard) > most or (kind == NOTHING and len(heard) < most):
            return f"{kind} frame {target}: the port heard {heard}"
        return ""

    def _listen(self, worker: zmq.Socket[bytes]) -> list[bytes]:
        """Returns what the port hears until the connection has ended."""
        heard: list[bytes] = []
        began = monotonic()
        while not (over := self._middle.over.is_set()) or worker is not None:
            heard += [mail.message for mail in self._port.receive(0.001) if mail.message]
            if worker is not None and (over or monotonic() - began > self._quiet_s or len(heard) == FRAMES):
                worker.close()
                worker = None  # type: ignore[assignment]
            if monotonic() - began > _DEADLINE_S:
                raise TimeoutError("the port has not ended an attacked connection")
        return heard + [mail.message for mail in self._port.receive(0.0) if mail.message]

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
