"""Workers that lease data and push its gradients to shards, as a world of which every state is explored.

    ask ──► pull at each shard ──► push to each shard ──► ask with Commit or Return ...
     └───► meet ──► advance

A request and its handling are one step: a worker has one open request a shard, so that what waits on a link is what
has not happened yet. That a worker is lost, or is back, is heard by each place at another moment. The books of the
random histories hold what each step must do; what is explored here besides is whether all that begins comes to its end.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from headrace.parameter_server.core import leases as lease
from headrace.parameter_server.core.events import (
    Ack,
    Close,
    Join,
    LeasesAhead,
    Leave,
    Pull,
    Push,
    Reason,
    Refuse,
    Reply,
)
from headrace.parameter_server.core.leases import LeaseTable
from headrace.parameter_server.core.shard import Shard
from headrace.policies.staleness import FirstPushes
from model_checking.booked import copied_book, noted, shard_key
from model_checking.explorer import Step, Twin, copied, frozen
from parameter_server.books import LeaseBook, ShardBook
from parameter_server.world import World

__all__ = ["Pushes", "Setting"]

LEASES = -1
"""The place of the leases, beside those of the shards."""


@dataclass(frozen=True)
class Setting:
    """What is explored: a `World` of the random histories without its chances, and how many faults of which kinds.

    `kinds` are "kill" (a worker; if it `returns`, it may come back), "reconnect" (its link to a shard breaks), "halt"
    (an early sync point), "poison" (a gradient that is not finite), and "close" (a worker has waited long enough).
    """

    world: World
    faults: int = 2
    kinds: tuple[str, ...] = ("kill",)
    returns: bool = True

    def __post_init__(self) -> None:
        assert not (self.returns and "reconnect" in self.kinds), "one of them: two ways of one worker would be mixed up"


@dataclass
class Worker:
    """One worker. `asked` are its open pulls and pushes by shard, `told` what became of its last push, by shard.

    `lost` are answers that were lost with a link; the repeated request must get the same.
    """

    phase: str = "idle"
    incarnation: int = 0
    lease: int = -1
    news: lease.Event | None = None
    finite: bool = True
    rests: bool = False
    versions: dict[int, int] = field(default_factory=dict)
    pulls: dict[int, Pull] = field(default_factory=dict)
    pushed: dict[int, Push] = field(default_factory=dict)
    told: dict[int, Ack | Refuse] = field(default_factory=dict)
    lost: dict[int, Ack | Refuse] = field(default_factory=dict)


class _Unkept:
    """Takes what the books note of a history, and forgets it: it is no part of the state."""

    def __init__(self) -> None:
        self.staleness: deque[int] = deque(maxlen=0)
        self.refused: dict[Reason, int] = {}


class Pushes:
    """The world of one setting; `shard` and `leases` are the machines' classes."""

    def __init__(self, setting: Setting, shard: Any = Shard, leases: Any = LeaseTable) -> None:
        world = setting.world
        self.setting, self.left = setting, setting.faults
        self.said: list[tuple[Any, Any]] = []
        workers = range(len(world.paces))
        make = partial(shard, workers, world.admission, world.combination)
        self.books = [ShardBook(Twin(make), world, _Unkept()) for _ in range(world.shards)]
        until = world.fences[0]
        table = partial(leases, world.portions, until, 0, world.fixed, workers=workers)
        self.leases = LeaseBook(Twin(table), world, until)
        self.leases.present = set(workers)
        self.workers = {worker: Worker() for worker in workers}
        self.ways: dict[tuple[int, int], deque[Any]] = {}
        self.asker = dict.fromkeys(workers, 0)
        self.members: set[int] = set()
        self.settled = [0] * world.shards
        # Of each shard and, last, of the leases; None if it is to be made anew.
        self.keys: list[Any] = [None] * (world.shards + 1)
        self.over = False
        self._look_ahead()

    def copy(self) -> Self:
        made = object.__new__(type(self))
        made.__dict__.update(vars(self))
        # A book is copied when something is told to it.
        made.books, made.keys = self.books[:], self.keys[:]
        for name in ("workers", "ways", "asker", "members", "settled"):
            setattr(made, name, copied(getattr(self, name)))
        return made

    def _own(self, place: int) -> Any:
        """Returns the book of a place, which no other world has."""
        self.keys[place] = None
        if place == LEASES:
            self.leases = copied_book(self.leases)
            return self.leases
        self.books[place] = copied_book(self.books[place])
        return self.books[place]

    def key(self) -> Any:
        own = (self.left, self.over, self.workers, self.asker, self.members, self.settled)
        for place, known in enumerate(self.keys[:LEASES]):
            if known is None:
                book = self.books[place]
                self.keys[place] = (noted(book), shard_key(book.machine.state()))
        if self.keys[LEASES] is None:
            self.keys[LEASES] = (noted(self.leases), self.leases.machine.state())
        return (frozen(own), frozen({way: events for way, events in self.ways.items() if events}), *self.keys)

    def ended(self) -> bool:
        return self.over

    def steps(self) -> list[Step]:
        if self.over:
            return []
        found: list[Step] = [("hear", *way) for way, events in self.ways.items() if events]
        for number, worker in self.workers.items():
            found += self._next(number, worker)
        return found

    def _next(self, number: int, worker: Worker) -> list[Step]:
        shards = [place for place in range(len(self.books)) if not self.ways.get((number, place))]
        match worker.phase:
            case "idle":
                return [] if self.ways.get((number, LEASES)) else [("ask", number)]
            case "waits":
                rests = self.setting.world.rests and not worker.rests and len(shards) == len(self.books)
                return [("rest", number)] if rests else []
            case "pulls":
                return [("pull", number, place) for place in shards if place not in {**worker.versions, **worker.pulls}]
            case "pushes":
                return [("push", number, place) for place in shards if place not in worker.pushed]
            case "advances":
                return [("advance", number)]
        return []

    def faults(self) -> list[Step]:
        found: list[Step] = []
        if self.over:
            return found
        there = [number for number, worker in self.workers.items() if worker.phase != "dead"]
        if self.setting.returns:
            found += [("return", number) for number in self.workers if number not in there]
        if not self.left:
            return found
        if "kill" in self.setting.kinds and len(there) > 1:
            found += [("kill", number) for number in there]
        if "halt" in self.setting.kinds:
            found.append(("halt",))
        for number in there:
            found += self._faults_of(number, self.workers[number])
        return found

    def _faults_of(self, number: int, worker: Worker) -> list[Step]:
        open_ = [place for place in worker.pushed if place not in worker.told]
        found: list[Step] = []
        if "reconnect" in self.setting.kinds:
            places = sorted({*worker.pulls, *worker.pushed})
            found += [("reconnect", number, place) for place in places if not self.ways.get((number, place))]
        if "poison" in self.setting.kinds and worker.phase == "pushes" and not worker.pushed and worker.finite:
            found.append(("poison", number))
        if "close" in self.setting.kinds:
            found += [("close", number, place) for place in open_ if not self.ways.get((number, place))]
        return found

    def do(self, step: Step) -> None:
        name, *numbers = step
        self.said = []
        fault = name in ("kill", "halt", "reconnect", "poison", "close")
        self.left -= fault
        getattr(self, f"_{name}")(*numbers)
        if self.over:
            for book in self.books:
                book.close(self.leases.stop)

    # What workers do

    def _ask(self, number: int) -> None:
        worker = self.workers[number]
        news, worker.news, worker.phase = worker.news, None, "waits"
        self.asker[number] = worker.incarnation
        self._lease(*([] if news is None else [news]), lease.Ask(number))

    def _rest(self, number: int) -> None:
        self.workers[number].rests = True
        for place in range(len(self.books)):
            self._tell(place, Leave(number))

    def _pull(self, number: int, place: int) -> None:
        worker = self.workers[number]
        if worker.rests:
            self._tell(place, Join(number, worker.incarnation))
            worker.rests = False
        worker.pulls[place] = Pull(number, worker.incarnation)
        self._tell(place, worker.pulls[place])

    def _push(self, number: int, place: int) -> None:
        worker, world = self.workers[number], self.setting.world
        version = worker.versions.pop(place)
        weight = 0.0 if world.empty and worker.lease == 1 else 1.0
        push = Push(number, worker.incarnation, worker.lease, version, weight, 1 / world.portions, worker.finite)
        worker.pushed[place], worker.pulls[place] = push, Pull(number, worker.incarnation)
        self._tell(place, push)
        if place in worker.pulls:
            self._tell(place, worker.pulls[place])

    def _advance(self, number: int) -> None:
        """Each worker that has met tells it all; the first one counts."""
        done, self.workers[number].phase = len(self.leases.fences), "idle"
        for place in range(len(self.books)):
            if self.settled[place] < done:
                self.settled[place] = done
                self._own(place).settle(0)
        until = self.leases.fences[-1]
        if self.leases.until == until:
            self._own(LEASES).begin = until
        self._lease(lease.Advance(until, next(each for each in self.setting.world.fences if each > until)))
        self._look_ahead()

    # Faults

    def _kill(self, number: int) -> None:
        before = self.workers[number]
        self.workers[number] = Worker("dead", before.incarnation, pushed=before.pushed)
        self.members.discard(number)
        for place in range(LEASES, len(self.books)):
            if "reconnect" in self.setting.kinds:
                # What has not been heard of a process that is gone is lost; what has, was heard before.
                self.ways.pop((number, place), None)
            self._queue(number, place, lease.WorkerLost(number) if place == LEASES else Leave(number))
        self._meet()

    def _return(self, number: int) -> None:
        """Another process is in a worker's place; what the one before has pushed last may still come."""
        before = self.workers[number]
        self.workers[number] = Worker(incarnation=before.incarnation + 1)
        for place in range(len(self.books)):
            self._queue(number, place, Join(number, before.incarnation + 1))
            if place in before.pushed:
                self._queue(number, place, before.pushed[place])

    def _halt(self) -> None:
        self._lease(lease.Halt())
        self._look_ahead()

    def _poison(self, number: int) -> None:
        self.workers[number].finite = False

    def _close(self, number: int, place: int) -> None:
        self._tell(place, Close(number))

    def _reconnect(self, number: int, place: int) -> None:
        """A worker joins again over another link, and repeats what it has asked, or what it was told on the old one."""
        worker = self.workers[number]
        if place in worker.told:
            worker.lost[place] = worker.told.pop(place)
            worker.versions.pop(place, None)
            worker.pulls[place] = Pull(number, worker.incarnation)
        self._queue(number, place, Join(number, worker.incarnation))
        if place in worker.pushed:
            self._queue(number, place, worker.pushed[place])
        if place in worker.pulls:
            self._queue(number, place, worker.pulls[place])

    def _hear(self, number: int, place: int) -> None:
        event = self.ways[number, place].popleft()
        worker = self.workers[number]
        if place == LEASES:
            self._lease(event)
        elif isinstance(event, Push) and event.incarnation != worker.incarnation:
            refused = [Refuse(number, event.lease, Reason.STRANGER)]
            assert self._own(place).machine.handle(event) == refused, "a push of an older incarnation is refused"
        elif isinstance(event, Push) and place in worker.lost:
            before, answer = worker.lost.pop(place), self._own(place).machine.handle(event)
            assert answer == [before], f"a repeated push is told the same as before, {before}, not {answer}"
            self._answer(worker, place, before)
        elif not isinstance(event, Pull) or place in worker.pulls:
            self._tell(place, event)

    # What they are told

    def _queue(self, number: int, place: int, event: Any) -> None:
        self.ways.setdefault((number, place), deque()).append(event)

    def _tell(self, place: int, event: Any) -> None:
        actions = self._own(place).handle(event)
        self.said.append((event, actions))
        for action in actions:
            if isinstance(action, Reply | Ack | Refuse):
                worker = self.workers[action.worker]
                # What a process has asked that is gone is answered to no other one.
                if self.books[place].incarnations.get(action.worker) == worker.incarnation:
                    self._answer(worker, place, action)

    def _answer(self, worker: Worker, place: int, action: Reply | Ack | Refuse) -> None:
        if worker.phase == "dead":
            return
        if any(isinstance(event, Join) for event in self.ways.get((action.worker, place), ())):
            # Its link has ended: it asks again, and what it pushed is to be told the same.
            if not isinstance(action, Reply):
                worker.lost[place] = action
            return
        if isinstance(action, Reply):
            worker.versions[place] = action.version
            del worker.pulls[place]
        else:
            worker.told[place] = action
        complete = len(worker.versions) == len(self.books)
        if worker.phase == "pulls" and complete:
            worker.phase = "pushes"
        elif worker.phase == "pushes" and complete and len(worker.told) == len(self.books):
            late = any(isinstance(each, Refuse) and each.reason == Reason.LATE for each in worker.told.values())
            worker.news = lease.Return(worker.lease) if late else lease.Commit(worker.lease)
            worker.phase, worker.lease, worker.finite = "idle", -1, True
            worker.told, worker.pushed = {}, {}

    def _lease(self, *events: lease.Event) -> None:
        for event in events:
            answers = self._own(LEASES).handle(event)
            self.said.append((event, answers))
            for answer in answers:
                self._take(answer)

    def _take(self, answer: lease.Answer) -> None:
        worker = self.workers[answer.worker]
        here = worker.phase == "waits" and self.asker[answer.worker] == worker.incarnation
        if isinstance(answer, lease.MeetAtSyncPoint):
            self.members = {
                each for each in answer.members
                if self.workers[each].phase in ("waits", "meets")
                and self.asker[each] == self.workers[each].incarnation
            }  # fmt: skip
            if here:
                worker.phase = "meets"
            self._meet()
        elif here:
            worker.lease = answer.lease
            # Of what a worker had pulled before it rested, or with its last push, the latter is new enough.
            worker.versions = {} if worker.rests else worker.versions
            worker.phase = "pushes" if len(worker.versions) == len(self.books) else "pulls"

    def _meet(self) -> None:
        """Lets all who meet go on when all are there; behind the last sync point nothing is left to do."""
        if not self.members or any(self.workers[each].phase != "meets" for each in self.members):
            return
        if self.leases.until >= self.setting.world.fences[-1]:
            self.over = True
        for each in self.members:
            self.workers[each].phase = "advances"

    def _look_ahead(self) -> None:
        world = self.setting.world
        if isinstance(world.combination, FirstPushes) and world.ahead:
            for place in range(len(self.books)):
                self._tell(place, LeasesAhead((self.leases.until - self.leases.begin) * world.portions))
