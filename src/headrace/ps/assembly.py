"""From a plan to servers and clients: who holds which shards, and how they find each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from torch import Tensor, nn

from headrace.comm.local_link import LocalLink
from headrace.comm.local_port import LocalPort
from headrace.comm.port import Link, Port, Slots
from headrace.ps.client import Client, Connection
from headrace.ps.form import Form, Piece

if TYPE_CHECKING:
    from headrace.spec.model import ModelSpec
    from headrace.spec.plan import Plan, Role

__all__ = ["connect", "form_of", "open_port", "places_of"]


def form_of(plan: Plan, model: ModelSpec, rank: int) -> Form:
    """Returns the shards that a server holds."""
    known = {parameter.name: parameter for parameter in model.parameters}
    pieces = []
    for segment in plan.segments:
        if segment.owner != rank:
            continue
        parameter, length = known[segment.parameter], segment.stop - segment.start
        # Rows stay rows, for optimizers that look at them; whatever cuts through a row is flat.
        rows, rest = (parameter.shape[:1], parameter.shape[1:]) if parameter.shape else ((1,), ())
        width = parameter.elements // rows[0] if rows[0] else 1
        shape = parameter.shape if length == parameter.elements else (length,)
        if width and length != parameter.elements and not length % width and not segment.start % width:
            shape = (length // width, *rest)
        pieces.append(Piece(segment.parameter, segment.start, shape, parameter.dtype))
    push, pull = (str(plan.options.get(name, "plain")) for name in ("push_codec", "pull_codec"))
    return Form(pieces, push, pull)


def places_of(form: Form, module: nn.Module) -> list[Tensor]:
    """Returns where the shards lie in a module's parameters, which become contiguous."""
    named = dict(module.named_parameters())
    places = []
    for piece in form.pieces:
        parameter = named[piece.parameter]
        if not parameter.data.is_contiguous():
            parameter.data = parameter.data.contiguous()
        places.append(parameter.data.view(-1)[piece.start : piece.start + piece.elements])
    return places


def open_port(form: Form, transport: str) -> Port:
    """Opens a server's end: "shared_memory" for links of this host, "tcp" for others, encrypted."""
    if transport == "shared_memory":
        return LocalPort(form.slots, form.push_slots, form.reply_slots)
    from headrace.comm.remote_port import RemotePort

    port = RemotePort(form.slots, form.push_slots, form.reply_slots)
    # It is told to this run's own processes alone, through memory that no other user sees.
    port.address += f"#{port.secret.hex()}"
    return port


def connect(
    addresses: Sequence[str],
    forms: Sequence[Form],
    places: Sequence[Sequence[Tensor]],
    worker: tuple[int, int],
    check: Callable[[], None],
    servers: Sequence[Role],
    closing: ExitStack,
    together: bool = False,
    observes: bool = False,
) -> Client:
    """Returns a client of the servers at some addresses.

    Args:
        addresses, forms, places, servers: by server.
        worker: its number and incarnation.
        check, together, observes: as `Client` takes them.
        closing: ends its links.
    """
    connections = []
    for address, form, own, server in zip(addresses, forms, places, servers, strict=True):
        link = _link(address, form, Slots(()) if observes else form.push_slots)
        closing.callback(link.close)
        connections.append(Connection(link, form, own, server.rank, server.host))
    return Client(connections, *worker, check=check, together=together, observes=observes)


def _link(address: str, form: Form, pushes: Slots) -> Link:
    if address.startswith("local:"):
        return LocalLink(address, form.slots, pushes, form.reply_slots)
    from headrace.comm.remote_link import RemoteLink

    where, _, secret = address.partition("#")
    return RemoteLink(where, form.slots, pushes, form.reply_slots, secret=bytes.fromhex(secret))
