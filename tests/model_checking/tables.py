"""Workers that lease data or portions of a batch from one table, as worlds of which every state is explored."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from headrace.parameter_server.core.leases import (
    Advance,
    Answer,
    Ask,
    Commit,
    Event,
    Grant,
    Halt,
    LeaseTable,
    MeetAtSyncPoint,
    Return,
    WorkerLost,
)
from headrace.parameter_server.core.portions import PortionTable
from model_checking.explorer import Step, Twin, copied, frozen
from parameter_server.books import LeaseBook
from parameter_server.world import World

__all__ = ["Leases", "Portions", "TableSetting"]


@dataclass(frozen=True)
class TableSetting:
    """What is explored: so many workers, and one that may join; faults, parts of a round, and sync points.

    A fault is the loss of a worker, a lease that its worker returns, an early sync point, or the worker that joins.
    """

    workers: int = 3
    faults: int = 2
    portions: int = 2
    fences: tuple[int, ...] = (1, 2)
    fixed: bool = False


@dataclass
class _Desk:
    """What a table's workers are at: the lease that each has, and who idles, waits, meets or has met."""

    idle: set[int]
    waits: set[int]
    meets: set[int]
    advances: set[int]
    busy: dict[int, Grant]

    def there(self) -> list[int]:
        return sorted({*self.idle, *self.waits, *self.meets, *self.advances, *self.busy})

    def drop(self, worker: int) -> None:
        for group in (self.idle, self.waits, self.meets, self.advances):
            group.discard(worker)
        self.busy.pop(worker, None)


class _Table:
    """What both worlds have in common; they say what becomes of an event, and of work that is done."""

    def __init__(self, setting: TableSetting) -> None:
        self.setting, self.left = setting, setting.faults
        self.said: list[tuple[Any, Any]] = []
        self.desk = _Desk(set(range(setting.workers)), set(), set(), set(), {})
        self.newest, self.over = setting.workers, False

    def copy(self) -> Self:
        made = object.__new__(type(self))
        for name, own in vars(self).items():
            made.__dict__[name] = own if name in ("setting", "said") else self.copied(name, own)
        return made

    def copied(self, name: str, own: Any) -> Any:
        return copied(own)

    def ended(self) -> bool:
        return self.over

    def steps(self) -> list[Step]:
        if self.over:
            return []
        desk = self.desk
        return [
            *(("ask", worker) for worker in sorted(desk.idle)),
            *(("finish", worker) for worker in sorted(desk.busy)),
            *(("advance", worker) for worker in sorted(desk.advances)),
        ]

    def faults(self) -> list[Step]:
        if self.over or not self.left:
            return []
        there, desk = self.desk.there(), self.desk
        return [
            *(("lose", worker) for worker in there if len(there) > 1),
            *(("return", worker) for worker in sorted(desk.busy)),
            ("halt",),
            *([("join",)] if self.newest == self.setting.workers else []),
        ]

    def do(self, step: Step) -> None:
        name, *numbers = step
        self.said = []
        self.left -= name in ("lose", "return", "halt", "join")
        getattr(self, f"_{name}")(*numbers)

    def _ask(self, worker: int) -> None:
        self.desk.idle.discard(worker)
        self.desk.waits.add(worker)
        self.tell(Ask(worker))

    def _finish(self, worker: int) -> None:
        grant = self.desk.busy.pop(worker)
        # With what it says of a lease, a worker asks for the next one.
        self.desk.waits.add(worker)
        self.tell(self.finished(worker, grant), Ask(worker))

    def _return(self, worker: int) -> None:
        self.desk.waits.add(worker)
        self.tell(Return(self.desk.busy.pop(worker).lease, worker), Ask(worker))

    def _lose(self, worker: int) -> None:
        self.desk.drop(worker)
        self.tell(WorkerLost(worker))
        self._meet()

    def _join(self) -> None:
        self.desk.idle.add(self.newest)
        self.newest += 1

    def _halt(self) -> None:
        self.tell(Halt())

    def _advance(self, worker: int) -> None:
        self.desk.advances.discard(worker)
        self.desk.idle.add(worker)
        done = self.met_at
        self.tell(Advance(done, next(fence for fence in self.setting.fences if fence > done)))

    def tell(self, *events: Event) -> None:
        for event in events:
            answers = self.handle(event)
            self.said.append((event, answers))
            for answer in answers:
                assert answer.worker in self.desk.waits, "who has not asked is told nothing"
                self.desk.waits.discard(answer.worker)
                if isinstance(answer, Grant):
                    self.granted(answer)
                    self.desk.busy[answer.worker] = answer
                else:
                    self.met_at = answer.round
                    self.desk.meets.add(answer.worker)
        self._meet()

    def _meet(self) -> None:
        """Lets those who meet go on when all are there; a table tells all of them at once."""
        if self.desk.meets:
            self.desk.advances, self.desk.meets = self.desk.meets, set()
            self.over = self.met_at >= self.setting.fences[-1]

    met_at = 0

    def handle(self, event: Event) -> list[Answer]:
        raise NotImplementedError

    def granted(self, grant: Grant) -> None:
        raise NotImplementedError

    def finished(self, worker: int, grant: Grant) -> Commit:
        raise NotImplementedError


class Leases(_Table):
    """A table of leases; from each of its states, another run must get just what is not committed."""

    def __init__(self, setting: TableSetting, leases: Any = LeaseTable) -> None:
        super().__init__(setting)
        workers, until = range(setting.workers), setting.fences[0]
        self.make = partial(leases, setting.portions, until, 0, setting.fixed, workers=workers)
        world = World(0, (1.0,) * setting.workers, portions=setting.portions, fixed=setting.fixed)
        self.book = LeaseBook(Twin(self.make), world, until)
        self.book.present = set(workers)

    def copied(self, name: str, own: Any) -> Any:
        if name != "book":
            return copied(own)
        made = object.__new__(LeaseBook)
        made.__dict__.update({each: mine if each == "world" else copied(mine) for each, mine in vars(own).items()})
        return made

    def key(self) -> Any:
        noted = {name: own for name, own in vars(self.book).items() if name not in ("world", "machine")}
        own = (self.left, self.newest, self.over, self.met_at, self.desk)
        return frozen((own, noted, self.book.machine.state()))

    def handle(self, event: Event) -> list[Answer]:
        if isinstance(event, Advance) and event.done == self.book.until:
            self.book.begin = event.done
        answers = self.book.handle(event)
        self._resume()
        return answers

    def granted(self, grant: Grant) -> None:
        """The book has looked at it."""

    def finished(self, worker: int, grant: Grant) -> Commit:
        return Commit(grant.lease, worker)

    def _resume(self) -> None:
        """Looks at what another run gets that begins with this state: each lease that is not committed, once."""
        table, state = self.make(), self.book.machine.state().detached()
        table.load(state)
        assert table.state().detached() == state, "a loaded state is the state that was saved"
        stop, granted = self.book.stop, []
        workers = range(self.setting.workers)
        answers = [answer for worker in workers for answer in table.handle(Ask(worker))]
        while answers and isinstance(answers[0], Grant):
            granted.append(answers[0].lease)
            worker = answers.pop(0).worker
            answers += [*table.handle(Commit(granted[-1], worker)), *table.handle(Ask(worker))]
        expected = [
            each for each in range(self.book.begin * self.setting.portions, stop) if each not in self.book.committed
        ]
        assert sorted(granted) == expected, f"another run from this state gets {sorted(granted)}, not {expected}"
        assert all(isinstance(answer, MeetAtSyncPoint) for answer in answers)
        assert len(answers) == self.setting.workers, "another run from this state comes to the sync point"


class Portions(_Table):
    """A table of portions: each counts once in each evaluation, one worker steers, and a round has two evaluations."""

    def __init__(self, setting: TableSetting, portions: Any = PortionTable) -> None:
        super().__init__(setting)
        workers = range(setting.workers)
        make = partial(portions, setting.portions, setting.fences[0], workers=workers)
        self.table = Twin(make)
        self.serial, self.round, self.evaluation = 0, 0, 0
        self.counted: dict[int, float] = {}

    def key(self) -> Any:
        own = (self.left, self.newest, self.over, self.met_at, self.desk)
        seen = (self.serial, self.round, self.evaluation, self.counted)
        return frozen((own, seen, self.table.state()))

    def handle(self, event: Event) -> list[Answer]:
        answers: list[Answer] = self.table.handle(event)
        waits = self.desk.waits - {answer.worker for answer in answers}
        meets = {answer.worker for answer in answers if isinstance(answer, MeetAtSyncPoint)}
        assert not meets or meets == set(self.desk.there()) - (self.desk.idle & {self.setting.workers}), (
            "all meet at once"
        )
        held = {grant.part for grant in self.desk.busy.values() if grant.lease // self._stride == self.serial}
        held |= {answer.part for answer in answers if isinstance(answer, Grant)}
        free = set(range(self.setting.portions)) - held - self.counted.keys()
        goes_on = self.round < self.table.until and not (self.desk.advances or meets)
        asks = not isinstance(event, Commit | Return)
        assert not (asks and waits and free and goes_on), "no worker waits while there are portions"
        return answers

    @property
    def _stride(self) -> int:
        return self.setting.portions + 1

    def granted(self, grant: Grant) -> None:
        serial, part = divmod(grant.lease, self._stride)
        assert (serial, part, grant.round) == (self.serial, grant.part, self.round)
        if part == self.setting.portions:
            assert len(self.counted) == self.setting.portions, "one steers when all is counted"
            assert grant.lease not in {other.lease for other in self.desk.busy.values()}, "only one steers"
            weight = float(self.setting.portions)
            mean = sum(self.counted.values()) / weight
            assert grant.report[-2:] == (mean, weight), f"the mean is {mean}, and {grant.report[-2]} is reported"
            assert len(grant.report) == 2 * (self.evaluation + 1), "all evaluations of the round"
        else:
            assert part not in self.counted, "what is counted is not computed again"
            assert grant.report == (float(self.evaluation),)

    def finished(self, worker: int, grant: Grant) -> Commit:
        serial, part = divmod(grant.lease, self._stride)
        if part < self.setting.portions:
            late = serial != self.serial or part in self.counted
            # Who is late says something else, which must not be found in any mean.
            loss = 99.0 if late else 1.0 + part + 10 * serial
            if not late:
                self.counted[part] = loss
            return Commit(grant.lease, worker, (loss, 1.0))
        if serial != self.serial:
            return Commit(grant.lease, worker, (1.0,))
        ends = self.evaluation == 1
        self.serial, self.counted = self.serial + 1, {}
        self.evaluation = 0 if ends else self.evaluation + 1
        self.round += ends
        return Commit(grant.lease, worker, (float(not ends),))
