"""A model on a parameter server, and its copies in workers, for loops of one's own: no job, no strategy, no engine."""

from __future__ import annotations

import functools
import itertools
import secrets
from collections.abc import Callable
from time import monotonic_ns
from typing import Any, Self

from torch import Tensor, nn

from headrace.errors import UsageError
from headrace.parameter_server.client.client import Client
from headrace.parameter_server.client.session import ServerConnection
from headrace.parameter_server.connecting import open_client_transport, open_server_transport
from headrace.parameter_server.core.events import Reason
from headrace.parameter_server.core.shard import Shard
from headrace.parameter_server.server.optimizer import ShardOptimizer
from headrace.parameter_server.server.server import Server
from headrace.parameter_server.wire import Kind, Message, ShardLayout, ShardSpec
from headrace.policies.staleness import Bounded, EveryPush, FirstPushes, Unbounded
from headrace.spec.model import ParameterSpec
from headrace.transport.base import Slots

_LEASE_BITS = 47
"""A client numbers its pushes from a random number on, so that no two clients have the same."""


def serve_model(
    model: nn.Module,
    optimizer: Callable[..., Any],
    *,
    workers: int,
    ready: Callable[[str], object],
    staleness_bound: int | None = 0,
    transport: str = "shared_memory",
    address: str = "",
    push_codec: str = "plain",
) -> None:
    """Serves a model's trainable parameters until a client ends it; then the model has the trained ones.

    A `ModelClient` pulls them, and pushes gradients. Buffers, such as BatchNorm's statistics, stay each worker's own.

    Args:
        model: on the CPU; all clients build the same.
        optimizer: takes the parameters: `functools.partial(torch.optim.SGD, lr=0.1)`.
        workers: how many push, numbered from 0.
        ready: called with the address for the clients when they may connect. One of TCP has the secret of this server
            in it, without which nothing connects: hand it on like a password.
        staleness_bound: 0 makes the mean of one push of each worker a step (synchronous SGD); None makes each push one
            (asynchronous SGD); with a number no worker is more rounds than that ahead of the slowest.
        transport: "shared_memory" for clients of this host, or "tcp".
        address: of this host, by which clients on other hosts reach it; "" for this host alone.
        push_codec: of gradients: "plain", "bf16", "int8".

    Raises:
        UsageError: a parameter is not on the CPU or not contiguous, or numbers or names are none of these.
    """
    if workers < 1 or (staleness_bound or 0) < 0:
        raise UsageError(
            f"workers={workers} and staleness_bound={staleness_bound}; give at least 1 worker, and a bound of at least "
            "0, or None"
        )
    if transport not in ("shared_memory", "tcp"):
        raise UsageError(f"transport={transport!r} is none; use 'shared_memory' or 'tcp'")
    layout, places = _layout(model, push_codec)
    specs = [ParameterSpec(piece.parameter, piece.shape, piece.dtype) for piece in layout.pieces]
    admission = Bounded(staleness_bound) if staleness_bound else Unbounded()
    combination = FirstPushes(workers) if staleness_bound == 0 else EveryPush()
    machines = [Shard(range(workers), admission, combination) for _ in layout.pieces]
    link = open_server_transport(layout, transport, address)
    server = Server(link, layout, ShardOptimizer(layout, optimizer, specs, full=True), machines)
    try:
        held = [link.parameters(shard).view(place.dtype) for shard, place in enumerate(places)]
        for mine, place in zip(held, places, strict=True):
            mine.copy_(place)
        ready(f"{workers}@{server.address}")
        server.serve(lambda: None)
        for mine, place in zip(held, places, strict=True):
            place.copy_(mine)
    finally:
        server.close()


class ModelClient:
    """A worker's copy of a model that a `serve_model` has: it begins with the server's parameters.

    Args:
        model: as the server's; its parameters are written to by every pull.
        address: what the server has called `ready` with.
        worker: its number, from 0.
        observes: whether it never pushes: no worker waits for it, and it may read, and end the server.
        push_codec: the server's.
        patience_s: how long a connection that has ended is tried again.

    Raises:
        UsageError: a parameter is not on the CPU or not contiguous, or the server has no worker of this number.
        ConnectionError: there is no server at the address, or its parameters or codec have other sizes.
        ServerRefused: the server has parameters of other names or shapes.
        PeerLost: the server has ended, or does not answer. From every method.
        Replaced: another client has begun with this number. From every method.
    """

    def __init__(
        self,
        model: nn.Module,
        address: str,
        worker: int = 0,
        *,
        observes: bool = False,
        push_codec: str = "plain",
        patience_s: float = 10.0,
    ) -> None:
        workers, _, place = address.partition("@")
        if not (workers.isdecimal() and 0 <= worker < int(workers)):
            raise UsageError(f"worker={worker} of {address[:60]!r} is none; number {workers} workers from 0")
        layout, places = _layout(model, push_codec)
        self._parameters = _trained(model)
        pushes = Slots(()) if observes else layout.push_slots
        open_one = functools.partial(open_client_transport, place, layout, pushes)
        connection = ServerConnection(open_one(), layout, places, reopen=open_one, patience_s=patience_s)
        # Of two with one number the later goes on; without an order they would take turns for ever.
        who = (-1, 0) if observes else (worker, monotonic_ns())
        self._client = Client([connection], *who, observes=observes)
        self._leases = itertools.count(secrets.randbits(_LEASE_BITS))
        self.pull()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def moved_bytes(self) -> int:
        """Bytes of gradients and parameters sent and received."""
        return self._client.moved_bytes

    def pull(self) -> None:
        """Brings the server's parameters; waits until this worker may begin its next round."""
        self._client.pull()

    def push(self, weight: float = 1.0) -> Reason | None:
        """Sends the model's gradients, and brings the parameters for the next round; returns why they do not count.

        Args:
            weight: in the mean of a synchronous round, as the number of its examples; 0 if it had none.
        """
        gradients: list[Tensor | None] = [parameter.grad for parameter in self._parameters]
        return self._client.push([gradients], next(self._leases), weight, pull=True)

    def end_server(self) -> None:
        """Ends the server, when all have pushed what they want to push."""
        self._client.ask(0, Message(Kind.END))

    def close(self) -> None:
        """Leaves: no other worker waits for this one any more."""
        self._client.close()


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _layout(model: nn.Module, push_codec: str) -> tuple[ShardLayout, list[Tensor]]:
    """Returns each trainable parameter as one shard, and where it lies, flat."""
    pieces, places = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            if parameter.device.type != "cpu" or not parameter.is_contiguous():
                raise UsageError(
                    f"{name} is on {parameter.device} or not contiguous; servers take contiguous parameters on the CPU"
                )
            pieces.append(ShardSpec(name, 0, tuple(parameter.shape), str(parameter.dtype).removeprefix("torch.")))
            places.append(parameter.data.view(-1))
    if not pieces:
        raise UsageError("the model has no parameter that is trained, so there is nothing to serve")
    return ShardLayout(pieces, push_codec), places
