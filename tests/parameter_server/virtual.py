"""Workers, shards and leases in virtual time: one `World` of settings and a seed is one history, the same every time.

Each worker goes round; a message takes a random time, those of one worker to one place keep their order:

    Ask ──► Grant ──► Pull ──► compute ──► Push ──► Ask with Commit or Return ...
      └───► Fence ──► all meet ──► Settle, Advance

A worker may be lost at any moment and come again. What the machines do is held against `ps.books`.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from headrace.parameter_server.core import leases as lease
from headrace.parameter_server.core import shard
from headrace.parameter_server.core.events import Ack, Close, Join, Leave, Pull, Push, Reason, Refuse, Reply
from headrace.policies.staleness import FirstPushes
from parameter_server.books import LeaseBook, ShardBook
from parameter_server.operations import Operation
from parameter_server.world import World

MOST_EVENTS = 20_000


class Stuck(AssertionError):
    """Everybody waits."""


@dataclass(frozen=True)
class Machines:
    """The machines that are driven; others than the real ones where tests test themselves."""

    shard: Callable[..., Any] = shard.Shard
    leases: Callable[..., Any] = lease.LeaseTable
    book: Callable[..., Any] = ShardBook


@dataclass
class History:
    """What has happened.

    Attributes:
        computed: gradients made, by worker.
        lead: the most rounds that a worker which began to compute was ahead of the slowest.
        staleness: of all steps of all shards.
        refused: how often, by reason.
        fences: rounds that were done when the workers met.
        ended: when, in virtual time.
        operations: all pushes and pulls, as workers and shards saw them.
    """

    computed: list[int]
    lead: int = 0
    staleness: list[int] = field(default_factory=list)
    refused: dict[Reason, int] = field(default_factory=dict)
    fences: list[int] = field(default_factory=list)
    ended: float = 0.0
    operations: list[Operation] = field(default_factory=list)


def run(world: World, machines: Machines | None = None) -> History:
    """Lives through a history; raises `Stuck` if it ends too early, AssertionError where a machine does wrong."""
    return _Run(world, machines or Machines()).run()


_Life = Generator[int, Any, None]
"""Yields how many answers it waits for; gets them, by place."""


class _Run:
    def __init__(self, world: World, machines: Machines) -> None:
        self.world = world
        self.random = random.Random(world.seed)
        self.workers = range(len(world.paces))
        self.history = History([0] * len(self.workers))
        self.shards = range(world.shards + world.arbiter)
        self.books = [
            machines.book(machines.shard(self.workers, world.admission, world.combination), world, self.history)
            for _ in self.shards
        ]
        self.fences = list(world.fences)
        self.leases = LeaseBook(machines.leases(world.portions, self.fences[0], 0, world.fixed), world, self.fences[0])
        self.now = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.order = count()
        self.links: dict[tuple[int, int], float] = {}
        self.incarnations = [0] * len(self.workers)
        self.asked = [0] * len(self.workers)
        self.lives: dict[int, _Life] = {}
        self.inbox: dict[int, dict[int, Any]] = {worker: {} for worker in self.workers}
        self.missing = dict.fromkeys(self.workers, 0)
        self.met: set[int] = set()
        self.members: set[int] = set()
        self.last: dict[int, Push] = {}
        self.asking: dict[tuple[int, int], Operation] = {}
        self.ended = False
        self.renews = bool(world.seed % 2)

    # Time

    def run(self) -> History:
        self._look_ahead()
        for worker in self.workers:
            self._at(self.random.random(), self._born, worker)
        for _ in range(self.world.deaths):
            self._at(self._sometime(), self._die, self.random.choice(self.workers))
        for _ in range(self.world.halts):
            self._at(self._sometime(), self._halt)
        for _ in range(MOST_EVENTS):
            if self.ended:
                return self._close()
            if not self.queue:
                raise Stuck(f"{self.world}: lives {self.missing}, met {self.met}, {self.leases}, {self.books}")
            self.now, _, happen = heapq.heappop(self.queue)
            happen()
        raise Stuck(f"{self.world} does not come to an end")

    def _sometime(self) -> float:
        rounds = self.fences[-1] * self.world.portions / len(self.workers)
        return self.random.random() * rounds * (min(self.world.paces) + self.world.latency)

    def _at(self, delay: float, happen: Callable[..., None], *values: Any) -> None:
        self._when(self.now + delay, happen, *values)

    def _when(self, then: float, happen: Callable[..., None], *values: Any) -> None:
        heapq.heappush(self.queue, (then, next(self.order), lambda: happen(*values)))

    def _send(self, worker: int, place: int, happen: Callable[..., None], *values: Any) -> None:
        """Lets something happen at the other end of a link, behind all that was sent there before."""
        way = self.random.random() * self.world.latency
        arrives = max(self.now + way, self.links.get((worker, place), 0.0))
        self.links[worker, place] = arrives
        self._when(arrives, happen, *values)

    def _close(self) -> History:
        self.history.ended = self.now
        self.history.fences = self.leases.fences
        for book in self.books[: self.world.shards]:
            book.close(self.leases.stop)
        return self.history

    # Workers

    def _born(self, worker: int) -> None:
        self.lives[worker] = self._life(worker)
        self.missing[worker] = next(self.lives[worker])
        self._look(worker)

    def _life(self, worker: int) -> _Life:
        world, own = self.world, self.random
        places = range(world.shards)
        news: lease.Event | None = None
        versions: Mapping[int, int] = {}
        least = 0
        while True:
            answer = yield from self._lease(worker, news)
            if isinstance(answer, lease.MeetAtSyncPoint):
                self.met.add(worker)
                self._at(0.0, self._meet)
                yield 1
                news = None
                if self.renews or world.arbiter:
                    # Old versions would be late in a round.
                    versions = {}
                continue
            if not versions:
                versions = yield from self._pull(worker, least)
            held, self.history.lead = answer.lease, max(self.history.lead, self._lead(worker))
            pace = world.paces[worker] * (0.8 + 0.4 * own.random())
            self._at(pace, self._reach, worker, self.incarnations[worker], -2, None)
            yield 1
            self.history.computed[worker] += 1
            finite, weight = own.random() >= world.sick, float(hash((held, world.seed)) % 97 >= 97 * world.empty)
            push = (self.incarnations[worker], held, weight, 1 / world.portions, finite)
            if world.arbiter:
                late, least = yield from self._claim(worker, push, min(versions.values()))
                if late:
                    versions, news = {}, lease.Return(held)
                    continue
            said = yield from self._push(worker, push, places, versions)
            assert not world.arbiter or Reason.LATE not in said.values(), "shards take what the arbiter takes"
            news = lease.Return(held) if Reason.LATE in said.values() else lease.Commit(held)
            versions = (yield from self._pull(worker, least)) if world.eager else {}

    def _lease(self, worker: int, news: lease.Event | None) -> Generator[int, Any, lease.Answer]:
        """Asks for a portion, and leaves while there is none, if it is that kind of world."""
        self._send(worker, -1, self._ask, worker, self.incarnations[worker], news)
        answer = (yield 1)[-1]
        if answer is None:
            for place in self.shards if self.world.rests else ():
                self._send(worker, place, self._tell, place, Leave(worker))
            answer = (yield 1)[-1]
            if self.world.rests:
                for place in self.shards:
                    self._send(worker, place, self._tell, place, Join(worker, self.incarnations[worker]))
                # Not before it counts again everywhere, because others may go on when it has met them.
                yield from self._pull(worker, 0)
        return answer  # type: ignore[no-any-return]

    def _pull(self, worker: int, least: int) -> Generator[int, Any, dict[int, int]]:
        for place in range(self.world.shards):
            self._record(Operation(worker, place, False, self.now))
            self._send(worker, place, self._tell, place, Pull(worker, self.incarnations[worker], least))
        return dict((yield self.world.shards))

    def _claim(
        self, worker: int, push: tuple[int, int, float, float, bool], version: int
    ) -> Generator[int, Any, tuple[bool, int]]:
        """Asks the arbiter whether a gradient is of the round; returns whether it is late, and what to pull next."""
        arbiter = self.shards[-1]
        said = yield from self._push(worker, push, self.shards[-1:], {arbiter: version})
        late, now = said[arbiter]
        return late, now if late else version + 1

    def _push(
        self, worker: int, push: tuple[int, int, float, float, bool], places: range, versions: Mapping[int, int]
    ) -> Generator[int, Any, dict[int, Any]]:
        incarnation, held, weight, share, finite = push
        for place in places:
            self.last[worker] = Push(worker, incarnation, held, versions[place], weight, share, finite)
            self._record(Operation(worker, place, True, self.now, lease=held, made_with=versions[place]))
            self._send(worker, place, self._tell, place, self.last[worker])
            if self.world.patience < math.inf:
                self._at(self.world.patience, self._hurry, self.asking[worker, place])
        return dict((yield len(places)))

    def _hurry(self, asked: Operation) -> None:
        """Lets a worker wait no longer, if it still does."""
        if self.asking.get((asked.worker, asked.place)) is asked:
            self._send(asked.worker, asked.place, self._tell, asked.place, Close(asked.worker))

    def _record(self, operation: Operation) -> None:
        self.history.operations.append(operation)
        self.asking[operation.worker, operation.place] = operation

    def _lead(self, worker: int) -> int:
        """How far a worker that begins to compute is ahead of the slowest."""
        return self.history.computed[worker] - min(self.history.computed)

    def _answer(self, worker: int, place: int, value: Any) -> None:
        asked = self.asking.pop((worker, place), None)
        if asked is not None:
            asked.tell(self.now, value)
        self.inbox[worker][place] = value
        self._look(worker)

    def _reach(self, worker: int, incarnation: int, place: int, value: Any) -> None:
        """Gives a worker an answer, unless it is another by now."""
        if worker in self.lives and self.incarnations[worker] == incarnation:
            self._answer(worker, place, value)

    def _look(self, worker: int) -> None:
        if worker in self.lives and len(self.inbox[worker]) >= self.missing[worker]:
            answers, self.inbox[worker] = self.inbox[worker], {}
            self.missing[worker] = self.lives[worker].send(answers)

    # Loss

    def _die(self, worker: int) -> None:
        if worker not in self.lives or len(self.lives) == 1:
            return
        del self.lives[worker]
        self.inbox[worker].clear()
        self.met.discard(worker)
        self.members.discard(worker)
        self._meet()
        self._send(worker, -1, self._lost, worker)
        for place in self.shards:
            self._send(worker, place, self._tell, place, Leave(worker))
        if not self.world.forever:
            self._at(self.random.random() * 3, self._rise, worker)

    def _rise(self, worker: int) -> None:
        self.incarnations[worker] += 1
        for place in self.shards:
            self._send(worker, place, self._tell, place, Join(worker, self.incarnations[worker]))
            if worker in self.last:
                self._send(worker, place, self._stray, place, self.last[worker])
        self._born(worker)

    def _stray(self, place: int, push: Push) -> None:
        refusal = Refuse(push.worker, push.lease, Reason.STRANGER)
        assert self.books[place].machine.handle(push) == [refusal], "a push of an older incarnation is refused"

    # Places

    def _tell(self, place: int, event: shard.Event) -> None:
        for action in self.books[place].handle(event):
            if isinstance(action, shard.ApplyStep) and isinstance(event, Push):
                asked = self.asking.get((event.worker, place))
                if asked is not None and asked.lease == event.lease:
                    asked.version, asked.staleness = self.books[place].version, action.staleness
            if isinstance(action, Reply):
                self._back(action.worker, place, action.version)
            elif isinstance(action, Ack | Refuse) and place < self.world.shards and action.lease >= 0:
                self._back(action.worker, place, action.reason if isinstance(action, Refuse) else None)
        if isinstance(event, Push) and place == self.world.shards:
            # An arbiter says at once whether a gradient is of the round.
            self._back(event.worker, place, (self.books[place].late, self.books[place].version))

    def _back(self, worker: int, place: int, value: Any) -> None:
        incarnation = self.books[place].incarnations.get(worker, -1)
        self._send(worker, ~place - 1, self._reach, worker, incarnation, place, value)

    def _ask(self, worker: int, incarnation: int, news: lease.Event | None) -> None:
        self.asked[worker] = incarnation
        if worker not in self._leased((*(() if news is None else (news,)), lease.Ask(worker))):
            self._send(worker, -100, self._reach, worker, incarnation, -1, None)

    def _leased(self, events: tuple[lease.Event, ...]) -> set[int]:
        answers = [answer for event in events for answer in self.leases.handle(event)]
        for answer in answers:
            if isinstance(answer, lease.MeetAtSyncPoint):
                # A worker that was lost by now does not come.
                there = {worker for worker in self.lives if self.asked[worker] == self.incarnations[worker]}
                self.members = there & set(answer.members)
            self._send(answer.worker, -100, self._reach, answer.worker, self.asked[answer.worker], -1, answer)
        return {answer.worker for answer in answers}

    def _lost(self, worker: int) -> None:
        self._leased((lease.WorkerLost(worker),))

    def _halt(self) -> None:
        self._leased((lease.Halt(),))
        self._look_ahead()

    def _meet(self) -> None:
        if not self.members or self.met < self.members:
            return
        done = self.leases.until
        self.fences = [fence for fence in self.fences if fence > done]
        if not self.fences:
            self.ended = True
            return
        for place, book in enumerate(self.books):
            book.renew(times=self.renews * (place + 1))
        version = max(book.version for book in self.books) if self.world.arbiter else 0
        for book in self.books:
            book.settle(version)
        self.leases.begin = done
        met, self.met, self.members = sorted(self.met), set(), set()
        # A worker that has come meanwhile waits for this.
        self._leased((lease.Advance(done, self.fences[0]),))
        assert not self._leased((lease.Advance(done, self.fences[0] + 1),)), "the first one counts"
        self._look_ahead()
        for worker in met:
            self._answer(worker, -3, None)

    def _look_ahead(self) -> None:
        if isinstance(self.world.combination, FirstPushes) and self.world.ahead:
            for place, book in enumerate(self.books):
                ahead = (self.leases.until - self.leases.begin) * self.world.portions
                self._tell(place, shard.LeasesAhead(ahead))
                assert book.ahead == ahead
