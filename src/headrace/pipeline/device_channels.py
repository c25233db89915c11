"""Channels between devices: tensors go by the devices' own collectives, in one order that all ranks keep.

    forward 3 │ send values 3, receive gradients 1 │ backward 1 │ ...
              └ one operation on the devices ───────┘

What a message is (names, shapes, types, numbers) goes by a mailbox of the host once: the first time for a micro-batch
of its form. From then on both sides know it, and a message that is another is refused. So nothing is read from a
device, and the host waits for nothing.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from headrace.channels.mailbox import Inbox, Outbox
from headrace.channels.pinned import Sent
from headrace.collectives.base import Peers, ProcessGroup
from headrace.errors import UsageError
from headrace.pipeline.channels import Channel, Channels, Edge, Form, MailChannel, Track, pack, tensors_of, values_of
from headrace.pipeline.schedules.schedule import Action, PipelineSchedule
from headrace.pipeline.schedules.transfers import Program, programs
from headrace.pipeline.stage import Stage, buffers_of
from headrace.trees import as_bytes

_MOST = 8
"""Tensors in one operation: NCCL moves so many of a group's at a time, and the others after them."""


@dataclass(frozen=True)
class Piece:
    """A tensor's bytes that go to another rank, or come from it."""

    tensor: Tensor
    peer: int
    sent: bool


@dataclass(frozen=True)
class _Operation:
    """What runs on the device."""

    number: int
    waits: list[Callable[[], None]]
    sent: Sent


class Wire:
    """The operations of one rank on the devices, one after the other; `buffers` is the memory of its module's."""

    def __init__(self, peers: Peers, device: torch.device, buffers: Container[int]) -> None:
        self.device = device
        self.buffers = buffers
        self._peers = peers
        self._running: deque[_Operation] = deque()
        self.number = 0

    def start(self, pieces: Sequence[Piece]) -> None:
        """Begins the operation of this `number`; the next has the next one."""
        if not pieces:
            return
        waits = [self._exchange(pieces[begin : begin + _MOST]) for begin in range(0, len(pieces), _MOST)]
        # They are copies already of what the next forward may write to.
        sent = Sent((piece.tensor for piece in pieces if piece.sent), ())
        self._running.append(_Operation(self.number, waits, sent))
        self.number += 1

    def wait(self, number: int) -> None:
        """Lets the device wait until an operation is done, and with it those before.

        Raises:
            UsageError: what was sent has been written to meanwhile.
        """
        while self._running and self._running[0].number <= number:
            operation = self._running.popleft()
            for wait in operation.waits:
                wait()
            operation.sent.end()

    def finish(self) -> None:
        """Lets the device wait for all operations."""
        self.wait(self.number)

    def _exchange(self, pieces: Sequence[Piece]) -> Callable[[], None]:
        sends, receives = ([(each.tensor, each.peer) for each in pieces if each.sent is sent] for sent in (True, False))
        return self._peers.exchange(sends, receives)


class DeviceChannel(Channel):
    """One edge between two ranks; what is sent waits until its place in the order has come."""

    def __init__(self, edge: Edge, wire: Wire, outbox: Outbox | None, inbox: Inbox | None) -> None:
        self._edge, self._wire = edge, wire
        self._outbox, self._inbox = outbox, inbox
        self._agreed: dict[Hashable, tuple[bytes, Form]] = {}
        self._made: deque[tuple[bytes, list[Tensor]]] = deque()
        self._came: deque[tuple[Form, list[Tensor], int]] = deque()
        self._moved = 0

    def send(
        self, values: Mapping[str, Any], tracked: Callable[[Tensor], bool] = lambda _: False, about: Hashable = None
    ) -> None:
        self._made.append(pack(values, tracked))
        if about is not None:
            self._wire.start(self.outgoing(about))
            # Its owner may write to it next.
            self._wire.finish()

    def receive(self, track: Track = lambda tensor, _: tensor, about: Hashable = None) -> dict[str, Any]:
        if about is not None:
            self._wire.start(self.incoming(about))
        form, tensors, number = self._came.popleft()
        self._wire.wait(number)
        return values_of(form, tensors, track)

    def outgoing(self, about: Hashable) -> list[Piece]:
        """Returns what goes to the other rank as the next message; `about` is what both know of it."""
        note, tensors = self._made.popleft()
        agreed = self._agreed.get(about)
        if agreed is None:
            assert self._outbox is not None
            self._outbox.send(note, ())
            self._agreed[about] = note, json.loads(note)
        elif agreed[0] != note:
            raise UsageError(_changed(self._edge, agreed[1], json.loads(note)))
        dense = [each.contiguous().resolve_conj().resolve_neg() for each in Sent(tensors, self._wire.buffers).tensors]
        return self._pieces(dense, self._edge.ranks[1], sent=True)

    def knows(self, about: Hashable) -> bool:
        """Returns whether both ranks have agreed what a message is."""
        return about in self._agreed

    def incoming(self, about: Hashable) -> list[Piece]:
        """Returns the places of what comes from the other rank as the next message, by the operation that is next."""
        if about not in self._agreed:
            assert self._inbox is not None
            note = self._inbox.receive(lambda note, _: note)
            self._agreed[about] = note, json.loads(note)
        _, form = self._agreed[about]
        tensors = tensors_of(form, self._wire.device)
        self._came.append((form, tensors, self._wire.number))
        return self._pieces(tensors, self._edge.ranks[0], sent=False)

    def clear(self) -> None:
        """Drops what a batch that has failed has left."""
        self._made.clear()
        self._came.clear()

    def moved_bytes(self) -> int:
        return self._moved

    def _pieces(self, tensors: Iterable[Tensor], peer: int, sent: bool) -> list[Piece]:
        # Bytes, because a backend does not have all types.
        pieces = [Piece(as_bytes(each), peer, sent) for each in tensors if each.numel()]
        self._moved += sum(len(piece.tensor) for piece in pieces)
        return pieces


class DeviceChannels(Channels):
    """All channels that begin or end at one rank, for tensors on devices; `peers` are the ranks of `group`."""

    def __init__(
        self,
        edges: Iterable[Edge],
        group: ProcessGroup,
        device: torch.device,
        peers: Peers,
        schedule: PipelineSchedule,
        stages: Sequence[Stage],
    ) -> None:
        self._wire = Wire(peers, device, buffers_of(stages))
        self._rank, self._placement = group.rank, schedule.placement()
        self._between: dict[tuple[int, int, str], DeviceChannel] = {}
        super().__init__(edges, group, device)
        # Of tuples of micro-batches there are few: with examples are all but those at a short batch's end.
        self._of = cache(lambda present: _step(schedule, stages, present)[group.rank])
        self._evaluation = {
            trains: _evaluation(stages, self._placement, trains)[group.rank] for trains in (False, True)
        }
        self._program: Program = ()
        self._gap = 0
        self._known: Mapping[int, Hashable] = {}

    def begin(self, inputs: Mapping[int, Mapping[str, Tensor]], evaluates: bool = False, trains: bool = True) -> None:
        for channel in self._between.values():
            channel.clear()
        present = tuple(inputs)
        self._program = self._evaluation[trains] if evaluates else self._of(present)
        self._gap = 0
        # What crosses may have another form where a forward is run again, which depends on the passes of a batch.
        self._known = {index: (evaluates, trains, present, index, _form(each)) for index, each in inputs.items()}

    def meet(self) -> None:
        gap = self._program[self._gap]
        self._gap += 1
        pieces: list[Piece] = []
        for transfer in gap:
            channel = self._between[transfer.source, transfer.target, transfer.kind]
            about = self._known[transfer.micro_batch]
            if self._placement[transfer.source] == self._rank:
                pieces += channel.outgoing(about)
                continue
            if not channel.knows(about):
                # What comes may be made of what goes before it.
                self._wire.start(pieces)
                pieces = []
            pieces += channel.incoming(about)
        self._wire.start(pieces)

    def finish(self) -> None:
        if self._gap < len(self._program):
            self.meet()
        self._wire.finish()

    def _make(self, edge: Edge, sender: Outbox | None, receiver: Inbox | None) -> Channel:
        if edge.ranks[0] == edge.ranks[1]:
            return MailChannel(self.device)
        made = DeviceChannel(edge, self._wire, sender, receiver)
        self._between[edge.source, edge.target, edge.kind] = made
        return made


def _step(schedule: PipelineSchedule, stages: Sequence[Stage], present: Sequence[int]) -> Sequence[Program]:
    orders = [[action for action in order if action.micro_batch in present] for order in schedule.orders()]
    return programs(orders, _crossed(stages), schedule.placement())


def _evaluation(stages: Sequence[Stage], placement: Sequence[int], trains: bool) -> Sequence[Program]:
    orders: list[list[Action]] = [[] for _ in range(max(placement) + 1)]
    for stage, rank in enumerate(placement):
        orders[rank].append(Action(stage, 0))
    return programs(orders, _crossed(stages if trains else [stage.evaluated for stage in stages]), placement)


def _crossed(stages: Sequence[Stage]) -> set[tuple[int, int]]:
    return {(producer, stage.index) for stage in stages for producer in stage.producers}


def _form(inputs: Mapping[str, Tensor]) -> Hashable:
    return tuple((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items())


def _changed(edge: Edge, before: Form, now: Form) -> str:
    name = next(name for name in (*before, *now) if before.get(name) != now.get(name))
    old, new = (_said(form[name]) if name in form else "nothing" for form in (before, now))
    return (
        f"{name}, among the {edge.kind} that stage {edge.source} sends to stage {edge.target}, was {old} for a "
        f"micro-batch of this form, and is {new} now; devices exchange what they have agreed on once: let what depends "
        "on the data's values be made and used within one stage (partition), or use device='cpu'"
    )


def _said(form: Any) -> str:
    if isinstance(form, list) and len(form) == 3:
        dtype, shape, tracked = form
        return f"{dtype} {shape} with{'' if tracked else 'out'} a gradient"
    return str(form[0] if isinstance(form, list) else form)
