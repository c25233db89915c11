"""A server in a thread, its clients, and a parameter that counts what was pushed."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from headrace.parameter_server.client.client import Client
from headrace.parameter_server.client.session import ServerConnection
from headrace.parameter_server.core.leases import LeaseTable
from headrace.parameter_server.core.shard import Shard
from headrace.parameter_server.server.optimizer import Remedies, ShardOptimizer
from headrace.parameter_server.server.server import Server
from headrace.parameter_server.wire import ShardLayout, ShardSpec
from headrace.policies.staleness import Combination, EveryPush, Unbounded
from headrace.spec.model import ParameterSpec
from headrace.transport.base import ClientTransport, ServerTransport
from headrace.transport.local_client import LocalClientTransport
from headrace.transport.local_server import LocalServerTransport
from headrace.transport.remote_client import RemoteClientTransport
from headrace.transport.remote_server import RemoteServerTransport
from transport.faulty import Faults, FaultyLink
from transport.ways import SECRET

WIDTH = 64
PATIENCE_S = 20.0
PROBE_S = 0.03


class Stand:
    """A server of one parameter of `WIDTH` numbers, in a thread of its own, and clients of it.

    Args:
        way: "local" or "remote".
        workers: members.
        combination: of the shard.
        codec: of what is pushed.
        faults: of all links.
        patience_s: of all clients.
        layout: instead of that parameter, shards of others.
        remedies: for stale gradients.
        measures: whether it tells how far a push is from the mean of its round.
    """

    def __init__(
        self,
        way: str,
        workers: int = 1,
        combination: Combination | None = None,
        codec: str = "plain",
        faults: Faults | None = None,
        patience_s: float = PATIENCE_S,
        layout: ShardLayout | None = None,
        remedies: Remedies | None = None,
        measures: bool = False,
    ) -> None:
        self.layout = layout or ShardLayout([ShardSpec("weight", 0, (WIDTH,))], codec)
        slots = (self.layout.slots, self.layout.push_slots, self.layout.reply_slots)
        self.port: ServerTransport = (
            LocalServerTransport(*slots) if way == "local" else RemoteServerTransport(*slots, secret=SECRET)
        )
        sizes: Counter[str] = Counter()
        for piece in self.layout.pieces:
            sizes[piece.parameter] += piece.elements
        specs = [ParameterSpec(name, (elements,)) for name, elements in sizes.items()]
        applier = ShardOptimizer(self.layout, partial(torch.optim.SGD, lr=1.0), specs, remedies=remedies)
        machines = [Shard(range(workers), Unbounded(), combination or EveryPush()) for _ in self.layout.pieces]
        leases = (LeaseTable(workers, 1000), 0, 1000, 1)
        self.server = Server(self.port, self.layout, applier, machines, leases, grace_s=PATIENCE_S, measures=measures)
        self.machine = machines[0]
        self._way = way
        self._faults = faults
        self._patience_s = patience_s
        self._stop = threading.Event()
        self._between: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._clients: list[Client] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._stop.is_set():
            self.server.turn(0.01)
            while not self._between.empty():
                self._between.get()()

    def link(self) -> ClientTransport:
        """Opens a link to it."""
        slots = (self.layout.slots, self.layout.push_slots, self.layout.reply_slots)
        link: ClientTransport = (
            LocalClientTransport(self.port.address, *slots)
            if self._way == "local"
            else RemoteClientTransport(self.port.address, *slots, secret=SECRET)
        )
        return FaultyLink(link, self._faults) if self._faults else link

    def client(
        self, worker: int = 0, incarnation: int = 0, lasts: bool = True, observes: bool = False
    ) -> tuple[Client, torch.Tensor]:
        """Returns a client and the copy that it pulls to; one that opens other links, if it `lasts`."""
        connection = self.connection(lasts)
        client = Client([connection], worker, incarnation, observes=observes)
        self._clients.append(client)
        return client, connection.places[0]

    def connection(self, lasts: bool = True) -> ServerConnection:
        """Returns a connection to it, for a client of several servers."""
        reopen = self.link if lasts else None
        places = [torch.zeros(piece.elements) for piece in self.layout.pieces]
        return ServerConnection(self.link(), self.layout, places, 7, "there", reopen, self._patience_s, PROBE_S)

    def between(self, act: Callable[[], object]) -> None:
        """Does something in the server's thread, between two turns."""
        done = threading.Event()
        self._between.put(lambda: (act(), done.set()))
        assert done.wait(PATIENCE_S)

    def cut(self, worker: int = 0) -> None:
        """Ends the link of a worker, whatever it has asked."""

        def cut() -> None:
            for peer, member in list(self.server._members._at.items()):
                if member.worker == worker and not member.away:
                    self.port.drop(peer)
                    self.server._end(peer)

        self.between(cut)

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self._stop.set()
        self._thread.join()
        self.server.close()


@contextmanager
def standing(*arguments: object, **others: object) -> Iterator[Stand]:
    stand = Stand(*arguments, **others)  # type: ignore[arg-type]
    with ExitStack() as closing:
        closing.callback(stand.close)
        yield stand


def one_hot(coordinate: int) -> list[list[torch.Tensor]]:
    """Returns the gradient that makes a coordinate one more."""
    gradient = torch.zeros(WIDTH)
    gradient[coordinate] = -1.0
    return [[gradient]]


def counted(pushes: int) -> torch.Tensor:
    expected = torch.zeros(WIDTH)
    expected[:pushes] = 1.0
    return expected
