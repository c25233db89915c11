"""A worker's side of the parameter servers: push, pull, and both in one round trip."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic, sleep

import torch
from torch import Tensor

from headrace.comm.port import Link
from headrace.errors import PeerLost, ServerRefused
from headrace.ps.form import Form
from headrace.ps.messages import Kind, Message, decode, encode
from headrace.ps.shard import Reason
from headrace.replica.conditioning import all_finite

__all__ = ["Client", "Connection"]

_BUCKET_BYTES = 1 << 20
"""A server works on one bucket while the worker copies the next."""
_BUCKET_SHARDS = 4096
"""So many versions go into one message."""

_SLICE_S = 0.05

_KNOWN_S = 2.0
"""After this time whoever watches the processes knows which of them has ended."""


@dataclass(frozen=True)
class Connection:
    """A link to one server, and what lies behind it.

    Attributes:
        link: to it.
        form: of its shards.
        places: this worker's own copy of their parameters, one a shard, in any contiguous shape.
        rank, host: the server's, as errors call it.
    """

    link: Link
    form: Form
    places: Sequence[Tensor]
    rank: int = 0
    host: str = "its host"


class Client:
    """Args:
    connections: one a server.
    worker: number of this worker.
    incarnation: greater than that of whoever had this number before.
    check: called about every 50 ms of waiting; raises to end the wait.
    timeout_s: how long a server may take for an answer that depends on no other worker.

    Raises:
        PeerLost: a server has gone, or gives no answer; by any method.
        ServerRefused: a server does not deal with this worker; by any method.
    """

    def __init__(
        self,
        connections: Sequence[Connection],
        worker: int,
        incarnation: int = 0,
        check: Callable[[], None] = lambda: None,
        timeout_s: float = 60.0,
        together: bool = False,
        observes: bool = False,
    ) -> None:
        self._servers = [_Server(connection, check, timeout_s, together, observes) for connection in connections]
        for server in self._servers:
            joining = Message(Kind.JOIN, flag=observes, numbers=(worker, incarnation))
            server.ask(joining, server.form.describe())

    @property
    def moved_bytes(self) -> int:
        """Payload that has gone to and from all servers."""
        return sum(server.link.moved_bytes for server in self._servers)

    def pull(self) -> None:
        """Brings this worker's copies up to date; waits until it may begin its next round."""
        for server in self._servers:
            for shards in server.buckets:
                server.request(Kind.PULL, shards)
        for server in self._servers:
            server.finish()

    def push(
        self,
        gradients: Sequence[Sequence[Tensor | None]],
        lease: int,
        weight: float = 1.0,
        share: float = 1.0,
        finite: bool | None = None,
        pull: bool = False,
        steps: int = 1,
        versions: Sequence[Sequence[int]] | None = None,
    ) -> Reason | None:
        """Sends gradients to all servers, and waits until they are applied.

        Args:
            gradients: by server and shard; None where the loss does not depend on the parameter.
            lease: of the data that they were made from.
            weight: in the mean of the round; 0 where there was no data.
            share: of the round that they stand for.
            finite: whether all of them are, for whoever has looked; None to look. Those that are not are refused.
            pull: bring the parameters up to date in the same round trip.
            steps: whose gradients these are the sum of.
            versions: by server and shard, of the parameters that they were made with; None for those pulled last.

        Returns:
            None if they count, else why not.
        """
        kind = Kind.PUSH_PULL if pull else Kind.PUSH
        if finite is None:
            finite = all_finite([gradient for own in gradients for gradient in own if gradient is not None])
        head = Message(kind, 0, finite, lease, weight, share, steps=steps)
        for index in range(max(len(server.buckets) for server in self._servers)):
            for number, server in enumerate(self._servers):
                if index < len(server.buckets):
                    own = None if versions is None else versions[number]
                    # All workers push in the same order, so none waits for one that waits for it.
                    server.make_room(pull)
                    server.push(kind, server.buckets[index], gradients[number], head, own)
        reason: Reason | None = None
        for server in self._servers:
            reason = _graver(reason, server.finish(pull))
        return reason

    @property
    def versions(self) -> list[list[int]]:
        """Of the parameters that were pulled last, by server and shard."""
        return [server.versions for server in self._servers]

    def forget(self) -> None:
        """Lets the next pull bring all parameters: this worker's copies are no more what was pulled last."""
        for server in self._servers:
            server.forget()

    def ask(self, server: int, message: Message, blob: bytes = b"") -> bytes:
        """Asks one server for something that is no push or pull, and returns what came with its answer."""
        return bytes(self._servers[server].ask(message, blob))

    def tell(self, message: Message) -> None:
        """Sends the first server, which gives out the data, something that it answers later, if at all."""
        self._servers[0].send(encode(message))

    def begun(self) -> bool:
        """Whether somebody has brought the parameters to begin with."""
        return bool(self.ask(0, Message(Kind.BEGIN, flag=2)))

    def begin(self, leads: bool) -> None:
        """Says that the parameters are there, if this worker has brought them, or waits for who does."""
        self._servers[0].ask(Message(Kind.BEGIN, flag=leads), patient=True)

    def end(self, server: int) -> None:
        """Ends a server; nothing if others have done it."""
        with suppress(PeerLost):
            self.ask(server, Message(Kind.END))

    def lease(self) -> Message:
        """Waits for the first server's next word about data: a grant or a fence."""
        return self._servers[0].lease()

    def shards(self, server: int) -> Form:
        """Returns what shards a server has."""
        return self._servers[server].form

    def close(self) -> None:
        """Ends all links."""
        for server in self._servers:
            server.link.close()


class _Server:
    """One server, as a client sees it."""

    def __init__(
        self, connection: Connection, check: Callable[[], None], timeout_s: float, together: bool, observes: bool
    ) -> None:
        self.link, self.form = connection.link, connection.form
        self.buckets = [range(len(self.form))] if together else _buckets(self.form)
        self._places = [place.view(-1).view(torch.uint8) for place in connection.places]
        pushed = range(0 if observes else len(self.form))
        self._slots = [self.form.seat(shard, self.link.push_slot(shard)) for shard in pushed]
        self._versions = [-1] * len(self.form)
        self._connection = connection
        self._check = check
        self._timeout_s = timeout_s
        self._pending = 0
        self._reason: Reason | None = None
        self._leases: deque[Message] = deque()

    def push(
        self,
        kind: Kind,
        shards: range,
        gradients: Sequence[Tensor | None],
        head: Message,
        versions: Sequence[int] | None = None,
    ) -> None:
        """Puts the gradients of some shards where the server reads them, and says so."""
        known = self._versions if versions is None else versions
        sends, present, numbers = bool(head.weight and head.flag), [], []
        for shard in shards:
            gradient, made_with = gradients[shard], max(0, known[shard])
            numbers.append(made_with if gradient is not None else ~made_with)
            if gradient is not None and sends:
                self.form.encode(shard, gradient, self._slots[shard])
                present.append(shard)
        self.send(encode(head._replace(first=shards.start, numbers=tuple(numbers))), present)
        self._pending += 1

    @property
    def versions(self) -> list[int]:
        """Of the copies."""
        return self._versions[:]

    def forget(self) -> None:
        """Takes the copies for unknown."""
        self._versions = [-1] * len(self.form)

    def request(self, kind: Kind, shards: range) -> None:
        """Asks for the parameters of some shards."""
        versions = tuple(max(0, self._versions[shard]) if self._versions[shard] >= 0 else -1 for shard in shards)
        self.send(encode(Message(kind, shards.start, 1, numbers=versions)))
        self._pending += 1

    def finish(self, pulls: bool = True) -> Reason | None:
        """Waits for all answers, and fetches what they are about if that was asked for; returns a refusal's reason."""
        while self._pending:
            self._await_answer(pulls)
        reason, self._reason = self._reason, None
        return reason

    def make_room(self, pulls: bool) -> None:
        """Waits until another push may be on its way."""
        while self.link.window is not None and self._pending >= self.link.window:
            self._await_answer(pulls)

    def _await_answer(self, pulls: bool) -> None:
        # As long as other workers need.
        message, _ = self._next(math.inf)
        if message.kind != Kind.ANSWER:
            raise ServerRefused(f"the server answered {message.kind.name} to a push or pull")
        self._pending -= 1
        if message.flag:
            self._reason = _graver(self._reason, Reason(message.flag))
        if pulls:
            self._fetch(message)

    def ask(self, message: Message, blob: bytes = b"", patient: bool = False) -> memoryview:
        """Sends a message that is about no shards' content, and waits for its answer; returns the blob.

        Args:
            message: see there.
            blob: goes along.
            patient: wait for as long as others may need.
        """
        self.send(encode(message), blob=blob)
        answer, returned = self._next(math.inf if patient else monotonic() + self._timeout_s)
        if answer.kind != Kind.DONE:
            raise ServerRefused(f"the server answered {answer.kind.name} to {message.kind.name}")
        return returned

    def send(self, message: bytes, slots: Sequence[int] = (), blob: bytes = b"") -> None:
        """Sends a message."""
        try:
            self.link.send(message, slots, blob)
        except (ConnectionError, TimeoutError) as error:
            raise self._lost(error) from error

    def lease(self) -> Message:
        """Waits for a word about data."""
        while not self._leases:
            received = self._receive()
            if received is None:
                # Others may compute for as long as they like; that they live is seen elsewhere.
                self._check()
            elif not self._is_lease(received[0]):
                raise ServerRefused("the server answered a question that was not asked")
        return self._leases.popleft()

    def _receive(self) -> tuple[Message, memoryview] | None:
        try:
            return _heard(self.link.receive(_SLICE_S))
        except (ConnectionError, TimeoutError) as error:
            raise self._lost(error) from error

    def _lost(self, error: OSError) -> PeerLost:
        """Returns what to raise where the link has ended, unless somebody knows better."""
        with suppress(ConnectionError, TimeoutError):
            # The server may have said why, before it went.
            while _heard(self.link.receive(0.0)) is not None:
                continue
        deadline = monotonic() + _KNOWN_S
        while monotonic() < deadline:
            self._check()
            sleep(_SLICE_S / 10)
        return PeerLost(self._connection.rank, self._connection.host, f"the link to it has ended ({error})")

    def _is_lease(self, message: Message) -> bool:
        if message.kind in (Kind.GRANT, Kind.FENCE):
            self._leases.append(message)
            return True
        return False

    def _next(self, deadline: float) -> tuple[Message, memoryview]:
        while True:
            received = self._receive()
            if received is not None:
                if not self._is_lease(received[0]):
                    return received
                continue
            self._check()
            if monotonic() > deadline:
                cause = f"has not answered for {self._timeout_s:.0f} s"
                raise PeerLost(self._connection.rank, self._connection.host, cause)

    def _fetch(self, message: Message) -> None:
        for shard, version in enumerate(message.numbers, message.first):
            if version == self._versions[shard]:
                continue
            if self.form.reply_slots is None:
                self._versions[shard] = self.link.fetch(shard, self._places[shard])
            else:
                self.form.decode_reply(shard, self.link.reply_slot(shard), self._places[shard])
                self._versions[shard] = version


def _heard(received: tuple[bytes, memoryview] | None) -> tuple[Message, memoryview] | None:
    """Returns what was received, if it is no refusal."""
    if received is None:
        return None
    message = decode(received[0])
    if message.kind == Kind.ERROR:
        raise ServerRefused(bytes(received[1]).decode(errors="replace"))
    return message, received[1]


def _graver(one: Reason | None, other: Reason | None) -> Reason | None:
    """Returns what two refusals come to: a gradient that is late anywhere comes again everywhere."""
    return Reason.LATE if Reason.LATE in (one, other) else one or other


def _buckets(form: Form) -> list[range]:
    """Returns the shards in pieces of about a megabyte."""
    buckets, start, nbytes = [], 0, 0
    for shard, length in enumerate(form.slots.lengths):
        nbytes += length
        full = nbytes >= _BUCKET_BYTES or shard + 1 - start >= _BUCKET_SHARDS
        if full or shard == len(form) - 1:
            buckets.append(range(start, shard + 1))
            start, nbytes = shard + 1, 0
    return buckets
