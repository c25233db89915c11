"""The server of a run in this process, on the parameters of a module here: it handles a message when it is told to.

A worker has two connections, `2 * worker` to fetch on, and the next number to push on.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from msgspec import structs
from torch import Tensor, nn

from headrace.checkpoint.forms import pack
from headrace.errors import ServerRefused
from headrace.parameter_server.core.events import Reason
from headrace.parameter_server.planning import ServerProcess, layout_of, places_of
from headrace.parameter_server.wire import Kind, Message, ShardLayout, decode, encode
from headrace.shared_memory.segment import SharedSegment
from headrace.spec.events import ServerStats
from headrace.strategies.served import ServedStrategy
from headrace.transport.base import Blob, ReceivedMessage, ServerTransport
from headrace.trees import as_bytes
from headrace.worker.run_spec import RunSpec
from headrace.worker.server import context_of

_VISITOR = 1 << 20
"""The number of a connection on which no worker fetches or pushes."""

_TOGETHER = 4096
"""Shards that a message is about at most."""

Shards = tuple[int, ...] | range


class _InPlace(ServerTransport):
    """Hands gradients over as they are; parameters lie in the module."""

    trusts_clients = True
    address = ""
    moved_bytes = 0

    def __init__(self, layout: ShardLayout, module: nn.Module) -> None:
        self.layout, self.places = layout, places_of(layout, module)
        self.versions = [0] * len(layout)
        self.inbox: list[ReceivedMessage] = []
        self.gradients: dict[int, Tensor] = {}
        self.answers: dict[int, Message] = {}
        # For all workers: each decodes what it has fetched before another one fetches.
        replies = layout.reply_slots.lengths if layout.reply_slots else ()
        self.replies = [torch.empty(length, dtype=torch.uint8) for length in replies]

    def parameters(self, slot: int) -> Tensor:
        return self.places[slot].view(torch.uint8)

    def writing(self, slots: Sequence[int]) -> AbstractContextManager[None]:
        return nullcontext()

    def set_version(self, slot: int, version: int) -> None:
        self.versions[slot] = version

    def receive(self, timeout_s: float) -> list[ReceivedMessage]:
        received, self.inbox = self.inbox, []
        return received

    def pushed(self, peer: int, slot: int) -> Tensor:
        return self.gradients[slot]

    def release(self, peer: int, slots: Sequence[int]) -> None:
        """A gradient is used once."""

    def reply_slot(self, peer: int, slot: int) -> Tensor:
        return self.replies[slot]

    def send(
        self, peer: int, message: bytes, slots: Sequence[int] = (), blob: Blob = b"", limited: bool = True
    ) -> None:
        self.answers[peer] = decode(message)
        if self.answers[peer].kind == Kind.ERROR:
            assert not isinstance(blob, SharedSegment)
            raise ServerRefused(bytes(blob).decode())

    def drop(self, peer: int) -> None:
        """There is no connection."""

    def close(self) -> None:
        """There is no connection."""


class RehearsedServer:
    """What the process of one server runs, on views of a module's parameters.

    Attributes:
        places: of its shards in the module, flat.
        versions: of all shards, as published last.
    """

    def __init__(self, run: RunSpec, rank: int, module: nn.Module) -> None:
        assert isinstance(run.strategy, ServedStrategy)
        plan = run.plan
        self.layout = layout_of(plan, run.model, rank)
        self._transport = transport = _InPlace(self.layout, module)
        self.places, self.versions, self.busy_s = transport.places, transport.versions, 0.0
        context = replace(context_of(run), process=ServerProcess(end=transport))
        self.server = run.strategy.server(plan, rank, context)
        self._numbers = itertools.count(1)
        self._workers = [self.layout] * plan.replicas
        if str(plan.options.get("push_codec", "plain")) != "plain":
            # What a codec rounds is kept by the worker.
            self._workers = [layout_of(plan, run.model, rank) for _ in range(plan.replicas)]
        for peer in range(2 * plan.replicas):
            self._join(peer, peer // 2, observes=peer % 2 == 0)
        # As the first worker does with the initial parameters, which are there.
        for shard in range(len(self.layout)):
            self.do(Message(Kind.LOAD, shard, 1), pack({}))

    def push(
        self, worker: int, gradients: Sequence[Tensor | None], head: Message, versions: Sequence[int], shards: Shards
    ) -> bool:
        """Applies a worker's push, or keeps it for its round; returns whether it came too late to count.

        `gradients` and the `versions` that they were computed with are by shard, `head` is what the message says
        besides, and `shards` are those that it is about; () for all.
        """
        sends, late = bool(head.weight and head.flag), False
        for chosen in self._together(shards):
            numbers = []
            for shard in chosen:
                gradient = gradients[shard]
                numbers.append(versions[shard] if gradient is not None else ~versions[shard])
                if gradient is not None and sends:
                    self._transport.gradients[shard] = self._encoded(worker, shard, gradient)
            answer = self._ask(2 * worker + 1, head._replace(first=chosen[0], numbers=tuple(numbers)))
            self._transport.gradients.clear()
            late |= answer is not None and answer.flag == Reason.LATE.value
        return late

    def _encoded(self, worker: int, shard: int, gradient: Tensor) -> Tensor:
        layout = self._workers[worker]
        if layout is self.layout:
            return as_bytes(gradient.contiguous())
        place = torch.empty(layout.push_slots.lengths[shard], dtype=torch.uint8)
        layout.encode(shard, gradient, layout.push_view(shard, place))
        return place

    def fetch(self, worker: int, shards: Shards) -> None:
        """Sends a worker the present parameters of some shards, () for all: in place, or encoded for `fetched`."""
        for chosen in self._together(shards):
            self._ask(2 * worker, Message(Kind.PULL, chosen[0], 1, numbers=(-1,) * len(chosen)))

    def fetched(self, shard: int) -> Tensor:
        """Returns a shard's parameters as a worker has fetched them last, until another one fetches."""
        if self.layout.reply_slots is None:
            return self.places[shard]
        decoded = torch.empty_like(self.places[shard])
        self.layout.decode_reply(shard, self._transport.replies[shard], decoded.view(torch.uint8))
        return decoded

    def do(self, message: Message, blob: bytes = b"") -> None:
        """Has the server do something between rounds, and publish its versions, as it does for each new client."""
        self._ask(0, message, blob)
        self._join(_VISITOR, 0, observes=True)
        self._ask(_VISITOR, Message(Kind.LEAVE, flag=1))

    def stats(self, rank: int, time_s: float, waited_s: Sequence[float], rate: float) -> ServerStats:
        """Returns the counts so far, with virtual times: waits, and updates of `rate` bytes a second."""
        counted = self.server.counters.event(rank, time_s)
        shards = tuple(structs.replace(each, apply_s=each.steps * each.bytes / rate) for each in counted.shards)
        waited = {str(worker): seconds for worker, seconds in enumerate(waited_s)}
        return structs.replace(
            counted, busy_s=self.busy_s, queue_mean=0.0, queue_longest=0, waited_s=waited, shards=shards
        )

    def _join(self, peer: int, worker: int, observes: bool) -> None:
        self._ask(peer, Message(Kind.JOIN, flag=observes, numbers=(worker, 0, peer)), self.layout.describe())

    def _together(self, shards: Shards) -> Iterator[Shards]:
        """Yields shards that follow each other, so many as one message is about."""
        every = shards or range(len(self.layout))
        return (every[first : first + _TOGETHER] for first in range(0, len(every), _TOGETHER))

    def _ask(self, peer: int, message: Message, blob: bytes = b"") -> Message | None:
        """Lets the server handle a message; returns its answer, if it gives one now."""
        self._transport.answers.clear()
        data = encode(message._replace(number=next(self._numbers)))
        self._transport.inbox.append(ReceivedMessage(peer, data, memoryview(blob)))
        self.server.turn(0.0)
        return self._transport.answers.get(peer)
