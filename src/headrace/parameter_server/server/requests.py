"""Requests of workers about shards: from the message to the state machines, the optimizer and the answer.

    message ──► machines ──► actions ──► optimizer ──► answer

A request is about a range of shards, and is answered when all of them have answered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from headrace.parameter_server.core import events
from headrace.parameter_server.core.events import Reason
from headrace.parameter_server.core.shard import Shard, ShardState
from headrace.parameter_server.server.coordinator import Member
from headrace.parameter_server.server.counters import ServerCounters
from headrace.parameter_server.server.updater import MeanOf, PushedStep, ShardUpdater, StepFailed
from headrace.parameter_server.sparse.requests import RowRequests
from headrace.parameter_server.wire import MOST_WEIGHT, Kind, Message, ShardLayout, decode, encode, like
from headrace.training.clipping import all_finite
from headrace.transport.base import ServerTransport

_Actions = list[tuple[int, list[events.Action]]]
"""What shards want done."""


@dataclass
class _Request:
    """An open request, which came at `came`, in seconds.

    `unsaid` is how many answers of shards are missing: one for each gradient, and one for each pull. `apart` is the
    squared distance of the gradients from the mean of their round, if measured.
    """

    peer: int
    message: Message
    shards: range
    unsaid: int
    gradients: dict[int, Tensor]
    refused: Reason | None = None
    came: float = field(default_factory=perf_counter)
    apart: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestState:
    """A request as JSON values; its gradients are tensors, see `_gradient_name`.

    `message` is in hexadecimal digits, `refused` the `Reason` or 0, `present` the shards whose gradients it has.
    """

    worker: int
    peer: int
    message: str
    unsaid: int
    refused: int
    present: tuple[int, ...]


def _gradient_name(worker: int, shard: int) -> str:
    return f"gradient/{worker}/{shard}"


class Requests:
    """All open requests, and the shards that answer them; see `Server` for `measures`."""

    def __init__(
        self,
        transport: ServerTransport,
        layout: ShardLayout,
        optimizer: ShardUpdater,
        machines: Sequence[Shard],
        counters: ServerCounters,
        measures: bool = False,
        rows: RowRequests | None = None,
    ) -> None:
        self._transport = transport
        self._layout = layout
        self._optimizer = optimizer
        self._machines = list(machines)
        self._counters = counters
        self._measures = measures
        self._tensors = [layout.view(shard, transport.parameters(shard)) for shard in range(len(layout))]
        optimizer.bind(self._tensors)
        self._open: dict[tuple[int, int], _Request] = {}
        self.rows = rows

    def state(self) -> tuple[tuple[RequestState, ...], tuple[ShardState, ...], dict[str, Tensor]]:
        """Returns open requests, shards, and parameters and gradients, which are not copied."""
        tensors = {f"parameter/{shard}": tensor for shard, tensor in enumerate(self._tensors)}
        states = []
        for (worker, shard), request in self._open.items():
            if shard in request.gradients:
                tensors[_gradient_name(worker, shard)] = request.gradients[shard]
            if shard == request.shards.start:
                refused = request.refused.value if request.refused else 0
                message, present = encode(request.message).hex(), tuple(request.gradients)
                states.append(RequestState(worker, request.peer, message, request.unsaid, refused, present))
        shards = [machine.state() for machine in self._machines]
        if self.rows is not None:
            shards.append(self.rows.machine.state())
            for worker, push in self.rows.open.items():
                states.append(RequestState(worker, push.peer, encode(push.message).hex(), 1, 0, ()))
            tensors |= self.rows.state()
        return tuple(states), tuple(shards), tensors

    def load(self, open_: Sequence[RequestState], shards: Sequence[ShardState], tensors: Mapping[str, Tensor]) -> None:
        """Takes over a saved state; raises ValueError if it is of other shards, or not consistent."""
        machines = [*self._machines, *([self.rows.machine] if self.rows else [])]
        for machine, state in zip(machines, shards, strict=True):
            machine.load(state)
        every = range(len(self._machines))
        with self._transport.writing(every):
            for shard, tensor in enumerate(self._tensors):
                tensor.copy_(like(tensors, f"parameter/{shard}", tensor))
            self.publish_versions()
        self._open.clear()
        if self.rows is not None:
            self.rows.load(tensors)
        for opened in open_:
            message = decode(bytes.fromhex(opened.message))
            if message.kind == Kind.PUSH_ROWS:
                self._rows().add(
                    opened.worker, opened.peer, message, memoryview(tensors[f"rows/{opened.worker}"].numpy().tobytes())
                )
                continue
            gradients = {
                shard: like(tensors, _gradient_name(opened.worker, shard), self._tensors[shard]).clone()
                for shard in opened.present
            }
            refused = Reason(opened.refused) if opened.refused else None
            request = _Request(opened.peer, message, self._named(message), opened.unsaid, gradients, refused)
            self._open |= {(opened.worker, shard): request for shard in request.shards}

    def drop(self, worker: int) -> None:
        """Drops a worker's open requests."""
        if self.rows is not None:
            self.rows.drop(worker)
        self._open = {key: request for key, request in self._open.items() if key[0] != worker}

    def numbers(self, peer: int) -> set[int]:
        """Returns the numbers of the open requests of a connection."""
        every = (*self._open.values(), *(self.rows.open.values() if self.rows else ()))
        return {request.message.number for request in every if request.peer == peer}

    def publish_versions(self) -> None:
        """Publishes the versions of all parameters."""
        for shard, machine in enumerate(self._machines):
            self._transport.set_version(shard, machine.version)

    def swap_weights(self, averaged: bool) -> None:
        """Exchanges all parameters and their averages."""
        with self._transport.writing(range(len(self._machines))):
            self._optimizer.swap_weights(averaged)
        self.broadcast(events.Renew())

    def replace(self, shard: int, blob: bytes) -> None:
        """Loads a shard's state; raises ValueError if there is no such shard, or this is no state of it."""
        if shard >= len(self._machines):
            raise ValueError(f"there is no shard {shard}, only {len(self._machines)}")
        with self._transport.writing([shard]):
            self._optimizer.load(blob, shard)
        self._carry_out([(shard, self._machines[shard].handle(events.Renew()))])

    def broadcast(self, event: events.Event) -> None:
        """Lets all shards handle an event."""
        self._carry_out([(shard, machine.handle(event)) for shard, machine in enumerate(self._machines)])
        if self.rows is not None:
            self.rows.broadcast(event)

    def _rows(self) -> RowRequests:
        if self.rows is None:
            raise ValueError("there are no tables of rows on this server")
        return self.rows

    def answer_observer(self, member: Member, message: Message) -> None:
        """Answers a client that only observes at once."""
        shards = self._named(message)
        versions = tuple(self._machines[shard].version for shard in shards)
        changed = [shard for shard, new, had in zip(shards, versions, message.numbers, strict=True) if new != had]
        for shard, version in zip(shards, versions, strict=True):
            self._transport.set_version(shard, version)
        if changed:
            self._optimizer.sent(member.worker, changed)
        self._counters.answered(member.worker, (), changed, 0.0)
        answer = Message(Kind.ANSWER, message.first, numbers=versions, number=message.number)
        self._reply(member.worker, member.peer, answer, changed)

    def _reply(self, worker: int, peer: int, message: Message, pulled: Sequence[int]) -> None:
        if self._layout.reply_slots is not None:
            for shard in pulled:
                self._layout.encode_reply(worker, shard, self._tensors[shard], self._transport.reply_slot(peer, shard))
        self._transport.send(peer, encode(message), pulled)

    def _named(self, message: Message) -> range:
        shards = range(message.first, message.first + len(message.numbers))
        if not shards or shards.stop > len(self._machines):
            raise ValueError(f"shards {shards.start} to {shards.stop} of the {len(self._machines)} that are here")
        return shards

    def take(self, member: Member, message: Message, blob: memoryview) -> None:
        """Passes a push, a pull or both to the shards, or a push of rows to the tables."""
        if message.kind == Kind.PUSH_ROWS:
            self._rows().take(member, message, blob)
            return
        if member.observes:
            raise ValueError(f"{message.kind.name} from a client that only observes")
        peer, worker, incarnation = member.peer, member.worker, member.incarnation
        shards = self._named(message)
        if not (0 <= message.weight < math.inf and 0 <= message.share < math.inf):
            raise ValueError(f"a push of weight {message.weight} and share {message.share}")
        if any((worker, shard) in self._open for shard in shards):
            raise ValueError(f"worker {worker} asks again before it is answered")
        pushes, pulls = message.kind != Kind.PULL, message.kind != Kind.PUSH
        unpack, pushed = self._layout.decode, self._transport.pushed
        gradients = {shard: unpack(shard, pushed(peer, shard)) for shard in message.pushed}
        request = _Request(peer, message, shards, (pushes + pulls) * len(shards), gradients)
        for shard in shards:
            self._open[worker, shard] = request
        finite = bool(message.flag) and (self._transport.trusts_clients or all_finite(list(gradients.values())))
        actions: _Actions = []
        for shard, version in zip(shards, message.numbers, strict=True):
            machine, made_with = self._machines[shard], max(version, ~version)
            wanted: list[events.Action] = []
            if pushes:
                push = events.Push(worker, incarnation, message.lease, made_with, message.weight, message.share, finite)
                wanted += machine.handle(push)
            if pulls:
                wanted += machine.handle(events.Pull(worker, incarnation))
            actions.append((shard, wanted))
        self._carry_out(actions)
        steps = [action for action in actions[0][1] if isinstance(action, events.ApplyStep)]
        if steps and steps[0].workers == (worker,):
            self._counters.applied(worker, message.lease, shards.start, self._machines[shards.start].version)

    def _carry_out(self, actions: _Actions) -> None:
        alone: dict[tuple[int, float, int], list[int]] = {}
        of_rounds: dict[events.ApplyStep, list[int]] = {}
        results: list[tuple[int, events.Ack | events.Refuse | events.Reply]] = []
        for shard, wanted in actions:
            for action in wanted:
                if isinstance(action, events.ApplyStep):
                    if len(action.workers) == 1:
                        # The steps of one push are applied together.
                        alone.setdefault((action.workers[0], action.share, action.staleness), []).append(shard)
                    elif self._optimizer.at_once:
                        of_rounds.setdefault(action, []).append(shard)
                    else:
                        self._step_mean([shard], action)
                elif not isinstance(action, events.Accumulate):
                    results.append((shard, action))
        for (worker, share, staleness), shards in alone.items():
            request = self._open[worker, shards[0]]
            present = [(shard, request.gradients[shard]) for shard in shards if shard in request.gradients]
            push = request.message
            pushed = PushedStep(worker, share, staleness, push.steps, push.lease, push.weight)
            self._step(shards, present, pushed)
        for step, shards in of_rounds.items():
            self._step_mean(shards, step)
        for shard, result in results:
            self._tell(shard, result)

    def _step_mean(self, shards: Sequence[int], step: events.ApplyStep) -> None:
        """Applies the mean of a round to shards."""
        means = ((shard, self._mean(shard, step)) for shard in shards)
        present = [(shard, mean) for shard, mean in means if mean is not None]
        steps = max(self._open[worker, shard].message.steps for worker in step.workers for shard in shards)
        self._step(shards, present, PushedStep(-1, step.share, step.staleness, steps))

    def _mean(self, shard: int, step: events.ApplyStep) -> Tensor | None:
        """Returns the mean of a round, summed in the order of the workers, so that every run gives the same bits."""
        requests = [self._open[worker, shard] for worker in step.workers]
        weight = sum(request.message.weight for request in requests)
        mean: Tensor | None = None
        if self._optimizer.mean is not None:
            mean = self._own_mean(self._optimizer.mean, shard, requests)
        else:
            for request in requests:
                gradient = request.gradients.get(shard)
                if gradient is not None:
                    part = request.message.weight / weight
                    mean = gradient * part if mean is None else mean.add_(gradient, alpha=part)
        if self._measures and mean is not None and not self._layout.pieces[shard].exact:
            for request in requests:
                gradient = request.gradients.get(shard)
                # One that is not there counts as zeros.
                apart = mean if gradient is None else gradient - mean
                request.apart += float(torch.linalg.vector_norm(apart)) ** 2
        return mean

    def _own_mean(self, mean: MeanOf, shard: int, requests: Sequence[_Request]) -> Tensor | None:
        """Returns another mean than the weighted one; a gradient that is not there counts as zeros."""
        gradients = [request.gradients.get(shard) for request in requests]
        like = next((each for each in gradients if each is not None), None)
        if like is None:
            return None
        values = [torch.zeros_like(like) if each is None else each for each in gradients]
        total = sum(request.message.weight for request in requests)
        return mean(values, [request.message.weight / total for request in requests])

    def _step(self, shards: Sequence[int], gradients: Sequence[tuple[int, Tensor]], step: PushedStep) -> None:
        began = perf_counter()
        with self._transport.writing(shards):
            try:
                self._optimizer.apply(gradients, shards, step)
            except Exception as error:
                raise StepFailed(error) from error
            for shard in shards:
                self._transport.set_version(shard, self._machines[shard].version)
        staleness = 0 if self._optimizer.sums else step.staleness
        self._counters.stepped(shards, step.worker, staleness, perf_counter() - began)

    def _tell(self, shard: int, action: events.Ack | events.Refuse | events.Reply) -> None:
        """Records a shard's answer, and sends the request's answer when it is complete."""
        request = self._open.get((action.worker, shard))
        if request is None:
            return
        if isinstance(action, events.Refuse):
            # A push that is late in one shard is repeated for all; shards that have it then answer DUPLICATE.
            if request.refused is None or action.reason == Reason.LATE:
                request.refused = action.reason
            if action.lease >= 0:
                self._counters.refused(action.reason.name.lower())
        request.unsaid -= 1
        if not request.unsaid:
            self._answer(action.worker, request)

    def _answer(self, worker: int, request: _Request) -> None:
        asked, shards = request.message, request.shards
        versions = tuple(self._machines[shard].version for shard in shards)
        for shard, version in zip(shards, versions, strict=True):
            del self._open[worker, shard]
            self._transport.set_version(shard, version)
        pulled: list[int] = []
        if asked.kind != Kind.PUSH:
            pulled += (shard for shard, new, had in zip(shards, versions, asked.numbers, strict=True) if new != had)
        if pulled:
            self._optimizer.sent(worker, pulled)
        flag, apart = request.refused.value if request.refused else 0, min(request.apart, MOST_WEIGHT)
        message = Message(Kind.ANSWER, asked.first, flag, asked.lease, apart, numbers=versions, number=asked.number)
        self._transport.release(request.peer, shards)
        # Before it is counted, because a worker waits for it.
        self._reply(worker, request.peer, message, pulled)
        pushed = shards if asked.kind != Kind.PULL else ()
        self._counters.answered(worker, pushed, pulled, perf_counter() - request.came)
