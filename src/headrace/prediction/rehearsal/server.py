"""A server without a process: the requests, shards and optimizer of a real one, on the parameters of a module here."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from headrace.parameter_server.core import events
from headrace.parameter_server.core.events import Reason
from headrace.parameter_server.core.shard import Shard
from headrace.parameter_server.planning import layout_of, places_of
from headrace.parameter_server.server.coordinator import Member
from headrace.parameter_server.server.counters import ServerCounters
from headrace.parameter_server.server.optimizer import Remedies, RoundClock, ShardOptimizer
from headrace.parameter_server.server.requests import Requests
from headrace.parameter_server.wire import Message, decode
from headrace.policies.behaviour import ServerTerms
from headrace.spec.events import ServerStats
from headrace.spec.parameter_sets import one_optimizer
from headrace.transport.base import Blob, ReceivedMessage, ServerTransport
from headrace.worker.run_spec import RunSpec


class _InPlace(ServerTransport):
    """Hands gradients over as they are; parameters lie in the module."""

    trusts_clients = True
    address = ""
    moved_bytes = 0

    def __init__(self, places: Sequence[Tensor]) -> None:
        self._places = [place.view(torch.uint8) for place in places]
        self.gradients: dict[int, Tensor] = {}
        self.answers: dict[int, bytes] = {}

    def parameters(self, slot: int) -> Tensor:
        return self._places[slot]

    def writing(self, slots: Sequence[int]) -> AbstractContextManager[None]:
        return nullcontext()

    def set_version(self, slot: int, version: int) -> None:
        """The versions are those of the shards."""

    def receive(self, timeout_s: float) -> list[ReceivedMessage]:
        return []

    def pushed(self, peer: int, slot: int) -> Tensor:
        return self.gradients[slot]

    def release(self, peer: int, slots: Sequence[int]) -> None:
        """A gradient is used once."""

    def reply_slot(self, peer: int, slot: int) -> Tensor:
        raise NotImplementedError("parameters are copied, not sent")

    def send(
        self, peer: int, message: bytes, slots: Sequence[int] = (), blob: Blob = b"", limited: bool = True
    ) -> None:
        self.answers[peer] = message

    def drop(self, peer: int) -> None:
        """There is no connection."""

    def close(self) -> None:
        """There is no connection."""


class InProcessServer:
    """One server's shards and optimizer, on views of a module's parameters.

    Attributes:
        layout: its shards.
        places: of its shards in the module, flat.
    """

    def __init__(self, run: RunSpec, rank: int, module: nn.Module, clock: RoundClock, terms: ServerTerms) -> None:
        plan = run.plan
        self._rank = rank
        self.layout = layout_of(plan, run.model, rank)
        self._workers = [self.layout] * plan.replicas
        if str(plan.options.get("push_codec", "plain")) != "plain":
            # What a codec rounds is kept by the worker.
            self._workers = [layout_of(plan, run.model, rank) for _ in range(plan.replicas)]
        self.places = places_of(self.layout, module)
        options = plan.options
        remedies = options.get("remedies")
        self._optimizer = ShardOptimizer(
            self.layout,
            one_optimizer(run.job.optimizer, "a rehearsal"),
            run.model.parameters,
            clock,
            options.get("scale") == "full",
            Remedies(**remedies) if isinstance(remedies, dict) else None,
        )
        self.counters = ServerCounters(self.layout)
        self._transport = _InPlace(self.places)
        self._machines = [Shard(range(plan.replicas), *terms.policies) for _ in range(len(self.layout))]
        self._requests = Requests(self._transport, self.layout, self._optimizer, self._machines, self.counters)
        self._members = [Member(worker, 0, worker, False, worker) for worker in range(plan.replicas)]
        self.busy_s = 0.0
        # The first worker has loaded the initial parameters.
        self._requests.broadcast(events.Renew())

    @property
    def versions(self) -> list[int]:
        """The versions of all shards."""
        return [machine.version for machine in self._machines]

    def push(
        self,
        worker: int,
        gradients: Sequence[Tensor | None],
        head: Message,
        versions: Sequence[int],
        shards: Sequence[int] = (),
    ) -> bool:
        """Applies a worker's push, or keeps it for its round; returns whether it came too late to count.

        Args:
            gradients: by shard; None if the loss does not depend on the parameter.
            head: what the message says besides.
            versions: of the parameters that they were computed with, by shard.
            shards: those that the message is about; () for all.
        """
        chosen = shards or range(len(self.layout))
        sends = bool(head.weight and head.flag)
        numbers = []
        for shard in chosen:
            gradient = gradients[shard]
            numbers.append(versions[shard] if gradient is not None else ~versions[shard])
            if gradient is not None and sends:
                self._transport.gradients[shard] = self._encoded(worker, shard, gradient)
        self._transport.answers.pop(worker, None)
        message = head._replace(first=chosen[0], numbers=tuple(numbers))
        self._requests.take(self._members[worker], message, memoryview(b""))
        self._transport.gradients.clear()
        answer = self._transport.answers.get(worker)
        return answer is not None and decode(answer).flag == Reason.LATE.value

    def _encoded(self, worker: int, shard: int, gradient: Tensor) -> Tensor:
        layout = self._workers[worker]
        if layout is self.layout:
            return gradient.contiguous().view(-1).view(torch.uint8)
        place = torch.empty(layout.push_slots.lengths[shard], dtype=torch.uint8)
        layout.encode(shard, gradient, layout.push_view(shard, place))
        return place

    def fetched(self, worker: int, shards: Sequence[int]) -> None:
        """Notes that a worker takes over the present parameters of some shards."""
        self._optimizer.sent(worker, shards)
        self.counters.answered(worker, (), shards, 0.0)

    def decoded(self, worker: int, shard: int) -> Tensor:
        """Returns a copy of a shard's parameters as a worker gets them."""
        layout, place = self.layout, self.places[shard]
        if layout.reply_slots is None:
            return place.clone()
        sent = torch.empty(layout.reply_slots.lengths[shard], dtype=torch.uint8)
        layout.encode_reply(worker, shard, layout.view(shard, place.view(torch.uint8)), sent)
        copy = torch.empty_like(place)
        layout.decode_reply(shard, sent, copy.view(torch.uint8))
        return copy

    @property
    def sends_plain(self) -> bool:
        """Whether workers get the parameters as they are."""
        return self.layout.reply_slots is None

    def settle(self, done: int) -> None:
        """Ends an interval: so many rounds are done."""
        self._optimizer.settle(done)
        self._requests.broadcast(events.Settle())

    def swap_weights(self, averaged: bool) -> None:
        """Exchanges the parameters and their moving averages."""
        self._requests.swap_weights(averaged)

    def memory(self) -> tuple[int, int]:
        """Returns the bytes of parameters, and of the optimizer's state."""
        return self._optimizer.memory()

    def stats(self, rank: int, time_s: float, waited_s: Sequence[float], apply_bytes_per_s: float) -> ServerStats:
        """Returns the counts so far, with virtual times: what workers waited for, and how long updates take."""
        counted = self.counters.event(rank, time_s)
        shards = tuple(replace(each, apply_s=each.steps * each.bytes / apply_bytes_per_s) for each in counted.shards)
        waited = {str(worker): seconds for worker, seconds in enumerate(waited_s)}
        return replace(counted, busy_s=self.busy_s, waited_s=waited, shards=shards)
