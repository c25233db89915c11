"""From a plan to running servers, and to a worker's connections to them."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from time import monotonic, sleep

from torch import Tensor

from headrace.parameter_server.client.client import Client
from headrace.parameter_server.client.session import ServerConnection
from headrace.parameter_server.core.leases import LeaseTable
from headrace.parameter_server.core.portions import PortionTable
from headrace.parameter_server.core.shard import Shard
from headrace.parameter_server.planning import ServerProcess
from headrace.parameter_server.replication.directory import ServerDirectory
from headrace.parameter_server.replication.transport import ReplicatedTransport
from headrace.parameter_server.server.server import Server
from headrace.parameter_server.server.updater import ShardUpdater
from headrace.parameter_server.wire import Kind, Message, ShardLayout
from headrace.policies.staleness import Admission, Combination
from headrace.spec.plan import Plan
from headrace.transport.base import ClientTransport, ServerTransport, Slots
from headrace.transport.local_client import LocalClientTransport
from headrace.transport.local_server import LocalServerTransport

_HELLO_S = 30.0
_RECONNECT_HELLO_S = 2.0
"""How long a server may take to answer a new client, and a client that reconnects, perhaps to the wrong server."""

_CONNECT_S = 10.0
"""How long a client tries to connect to a server that may have been replaced."""

_POLL_S = 0.05


def build_server(
    plan: Plan,
    rank: int,
    layout: ShardLayout,
    optimizer: ShardUpdater,
    policies: tuple[Admission, Combination],
    leases: tuple[LeaseTable | PortionTable, int, int, int],
    transport: str,
    process: ServerProcess,
    *,
    measures: bool = False,
) -> Server:
    """Builds what a server runs, or a backup, whose `rank` is that of its server: `server_of(plan, rank)`.

    `leases` and `measures` are those of `Server`; only the first server uses the leases.
    """
    count = len(layout) + (optimizer.tables is not None)
    machines = [Shard(range(plan.replicas), *policies) for _ in range(count)]
    link = process.end or open_server_transport(layout, transport, process.address)
    replicated = None
    if plan.backups:
        primary = functools.partial(open_client_transport, layout=layout, pushes=Slots(()), hello_s=_RECONNECT_HELLO_S)
        replicated = ReplicatedTransport(link, layout.push_slots, layout.reply_slots, process.number, primary)
        link = replicated.transport
    given = leases if rank == plan.servers[0] else None
    return Server(link, layout, optimizer, machines, given, replicated=replicated, measures=measures)


def open_server_transport(layout: ShardLayout, transport: str, address: str = "") -> ServerTransport:
    """Opens a server's end: "shared_memory" for clients of this host, or "tcp"; at an address also for other hosts."""
    slots = layout.slots, layout.push_slots, layout.reply_slots
    if transport == "shared_memory" and not address:
        return LocalServerTransport(*slots, layout.rows_bytes)
    from headrace.transport.mixed_server import MixedServerTransport
    from headrace.transport.remote_server import RemoteServerTransport

    host = f"[{address}]" if ":" in address else address or "127.0.0.1"
    local = LocalServerTransport(*slots, layout.rows_bytes) if transport == "shared_memory" else None
    region, secret = local.region if local else None, secrets.token_bytes(32)
    remote = RemoteServerTransport(*slots, f"tcp://{host}:0", secret, region, layout.rows_bytes)
    # Only this run's processes read it, in the control page.
    remote.address += f"#{remote.secret.hex()}"
    return MixedServerTransport(local, remote) if local else remote


def brings_parameters(client: Client, rank: int) -> bool:
    """Returns whether a worker has to load the initial parameters: rank 0 does, unless it was done before."""
    return rank == 0 and bool(client.versions) and not client.ask(0, Message(Kind.BEGIN))


def connect(
    servers: ServerDirectory,
    layouts: Sequence[ShardLayout],
    places: Sequence[Sequence[Tensor]],
    check: Callable[[], None],
    closing: ExitStack,
    *,
    together: bool = False,
    observes: bool = False,
    in_turn: bool = False,
) -> Client:
    """Returns a client of some servers; `closing` closes its connections. The other arguments are those of `Client`."""
    connections = []
    used = list(servers.addresses())
    for index, (address, layout, into, role) in enumerate(
        zip(tuple(used), layouts, places, servers.roles, strict=True)
    ):
        pushes = Slots(()) if observes else layout.push_slots
        open_one = functools.partial(servers.open or open_client_transport, layout=layout, pushes=pushes)

        def reopen(index: int = index, open_one: Callable[..., ClientTransport] = open_one) -> ClientTransport:
            servers.suspect(index)
            used[index] = servers.find(index)
            return open_one(used[index], hello_s=_RECONNECT_HELLO_S)

        def has_moved(index: int = index) -> bool:
            with suppress(ConnectionError):
                return servers.find(index) != used[index]
            return False

        first = functools.partial(open_one, address, hello_s=_HELLO_S)
        transport = _connect_once(first, reopen, check)
        closing.callback(transport.close)
        require = functools.partial(servers.require, index)
        connections.append(
            ServerConnection(
                transport, layout, into, role.rank, role.host, reopen, has_moved=has_moved, require_link=require
            )
        )
    client = Client(
        connections, servers.worker, servers.incarnation, check, together=together, observes=observes, in_turn=in_turn
    )
    closing.callback(client.close)
    return client


def _connect_once(
    first: Callable[[], ClientTransport], again: Callable[[], ClientTransport], check: Callable[[], None]
) -> ClientTransport:
    """Opens a connection by `first`; if that fails because a server has been replaced, by `again`."""
    deadline = monotonic() + _CONNECT_S
    while True:
        try:
            return first()
        except (ConnectionError, TimeoutError):
            if monotonic() > deadline:
                raise
            first = again
        check()
        sleep(_POLL_S)


def open_client_transport(
    address: str, layout: ShardLayout, pushes: Slots, hello_s: float = _HELLO_S
) -> ClientTransport:
    """Opens a client's end to the address of `open_server_transport`, which is answered within `hello_s`."""
    slots = layout.slots, pushes, layout.reply_slots
    if address.startswith("local:"):
        return LocalClientTransport(address, *slots, rows_bytes=layout.rows_bytes, hello_s=hello_s)
    from headrace.transport.remote_client import RemoteClientTransport

    where, _, secret = address.partition("#")
    key = bytes.fromhex(secret)
    return RemoteClientTransport(where, *slots, secret=key, rows_bytes=layout.rows_bytes, hello_s=hello_s)
