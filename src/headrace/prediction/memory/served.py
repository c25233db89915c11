"""One process of a run with servers, alone: a worker whose servers answer, or a server that workers push to.

What the others would write is memory without values, as large as theirs.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from headrace.checkpoint.forms import pack
from headrace.collectives.base import ProcessGroup
from headrace.machine.background import BackgroundThread
from headrace.parameter_server.planning import ServerProcess, layout_of
from headrace.parameter_server.replication.directory import ServerDirectory
from headrace.parameter_server.server.server import Server
from headrace.parameter_server.wire import Kind, Message, ShardLayout, buckets_of, encode
from headrace.prediction.memory.ends import (
    ENDLESS,
    AnsweredClient,
    Answers,
    HollowEnd,
    PushedServer,
    SentClient,
    SentServer,
)
from headrace.prediction.memory.hollow import HollowMemory
from headrace.prediction.memory.kinds import RankMemory
from headrace.shared_memory.control_page import ControlPage
from headrace.spec.job import Job
from headrace.spec.model import ModelSpec
from headrace.spec.parameter_sets import one_optimizer
from headrace.spec.plan import Plan
from headrace.strategies import Strategy
from headrace.strategies.served import ServedStrategy, ServerContext
from headrace.transport.base import ClientTransport, ReceivedMessage, Slots, TransportLayout
from headrace.transport.local_client import head_bytes

_SPAN = "push_every"

_ROUNDS = 3


def directory_of(plan: Plan, rank: int, group: ProcessGroup, share: Callable[[int], Tensor]) -> ServerDirectory:
    """Returns the servers of a plan, none of which is there, for the worker at a rank."""
    page = ControlPage.create(len(plan.roles))
    for server in plan.servers:
        page.ranks[server].address.publish("local:no process")
    span = plan.options.get(_SPAN, 1)
    assert isinstance(span, int)

    def open_(address: str, layout: ShardLayout, pushes: Slots, hello_s: float) -> ClientTransport:
        slots = TransportLayout(layout.slots, pushes, layout.reply_slots, layout.rows_bytes)
        answers = Answers(span)
        return SentClient(slots, share, answers) if _is_sent(plan) else AnsweredClient(slots, share, answers)

    # A push that lasts as long as it can: until the next one begins.
    late = partial(BackgroundThread, late=True)
    return ServerDirectory(page, plan, rank, group, 1.0, rank, plan.servers, open=open_, thread=late)


def measure_servers(
    job: Job, model: ModelSpec, strategy: Strategy, plan: Plan, backups: bool = False
) -> dict[str, RankMemory]:
    """Returns what each server of a plan holds, by number, and what its backup would, of which the plan has none."""
    assert isinstance(strategy, ServedStrategy)
    every = (HollowServer(job, model, strategy, plan, rank) for rank in plan.servers)
    found = {f"server {number}": each.measure() for number, each in enumerate(every)}
    for number, rank in enumerate(plan.servers) if backups else ():
        # It does what its server does, and maps that one's parameters as a worker would.
        slots, server = layout_of(plan, model, rank).slots, found[f"server {number}"]
        seen = head_bytes(slots) + slots.nbytes
        found[f"backup {number}"] = replace(server, exchange=server.exchange + seen)
    return found


def _is_sent(plan: Plan) -> bool:
    return plan.options.get("transport") == "tcp"


@dataclass(frozen=True)
class HollowServer:
    """A server of a plan, which all workers push to, over tensors without values."""

    job: Job
    model: ModelSpec
    strategy: ServedStrategy
    plan: Plan
    rank: int

    def measure(self) -> RankMemory:
        """Builds it, and has it answer pushes of all workers until the optimizer's state is what it will stay."""
        memory, plan = HollowMemory(), self.plan
        layout = layout_of(plan, self.model, self.rank)
        with warnings.catch_warnings(), memory:
            warnings.simplefilter("ignore")
            make = SentServer if _is_sent(plan) else PushedServer
            end = make(layout, memory.share, plan.replicas)
            context = ServerContext(
                self.model, one_optimizer(self.job.optimizer, "a plan of memory"), self.job.options,
                rounds_per_epoch=1, first=0, until=ENDLESS, process=ServerProcess(end=end),
            )  # fmt: skip
            server = self.strategy.server(plan, self.rank, context)
            asking = _Asking(server, end)
            for worker in range(plan.replicas):
                asking(worker, Message(Kind.JOIN, numbers=(worker, 0, worker)), layout.describe())
            for shard in range(len(layout)):
                asking(0, Message(Kind.LOAD, shard, 1), pack({}))
            start = memory.peak_bytes
            for round_ in range(_ROUNDS):
                memory.restart()
                self._push(asking, layout, round_)
            found: list[RankMemory] = []
            memory.restart(memory.peak_step, lambda: found.append(_kinds(memory, server, end)))
            self._push(asking, layout, _ROUNDS)
            return replace(found[0], start=start)

    def _push(self, asking: _Asking, layout: ShardLayout, round_: int) -> None:
        """Has all workers push a round, and wait for what comes of it."""
        together = bool(self.plan.options.get("backup_workers")) or self.model.optimizer.at_once
        buckets = [range(len(layout))] if together else buckets_of(layout)
        # The slowest may be the last with all that it pushes.
        for first in range(0, len(buckets), asking.ahead):
            for worker, shards in itertools.product(range(self.plan.replicas), buckets[first : first + asking.ahead]):
                head = Message(Kind.PUSH_PULL, shards.start, 1, round_ * self.plan.replicas + worker, 1.0)
                asking.put(worker, head._replace(share=1 / self.plan.replicas, numbers=(round_,) * len(shards)))
                if asking.ahead == 1:
                    asking.turn()
            asking.turn()


def _kinds(memory: HollowMemory, server: Server, end: HollowEnd) -> RankMemory:
    """Returns the bytes of what lives now, by what it is."""
    (_, state), living = server.memory(), memory.living()
    shared = sum(size for key, size in living.items() if memory.is_shared(key))
    own = end.region.untyped_storage().nbytes()
    return RankMemory(own, state=state, exchange=shared - own, activations=sum(living.values()) - shared - state)


class _Asking:
    """Has a server handle messages; a worker may have sent `ahead` that are not handled."""

    def __init__(self, server: Server, end: HollowEnd) -> None:
        self.ahead = end.ahead
        self._server, self._end = server, end
        self._numbers = itertools.count(1)

    def __call__(self, peer: int, message: Message, blob: bytes = b"") -> None:
        self.put(peer, message, blob)
        self.turn()

    def put(self, peer: int, message: Message, blob: bytes = b"") -> None:
        data = encode(message._replace(number=next(self._numbers)))
        self._end.inbox.append(ReceivedMessage(peer, data, memoryview(blob)))

    def turn(self) -> None:
        self._server.turn(0.0)
