"""Connections of one rank to one rank of every other host, and the collectives over them.

For a sum each host adds up one part, in the order of hosts, and sends the sum to all others:

    host 0 │ part 0 │ part 1 │ part 2 │        part 1 of hosts 0 and 2 ──► host 1 adds up
    host 1 │ part 0 │ part 1 │ part 2 │        sum of part 1           ◄── host 1, to hosts 0 and 2
    host 2 │ part 0 │ part 1 │ part 2 │

A host sends and receives 2 (H - 1)/H of the tensor, as in a ring (Patarasuk, Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations", 2009, section 3). Unlike there, what a codec rounds is rounded twice on any
number of hosts. Pieces go both ways at once: while the first are added up, the next are on their way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import pairwise
from time import monotonic

import torch
import zmq
from torch import Tensor

from headrace.collectives.base import HostMap
from headrace.collectives.compression import Encoder
from headrace.transport.codec import BLOCK
from headrace.transport.one_way import SLICE_MS, Limits, PullEnd, PushEnd

PIECE_BYTES = 512 * 1024
_AHEAD = 8
"""Pieces that wait to be sent over a connection, at most."""
_LINGER_MS = 2_000
_NOTHING = torch.empty(0, dtype=torch.uint8)

Address = tuple[str, str]
Check = Callable[[int, str], None]
_Outgoing = dict[int, deque[Callable[[], Tensor]]]


class HostLinks:
    """The connections; every collective is called at the same time on all hosts.

    `check(host, broken)` is called about every 50 ms of waiting for a host, with how the connection to it has ended, ""
    while it stands; it raises where no answer will come. A connection that is silent for `silent_s` has ended.

    Attributes:
        addresses: by host, where it may connect, and with which key.
        moved_bytes: sent and received.
    """

    def __init__(self, host: int, hosts: int, home: HostMap, check: Check, silent_s: float) -> None:
        self.moved_bytes = 0
        self._host, self._hosts = host, hosts
        self._others = [other for other in range(hosts) if other != host]
        self._check = check
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._pushes: dict[int, PushEnd] = {}
        # Any number may wait, so that signs of life are read; what a peer sends ahead is limited by the collectives.
        limits = Limits(0, int(1000 * silent_s), PIECE_BYTES)
        self._send_limits = replace(limits, slots=_AHEAD)
        self._pulls = {
            other: PullEnd(self._context, limits, self._end_check(other), home.address, home.encrypt)
            for other in self._others
        }
        self.addresses: dict[int, Address] = {
            other: (end.address, end.key.decode()) for other, end in self._pulls.items()
        }

    def connect(self, addresses: Mapping[int, Address]) -> None:
        """Connects to every other host, at the address that it has given to this one."""
        for other, (address, key) in addresses.items():
            check = self._end_check(other)
            self._pushes[other] = PushEnd(self._context, self._send_limits, check, address, key.encode())
        for other in self._others:
            self._pushes[other].meet()
            self._pulls[other].meet()

    def all_reduce(self, flat: Tensor, encoder: Encoder) -> None:
        """Replaces a flat tensor by the sum over hosts."""
        parts = _parts(flat, self._hosts)
        own = parts[self._host]
        outgoing: _Outgoing = {
            other: deque(partial(encoder.encode, flat, where) for where in parts[other]) for other in self._others
        }
        given: list[dict[int, Tensor]] = [{} for _ in own]
        # Contributions to this host's part come first, then the sum of the other's.
        counts = dict.fromkeys(self._others, 0)

        def take(other: int, encoded: Tensor) -> None:
            index = counts[other]
            counts[other] += 1
            if index >= len(own):
                encoder.decode(encoded, flat[parts[other][index - len(own)]])
                return
            given[index][other] = encoded
            if len(given[index]) == len(self._others):
                summed = self._add(flat, own[index], given[index], encoder)
                given[index].clear()
                for queue in outgoing.values():
                    queue.append(lambda: summed)

        self._transfer(outgoing, {other: len(own) + len(parts[other]) for other in self._others}, take)

    def trade(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, Tensor]) -> None:
        """Sends `(nbytes,)` uint8 to each other host, and receives what each has sent to this one."""
        places = {other: iter(list(_pieces(content))) for other, content in incoming.items()}
        self._transfer(
            {other: deque(_constant(piece) for piece in _pieces(content)) for other, content in outgoing.items()},
            {other: len(list(_pieces(content))) for other, content in incoming.items()},
            lambda other, received: _copy(received, next(places[other])),
        )

    def broadcast(self, content: Tensor) -> None:
        """Replaces `(nbytes,)` uint8 by host 0's: each host passes on what it has received to the next one."""
        pieces = list(_pieces(content))
        first, last = self._host == 0, self._host == self._hosts - 1
        outgoing: _Outgoing = {} if last else {self._host + 1: deque(map(_constant, pieces) if first else ())}
        places = iter(pieces)

        def take(_: int, received: Tensor) -> None:
            place = next(places)
            _copy(received, place)
            if not last:
                outgoing[self._host + 1].append(_constant(place))

        self._transfer(outgoing, {} if first else {self._host - 1: len(pieces)}, take)

    def close(self, lingers: bool = True) -> None:
        """Ends the connections, after what is on its way has left if it `lingers`."""
        for other, push in self._pushes.items():
            push.close(_LINGER_MS if lingers and not self._ended(other) else 0)
        for pull in self._pulls.values():
            pull.close()
        self._context.term()

    def _add(self, flat: Tensor, where: slice, given: Mapping[int, Tensor], encoder: Encoder) -> Tensor:
        """Replaces a piece by its sum, as all hosts will read it; returns the sum's bytes."""
        own, total = flat[where], None
        read = torch.empty_like(own)
        for host in range(self._hosts):
            if host != self._host:
                encoder.decode(given[host], read)
            addend = own if host == self._host else read
            total = addend.clone() if total is None else total.add_(addend)
        assert total is not None
        own.copy_(total)
        encoded = encoder.encode(flat, where)
        if not encoder.exact:
            encoder.decode(encoded, own)
        return encoded

    def _transfer(self, outgoing: _Outgoing, expected: dict[int, int], take: Callable[[int, Tensor], None]) -> None:
        """Sends what is in the queues, and what `take` adds to them; takes so many pieces from each host."""
        ends: dict[int, str] = {}
        ready: dict[int, memoryview] = {}
        moved_s = monotonic()
        while any(outgoing.values()) or any(expected.values()):
            if self._send(outgoing, ready) | self._receive(expected, take):
                moved_s = monotonic()
                continue
            awaited = {other for waits in (outgoing, expected) for other, left in waits.items() if left}
            for other, end in ends.items():
                self._check(other, f"{end}, after {monotonic() - moved_s:.1f} s without progress")
            # What came before the end is read after it.
            ends = {other: end for other in awaited if (end := self._ended(other))}
            if not ends and not self._poll(outgoing, expected):
                for other in awaited:
                    self._check(other, "")

    def _send(self, outgoing: _Outgoing, ready: dict[int, memoryview]) -> bool:
        moved = False
        for other, queue in outgoing.items():
            while queue:
                if other not in ready:
                    ready[other] = queue[0]().numpy().data
                try:
                    self._pushes[other].socket.send(ready[other], zmq.NOBLOCK)
                except zmq.Again:
                    break
                queue.popleft()
                self.moved_bytes += len(ready.pop(other))
                moved = True
        return moved

    def _receive(self, expected: dict[int, int], take: Callable[[int, Tensor], None]) -> bool:
        moved = False
        for other, left in expected.items():
            for _ in range(min(left, _AHEAD)):
                try:
                    (frame,) = self._pulls[other].next()
                except zmq.Again:
                    break
                expected[other] -= 1
                self.moved_bytes += len(frame)
                moved = True
                received = torch.frombuffer(frame.buffer, dtype=torch.uint8) if len(frame) else _NOTHING
                try:
                    take(other, received)
                except ValueError as error:
                    self._check(other, f"it takes part in another collective: {error}")
                    raise
        return moved

    def _poll(self, outgoing: _Outgoing, expected: Mapping[int, int]) -> bool:
        poller = zmq.Poller()
        for other, queue in outgoing.items():
            if queue:
                poller.register(self._pushes[other].socket, zmq.POLLOUT)
                poller.register(self._pushes[other].events.socket, zmq.POLLIN)
        for other, left in expected.items():
            if left:
                poller.register(self._pulls[other].socket, zmq.POLLIN)
                poller.register(self._pulls[other].events.socket, zmq.POLLIN)
        return bool(poller.poll(SLICE_MS))

    def _ended(self, other: int) -> str:
        return self._pushes[other].ended() or self._pulls[other].ended()

    def _end_check(self, other: int) -> Callable[[Callable[[], bool], str], None]:
        return lambda _, broken: self._check(other, broken)


def _parts(flat: Tensor, hosts: int) -> list[list[slice]]:
    """Returns the pieces of the part that each host adds up; all but the last end at a multiple of a codec's block."""
    count = flat.numel()
    cuts = [count * host // hosts // BLOCK * BLOCK for host in range(hosts)] + [count]
    step = PIECE_BYTES // flat.element_size()
    return [
        [slice(start, min(start + step, stop)) for start in range(begin, stop, step)] for begin, stop in pairwise(cuts)
    ]


def _pieces(content: Tensor) -> Iterator[Tensor]:
    """Yields `(nbytes,)` uint8 piece by piece; of nothing, nothing."""
    return (content[start : start + PIECE_BYTES] for start in range(0, len(content), PIECE_BYTES))


def _constant(piece: Tensor) -> Callable[[], Tensor]:
    return lambda: piece


def _copy(received: Tensor, place: Tensor) -> None:
    if received.shape != place.shape:
        raise ValueError(f"{len(received):,} bytes where {len(place):,} were expected")
    place.copy_(received)
