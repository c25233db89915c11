"""Real servers with real clients, of every kind: what tests of backups and snapshots train."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from headrace.parameter_server.client.client import Client
from headrace.parameter_server.client.session import ServerConnection
from headrace.parameter_server.core.events import Reason
from headrace.parameter_server.core.leases import LeaseTable
from headrace.parameter_server.core.shard import Shard
from headrace.parameter_server.replication.transport import ReplicatedTransport
from headrace.parameter_server.server.optimizer import Remedies, RoundClock, ShardOptimizer
from headrace.parameter_server.server.server import Server
from headrace.parameter_server.wire import Kind, Message, ShardLayout, ShardSpec
from headrace.policies.staleness import Admission, Bounded, Combination, EveryPush, FirstPushes, Unbounded
from headrace.spec.model import ParameterSpec
from headrace.spec.options import Options
from parameter_server.pairs import Group
from transport.ways import open_link

WORKERS = 2
SHAPES = {"weight": (300, 7), "bias": (5,), "count": (2,)}
REGIMES: dict[str, tuple[Admission, Combination]] = {
    "asynchronous": (Unbounded(), EveryPush()),
    "bounded": (Bounded(1), EveryPush()),
    "lock-step": (Unbounded(), FirstPushes(WORKERS)),
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=0.01),
}


class Recipe:
    """How a server is made.

    `extras` are remedies for stale gradients, a schedule and a moving average.
    """

    def __init__(
        self, regime: str = "asynchronous", optimizer: str = "sgd", codec: str = "plain", extras: bool = False
    ):
        pieces = [ShardSpec("weight", 0, (200, 7)), ShardSpec("weight", 1400, (100, 7)), ShardSpec("bias", 0, (5,))]
        self.layout = partial(ShardLayout, [*pieces, ShardSpec("count", 0, (2,), "float64")], codec, codec)
        self.regime = regime
        self._optimizer = OPTIMIZERS[optimizer]
        self._extras = extras
        layout = self.layout()
        self.slots = (layout.slots, layout.push_slots, layout.reply_slots)

    def server(self, replicated: ReplicatedTransport) -> Server:
        layout = self.layout()
        specs = [
            ParameterSpec(name, shape, "float64" if name == "count" else "float32") for name, shape in SHAPES.items()
        ]
        schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=3, gamma=0.9)
        options = Options(schedule=schedule, ema_decay=0.9, warmup=2) if self._extras else Options()
        remedies = Remedies(divide=True, compensation=0.1, asynchronous_workers=2) if self._extras else Remedies()
        applier = ShardOptimizer(layout, self._optimizer, specs, RoundClock(options), remedies=remedies)
        machines = [Shard(range(WORKERS), *REGIMES[self.regime]) for _ in range(len(layout))]
        leases = LeaseTable(WORKERS, 1 << 20, fixed=self.regime != "asynchronous", workers=range(WORKERS))
        return Server(replicated.transport, layout, applier, machines, (leases, 0, 1 << 20, 1), replicated=replicated)


class Worker:
    """A worker in a thread, that asks for leases and pushes, until it is told to stop."""

    def __init__(self, way: str, recipe: Recipe, number: int, group: Group) -> None:
        self.error: BaseException | None = None
        self.pushed = 0
        self.client: Client | None = None
        self._recipe, self._number, self._way, self._group = recipe, number, way, group
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def stop(self) -> None:
        """Lets it come to the end of its step, and waits for that."""
        self._stop.set()

    def join(self) -> None:
        self._thread.join()
        if self.error is not None:
            raise self.error

    def _open(self) -> Any:
        assert self._group.view is not None
        layout = self._recipe.layout()
        address = self._group.runners[self._group.view.primary].address
        return open_link(self._way, address, layout.slots, layout.push_slots, layout.reply_slots)

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error

    def _work(self) -> None:
        chance = torch.Generator().manual_seed(self._number)
        layout = self._recipe.layout()
        places = [torch.zeros(piece.shape, dtype=getattr(torch, piece.dtype)) for piece in layout.pieces]
        self.client = client = Client([ServerConnection(self._open(), layout, places, reopen=self._open)], self._number)
        lease, late = -1, False
        # A worker that waits for others ends with them: each does as many rounds, or says that it goes.
        while not self._stop.is_set():
            client.servers[0].tell(Message(Kind.ASK, flag=late, lease=lease))
            lease = client.lease().lease
            client.pull()
            gradients: list[Any] = [
                torch.randn(place.shape, generator=chance, dtype=place.dtype)
                if torch.rand(1, generator=chance) < 0.9
                else None
                for place in places
            ]
            share = 0.25 + 0.5 * float(torch.rand(1, generator=chance))
            reason = client.push([gradients], lease, weight=share, share=share, pull=self.pushed % 2 == 0)
            late = reason == Reason.LATE
            self.pushed += 1
            if self._number == 0 and self.pushed == 5:
                client.ask(0, Message(Kind.AVERAGE, flag=1))
                client.ask(0, Message(Kind.STATE, 0, 1))
            if self._number == 0 and self.pushed == 7:
                client.ask(0, Message(Kind.AVERAGE))
        if self._number == 0:
            client.close()
        else:
            # As a process that ends without a word, and may come back: what servers keep of it is compared.
            client.servers[0].session._abandon()
