"""What strategies with servers decide alike: who serves, who holds which shard, what a round costs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from time import monotonic, sleep
from typing import TYPE_CHECKING

from torch import Tensor, nn

from headrace.errors import InfeasiblePlan, UnknownName, UsageError
from headrace.parameter_server.client.client import Client
from headrace.parameter_server.client.session import ServerConnection
from headrace.parameter_server.replication.transport import ReplicatedTransport
from headrace.parameter_server.wire.layout import ShardLayout, ShardSpec
from headrace.parameter_server.wire.messages import Kind, Message
from headrace.policies import PLACEMENTS
from headrace.policies.placement import place
from headrace.policies.roles import require_memory, worker_and_server_roles
from headrace.policies.sharding import parse_sharding
from headrace.spec.cluster import Cluster
from headrace.spec.model import ModelSpec
from headrace.spec.options import Options
from headrace.spec.plan import Role, Segment
from headrace.transport.base import ClientTransport, ServerTransport, Slots
from headrace.transport.codec import CODECS
from headrace.transport.local_client import LocalClientTransport
from headrace.transport.local_server import LocalServerTransport

_PIECES = {"shared_memory": "max_size:4MB", "tcp": "max_size:1MB"}
"""How parameters are cut if nobody says how: while a server works on a piece, the next one is on its way. Over TCP a
piece is a letter, which needs not be put together."""


def check_served(options: Options) -> None:
    """Refuses options that cannot be had where workers do not go in step.

    Raises:
        UsageError: with the remedy.
    """
    if options.on_nonfinite == "rollback":
        raise UsageError(
            "on_nonfinite='rollback' brings all workers back together, and those of a parameter server are never "
            "at the same round; use 'skip', which drops the one gradient, or 'raise'"
        )
    if options.batch_norm == "sync":
        raise UsageError(
            "batch_norm='sync' makes workers meet in every layer, and those of a parameter server do not wait for "
            "each other; use batch_norm='local', or mirrored"
        )
    if options.precision == "fp16":
        raise UsageError(
            "precision='fp16' needs one loss scale for all workers, and those of a parameter server do not agree on "
            "anything in a round; use precision='bf16', which needs none"
        )


def check_whole(name: str, value: int | None) -> None:
    """Raises:
    UsageError: `value` is no whole number of at least 0, nor None.
    """
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise UsageError(f"{name} must be a whole number of at least 0, got {value!r}")


def check_backups(backups: int, servers: int) -> None:
    """Raises:
    UsageError: there cannot be so many.
    """
    if backups is None:
        raise UsageError("backups must be 0 or 1, got None")
    check_whole("backups", backups)
    if backups > 1:
        raise UsageError(
            f"backups={backups} asks for {backups * servers} backups of {servers} server{'s' * (servers > 1)}, and a "
            "server has one at most; use backups=1, which gives each its own"
        )


def check_seats(sharding: str | None, placement: str, scale: str, ways: tuple[str, str, str]) -> None:
    """Refuses what does not exist.

    Args:
        sharding, placement, scale: as the strategies have them.
        ways: transport, push codec, pull codec.

    Raises:
        UsageError: with what does exist.
    """
    if sharding is not None:
        parse_sharding(sharding)
    transport, *codecs = ways
    if placement not in PLACEMENTS:
        raise UnknownName("placement", placement, PLACEMENTS)
    if scale not in ("share", "full"):
        raise UsageError(f"scale must be 'share' or 'full', got {scale!r}")
    if transport not in ("shared_memory", "tcp"):
        raise UnknownName("transport", transport, ("shared_memory", "tcp"))
    for codec in codecs:
        if codec not in CODECS:
            raise UnknownName("codec", codec, CODECS)


def seats(
    strategy: str,
    workers: int | None,
    servers: int,
    sharding: str | None,
    placement: str,
    model: ModelSpec,
    cluster: Cluster,
    transport: str,
    copies: int = 3,
    backups: int = 0,
) -> tuple[tuple[Role, ...], tuple[Segment, ...]]:
    """Says who works, who serves, and which server has which shard.

    A worker needs the model's size `copies` times: its parameters, what autograd makes, what lies on its way. A backup
    holds what its server does, and is filled from a copy.

    Raises:
        InfeasiblePlan: with the numbers.
    """
    roles = worker_and_server_roles(strategy, workers, servers, cluster, backups)
    count = sum(role.kind == "worker" for role in roles)
    require_memory(strategy, (copies * count + 1 + 2 * backups) * model.trainable_bytes, cluster)
    return roles, shards(model, range(count, count + servers), sharding, placement, transport)


def shards(
    model: ModelSpec, servers: Sequence[int], sharding: str | None, placement: str, transport: str
) -> tuple[Segment, ...]:
    """Cuts a model's parameters, or those of a part of it, into shards, and says which server has which.

    Raises:
        InfeasiblePlan: the optimizer needs whole parameters, or a server would have nothing to do.
    """
    if sharding is None:
        sharding = _PIECES[transport] if model.sliceable else "whole"
    if sharding != "whole" and not model.sliceable:
        raise InfeasiblePlan(
            f"sharding={sharding!r} cuts parameters, and the job's optimizer needs whole ones (as Muon does); "
            "use sharding='whole'"
        )
    return place(parse_sharding(sharding)(model.parameters), servers, PLACEMENTS[placement])


if TYPE_CHECKING:
    from headrace.spec.model import ModelSpec, ParameterSpec
    from headrace.spec.plan import Plan, Role
    from headrace.training.optimizer_state import MeanState

_HELLO_S = 30.0
_AGAIN_S = 2.0
"""How long a server may take to greet a new link, and one that it has known: it may be the wrong one to wait for."""
_PATIENCE_S = 10.0
"""How long a link is tried that somebody may still be found for."""
_SLICE_S = 0.05


def form_of(plan: Plan, model: ModelSpec, rank: int, state: MeanState | None = None) -> ShardLayout:
    """Returns the shards that a server holds: pieces of parameters, then those of an optimizer's state beside them."""
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
        pieces.append(ShardSpec(segment.parameter, segment.start, shape, parameter.dtype))
    pieces += _beside(pieces, known, state) if state else ()
    # Where there is one name for both, what is pulled travels as it is: it is nobody's difference to anything.
    push = plan.options.get("push_codec", plan.options.get("codec", "plain"))
    pull = plan.options.get("pull_codec", "plain")
    return ShardLayout(pieces, str(push), str(pull))


def _beside(pieces: Sequence[ShardSpec], known: Mapping[str, ParameterSpec], state: MeanState) -> list[ShardSpec]:
    beside = []
    for like, spec in zip(state.likes, state.specs, strict=True):
        for piece in (piece for piece in pieces if piece.parameter == like.name):
            if spec.shape == known[like.name].shape:
                beside.append(ShardSpec(spec.name, piece.start, piece.shape, spec.dtype, exact=True))
            elif not piece.start:
                # What is of the whole parameter goes with its first piece.
                beside.append(ShardSpec(spec.name, 0, spec.shape, spec.dtype, exact=True))
    return beside


def places_of(form: ShardLayout, module: nn.Module, beside: Mapping[str, Tensor] | None = None) -> list[Tensor]:
    """Returns where the shards lie in a module's parameters, which become contiguous, or in what is beside them."""
    named = {**dict(module.named_parameters()), **(beside or {})}
    places = []
    for piece in form.pieces:
        parameter = named[piece.parameter]
        if not parameter.data.is_contiguous():
            parameter.data = parameter.data.contiguous()
        places.append(parameter.data.view(-1)[piece.start : piece.start + piece.elements])
    return places


def open_port(form: ShardLayout, transport: str) -> ServerTransport:
    """Opens a server's end: "shared_memory" for links of this host, "tcp" for others, encrypted."""
    if transport == "shared_memory":
        return LocalServerTransport(form.slots, form.push_slots, form.reply_slots)
    from headrace.transport.remote_server import RemoteServerTransport

    port = RemoteServerTransport(form.slots, form.push_slots, form.reply_slots)
    # It is told to this run's own processes alone, through memory that no other user sees.
    port.address += f"#{port.secret.hex()}"
    return port


def pair(port: ServerTransport, form: ShardLayout, process: int) -> ReplicatedTransport:
    """Returns what lets a server have a backup, or be one; `process` is its number, which no other process ever has."""

    def call(address: str) -> ClientTransport:
        return _link(address, form, Slots(()), _AGAIN_S)

    return ReplicatedTransport(port, form.push_slots, form.reply_slots, process, call)


def leads(client: Client, rank: int) -> bool:
    """Returns whether a worker has to bring the parameters to begin with: rank 0 does, if nobody has."""
    return rank == 0 and bool(client.versions) and not client.ask(0, Message(Kind.BEGIN))


def connect(
    addresses: Sequence[str],
    forms: Sequence[ShardLayout],
    places: Sequence[Sequence[Tensor]],
    worker: tuple[int, int],
    check: Callable[[], None],
    servers: Sequence[Role],
    closing: ExitStack,
    *,
    together: bool = False,
    observes: bool = False,
    in_turn: bool = False,
    find: Callable[[int], str] | None = None,
) -> Client:
    """Returns a client of the servers at some addresses; `closing` ends its links.

    Args:
        worker: its number and incarnation.
        together, observes, in_turn: see `Client`.
        find: says where a server is now, by its place in `addresses`, when the link to it has ended; raises
            ConnectionError if it is nowhere. None for where it was.
    """

    def open_link(server: int, address: str, hello_s: float) -> ClientTransport:
        form = forms[server]
        return _link(address, form, Slots(()) if observes else form.push_slots, hello_s)

    connections = []
    for index, (address, form, own, server) in enumerate(zip(addresses, forms, places, servers, strict=True)):

        def reopen(index: int = index, address: str = address) -> ClientTransport:
            return open_link(index, find(index) if find else address, _AGAIN_S)

        link = _opened(functools.partial(open_link, index, address, _HELLO_S), reopen if find else None, check)
        closing.callback(link.close)
        connections.append(ServerConnection(link, form, own, server.rank, server.host, reopen))
    client = Client(connections, *worker, check, together=together, observes=observes, in_turn=in_turn)
    closing.callback(client.close)
    return client


def _opened(
    first: Callable[[], ClientTransport], again: Callable[[], ClientTransport] | None, check: Callable[[], None]
) -> ClientTransport:
    """Opens a link; where the first way leads nowhere, since a server has died meanwhile, by the other one."""
    deadline = monotonic() + _PATIENCE_S
    while True:
        try:
            return first()
        except (ConnectionError, TimeoutError):
            if again is None or monotonic() > deadline:
                raise
            first = again
        check()
        sleep(_SLICE_S)


def _link(address: str, form: ShardLayout, pushes: Slots, hello_s: float) -> ClientTransport:
    if address.startswith("local:"):
        return LocalClientTransport(address, form.slots, pushes, form.reply_slots, hello_s=hello_s)
    from headrace.transport.remote_client import RemoteClientTransport

    where, _, secret = address.partition("#")
    return RemoteClientTransport(
        where, form.slots, pushes, form.reply_slots, secret=bytes.fromhex(secret), hello_s=hello_s
    )
