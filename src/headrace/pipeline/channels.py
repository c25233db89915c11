"""Channels between stages: from the stage that makes a value directly to each that needs it, and back for gradients.

stage 0 ──► stage 1 ──► stage 2          of a model with a skip connection from the first stage to the last
    └───────────────────────┘
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headrace.channels.mailbox import Inbox, Outbox
from headrace.channels.mailboxes import Mailboxes, Route
from headrace.collectives.base import ProcessGroup
from headrace.devices import kind_of
from headrace.errors import UsageError
from headrace.shared_memory.layout import places
from headrace.spec.model import ITEM_BYTES

if TYPE_CHECKING:
    from headrace.channels.pinned import PinnedCopies

Form = dict[str, Any]
"""What a note says of each value, by name."""

Track = Callable[[Tensor, bool], Tensor]
"""Takes a tensor that has come, and whether its gradient is to go back; returns what is to stand for it."""


@dataclass(frozen=True)
class Edge:
    """A channel's two ends.

    Attributes:
        source, target: stages; where gradients go back `target` is before `source`. For "tied" they are ranks.
        kind: "values", "gradients", or "tied" for gradients of parameters that both hold.
    """

    source: int
    target: int
    kind: str
    ranks: tuple[int, int]
    slots: int = 1


class Channel(ABC):
    """One edge, as a rank sees it."""

    @abstractmethod
    def send(
        self, values: Mapping[str, Any], tracked: Callable[[Tensor], bool] = lambda _: False, about: Hashable = None
    ) -> None:
        """Sends values by name; see `pack`.

        `about` is given on both sides, or on none: what they know of a message that goes in no pass of a schedule.
        """

    @abstractmethod
    def receive(self, track: Track = lambda tensor, _: tensor, about: Hashable = None) -> dict[str, Any]:
        """Waits for the next message and returns its values; see `send`."""

    @abstractmethod
    def moved_bytes(self) -> int:
        """Returns the bytes that this rank has written and read so far."""


class MailChannel(Channel):
    """An edge through the memory of hosts; without sender and receiver where the rank holds both stages."""

    def __init__(self, device: torch.device, sender: Outbox | None = None, receiver: Inbox | None = None) -> None:
        self._device = device
        self._sender = sender
        self._receiver = receiver
        self._own: deque[tuple[dict[str, Any], list[bool]]] = deque()

    def send(
        self, values: Mapping[str, Any], tracked: Callable[[Tensor], bool] = lambda _: False, about: Hashable = None
    ) -> None:
        if self._sender:
            self._sender.send(*pack(values, tracked))
            return
        marks = [isinstance(value, Tensor) and tracked(value) for value in values.values()]
        detached = {name: value.detach() if isinstance(value, Tensor) else value for name, value in values.items()}
        self._own.append((detached, marks))

    def receive(self, track: Track = lambda tensor, _: tensor, about: Hashable = None) -> dict[str, Any]:
        if self._receiver:
            # A copy, so that the next message can be written meanwhile.
            def copied(tensor: Tensor, tracked: bool) -> Tensor:
                return track(tensor.to(self._device, copy=True), tracked)

            return self._receiver.receive(lambda note, data: unpack(note, data, copied))
        values, marks = self._own.popleft()
        return {
            name: track(value, mark) if isinstance(value, Tensor) else value
            for (name, value), mark in zip(values.items(), marks, strict=True)
        }

    def moved_bytes(self) -> int:
        return sum(end.moved_bytes for end in (self._sender, self._receiver) if end)


class Channels(ABC):
    """All channels that begin or end at one rank. Every rank makes them at the same time, with the same edges."""

    def __init__(self, edges: Iterable[Edge], group: ProcessGroup, device: torch.device) -> None:
        self.device = device
        edges = tuple(edges)
        self._mailboxes = Mailboxes([Route(*edge.ranks, edge.slots) for edge in edges], group)
        outboxes, inboxes = self._mailboxes.outboxes, self._mailboxes.inboxes
        self._channels = {
            (edge.source, edge.target, edge.kind): self._make(edge, outboxes.get(index), inboxes.get(index))
            for index, edge in enumerate(edges)
            if group.rank in edge.ranks
        }

    @abstractmethod
    def begin(self, inputs: Mapping[int, Mapping[str, Tensor]], evaluates: bool = False, trains: bool = True) -> None:
        """Begins a batch of these micro-batches, or one for an evaluation; `trains` is the mode of the model.

        All ranks know the inputs of all micro-batches.
        """

    @abstractmethod
    def meet(self) -> None:
        """Sends and receives what is due before the next pass of this rank."""

    @abstractmethod
    def finish(self) -> None:
        """Sends and receives what is left."""

    def channel(self, source: int, target: int, kind: str) -> Channel:
        """Returns a channel that begins or ends here."""
        return self._channels[source, target, kind]

    def moved_bytes(self) -> int:
        """Returns the bytes that this rank has written and read so far."""
        return sum(channel.moved_bytes() for channel in self._channels.values())

    def close(self) -> None:
        """Releases memory and connections."""
        self._mailboxes.close()

    @abstractmethod
    def _make(self, edge: Edge, sender: Outbox | None, receiver: Inbox | None) -> Channel:
        """Returns a channel, of which these are the ends of its mailbox."""


class MailChannels(Channels):
    """Channels through the memory of hosts, where a message waits for its receiver.

    `buffers` is the memory of what each forward may write to.
    """

    def __init__(
        self, edges: Iterable[Edge], group: ProcessGroup, device: torch.device, buffers: Container[int] = ()
    ) -> None:
        self._copies: PinnedCopies | None = None
        if kind_of(device.type).streams:
            # Not on CPUs.
            from headrace.channels.pinned import PinnedCopies

            self._copies = PinnedCopies(device, buffers)
        super().__init__(edges, group, device)

    def begin(self, inputs: Mapping[int, Mapping[str, Tensor]], evaluates: bool = False, trains: bool = True) -> None:
        if self._copies:
            self._copies.drop()

    def meet(self) -> None:
        """Does nothing: what is needed is received when it is."""

    def finish(self) -> None:
        if self._copies:
            self._copies.leave()

    def _make(self, edge: Edge, sender: Outbox | None, receiver: Inbox | None) -> Channel:
        if self._copies:
            sender = sender and self._copies.outbox(sender)
            receiver = receiver and self._copies.inbox(receiver)
        return MailChannel(self.device, sender, receiver)


def pack(values: Mapping[str, Any], tracked: Callable[[Tensor], bool]) -> tuple[bytes, list[Tensor]]:
    """Returns a note about tensors, numbers, shapes and None, and the tensors, detached.

    `tracked` tells whether a tensor's receiver is to send a gradient back. Raises a `UsageError` if a value is of
    another kind.
    """
    form = {name: _form(name, value, tracked) for name, value in values.items()}
    tensors = [value.detach() for value in values.values() if isinstance(value, Tensor)]
    return json.dumps(form, separators=(",", ":")).encode(), tensors


def unpack(note: bytes, data: Tensor, receive: Track) -> dict[str, Any]:
    """Returns the values of a message, by name; `data` is `(nbytes,)` uint8, the tensors' bytes by `places`.

    `receive` takes the tensors as they lie in `data`. Raises a `ValueError` if the note is none.
    """
    form: Form = json.loads(note)
    forms = _tensor_forms(form)
    sizes = [math.prod(shape) * ITEM_BYTES[word] for word, shape, _ in forms]
    begins, _ = places(sizes)
    tensors = (
        data[begin : begin + size].view(_type(word)).view(shape)
        for begin, size, (word, shape, _) in zip(begins, sizes, forms, strict=True)
    )
    return values_of(form, tensors, receive)


def tensors_of(form: Form, device: torch.device) -> list[Tensor]:
    """Returns memory for the tensors of a message whose note says this."""
    return [torch.empty(shape, dtype=_type(word), device=device) for word, shape, _ in _tensor_forms(form)]


def values_of(form: Form, tensors: Iterable[Tensor], receive: Track) -> dict[str, Any]:
    """Returns the values of a message whose note says this, by name; these are its tensors."""
    forms = _tensor_forms(form)
    received = iter([receive(tensor, tracked) for tensor, (_, _, tracked) in zip(tensors, forms, strict=True)])
    return {name: _value(each, received) for name, each in form.items()}


def _form(name: str, value: Any, tracked: Callable[[Tensor], bool]) -> Any:
    if isinstance(value, Tensor):
        return [str(value.dtype).removeprefix("torch."), list(value.shape), tracked(value)]
    if isinstance(value, torch.Size):
        return [list(value)]
    if value is None or type(value) in (bool, int, float):
        return value
    raise UsageError(
        f"{name} is a {type(value).__name__} and is needed behind a cut; tensors, numbers and shapes cross one; cut "
        "elsewhere (partition), or put what makes it and what uses it into one submodule"
    )


def _tensor_forms(form: Form) -> list[Any]:
    return [each for each in form.values() if isinstance(each, list) and len(each) == 3]


def _value(form: Any, tensors: Any) -> Any:
    if not isinstance(form, list):
        return form
    return next(tensors) if len(form) == 3 else torch.Size(form[0])


def _type(word: str) -> torch.dtype:
    if word not in ITEM_BYTES:
        raise ValueError(f"{word!r} is no type of tensors that travel")
    dtype: torch.dtype = getattr(torch, word)
    return dtype
