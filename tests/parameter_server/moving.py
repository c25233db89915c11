"""Workers that push leases, one that moves rows meanwhile, and servers: random histories, with deaths at any message.

Messages between a worker and a server arrive in the order in which they were sent; all else may happen in any order.
A row is the list of the leases that it was updated with.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from headrace.parameter_server.core.row_moves import Move, MovesState, Placed, RowMap, RowMoves, RowRange
from headrace.parameter_server.sparse.moves import from_json, to_json

ROWS, SERVERS = 12, 3
Ask = tuple[int, str, Any]
Program = Generator[list[Ask], list[Any], None]


def owner(map_: RowMap, row: int) -> int:
    for placed in map_.placed:
        if placed.rows.start <= row < placed.rows.stop:
            return placed.server
    return row * SERVERS // ROWS


@dataclass
class Node:
    """A server: its rows, and the leases that its shard's machine knows as done."""

    number: int
    moves: RowMoves
    rows: dict[int, list[int]] = field(default_factory=dict)
    apart: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)

    def handle(self, worker: int, kind: str, what: Any) -> Any:
        """Returns the answer."""
        try:
            return self.moved(worker, kind, what) if kind not in ("push", "rest") else self.pushed(kind, what)
        except ValueError:
            assert kind == "take"
            return "refused"

    def pushed(self, kind: str, what: Any) -> Any:
        lease, version, rows = what
        assert version <= self.moves.map.version
        later = self.moves.later_than(version) if kind == "push" else []
        own = [row for row in rows if owner(self.moves.map, row) == self.number]
        here = [row for row in own if not any(each.start <= row < each.stop for each in later)]
        for row in self.counted(kind, lease, version, here):
            self.rows.setdefault(row, []).append(lease)
        return [row for row in rows if row not in here], self.moves.map.changed_since(version)

    def moved(self, worker: int, kind: str, what: Any) -> Any:
        moves = self.moves
        if kind == "claim":
            return moves.claim(what, worker)
        if kind == "take":
            moving = moves.take(what, worker, self.done)
            left = [row for row in self.rows if any(each.start <= row < each.stop for each in what.rows)]
            rows = {row: self.rows.pop(row) for row in left}
            self.apart = {number: each for number, each in self.apart.items() if number in moves.aside}
            self.apart[what.number] = rows
            return moving, rows
        if kind == "kept":
            return (moves.gone[what], self.apart[what]) if what in moves.gone else None
        if kind == "install":
            before, number, moving, rows = what
            if moves.install(number, moving):
                self.apart[number] = {row: leases[:] for row, leases in rows.items()}
                if before is not None:
                    placed = tuple(Placed(each.rows, self.number, number) for each in moving.rows)
                    self.adopt(before, RowMap(number, tuple(sorted(placed, key=lambda each: each.rows))))
        elif kind == "map":
            return self.adopt(*what)
        elif kind == "ask":
            return moves.map.changed_since(what), moves.seen
        return "done"

    def adopt(self, base: int, changes: RowMap) -> list[int]:
        assert base <= self.moves.map.version
        came, missing = self.moves.adopt(changes, self.done)
        for number in came:
            self.rows.update(self.apart[number])
        return missing

    def counted(self, kind: str, lease: int, version: int, rows: list[int]) -> list[int]:
        def within(ranges: list[RowRange]) -> list[int]:
            return [row for row in rows if any(each.start <= row < each.stop for each in ranges)]

        if kind == "rest":
            named = [each.rows for each in self.moves.here if within([each.rows])]
            assert sorted(within(named)) == sorted(rows)
            return within(self.moves.rest(lease, named))
        was = lease in self.done
        self.done.add(lease)
        skipped, only = self.moves.push(lease, version, was, True)
        return [row for row in rows if row not in within(skipped)] if only is None else within(only)


class Moving:
    """A run of so many leases; `machine` makes the state machine of a server."""

    def __init__(
        self,
        seed: int,
        machine: Callable[[int], RowMoves] = RowMoves,
        leases: int = 30,
    ) -> None:
        self.chance = random.Random(seed)
        self._machine = machine
        self.nodes = [Node(number, machine(number)) for number in range(SERVERS)]
        self.touched = [sorted(self.chance.sample(range(ROWS), self.chance.randint(1, 6))) for _ in range(leases)]
        self.free = list(range(leases))
        self.committed: set[int] = set()
        self.deaths, self.moved, self.begun = self.chance.choice((0, 2, 12)), 0, 0
        self.failovers, self.failed_over = self.chance.choice((0, 0, 10)), 0
        self.workers: dict[int, _Worker] = {}
        for _ in range(self.chance.randint(1, 4)):
            self.workers[self.begun] = _Worker(self, self.begun)
            self.begun += 1

    def run(self) -> list[str]:
        """Runs to the end; returns what is wrong then."""
        for _ in range(20_000):
            if len(self.committed) == len(self.touched):
                return self.wrong()
            self.turn()
        return ["it does not end"]

    def turn(self) -> None:
        if self.deaths and self.chance.random() < 0.03:
            self.deaths -= 1
            self.chance.choice([each for each in self.workers.values() if not each.dead]).die()
            self.workers[self.begun] = _Worker(self, self.begun)
            self.begun += 1
        worker = self.workers[self.chance.choice(list(self.workers))]
        ready = [number for number, queue in worker.queues.items() if queue]
        if ready:
            number = self.chance.choice(ready)
            worker.deliver(self.nodes[number])
        elif worker.dead:
            del self.workers[worker.number]
        elif not worker.waits:
            worker.go([])

    def answered(self, worker: int, number: int, answer: Any) -> None:
        if worker in self.workers and not self.workers[worker].dead:
            self.workers[worker].take(number, answer)

    def fail_over(self, node: Node) -> None:
        """Lets a server's backup, which has handled the same messages, take its place: all workers connect anew."""
        state: MovesState = from_json(MovesState, to_json(node.moves.state()))
        node.moves = self._machine(node.number)
        node.moves.load(state)
        node.moves.mover = -1
        self.failed_over += 1

    def wrong(self) -> list[str]:
        map_ = max((node.moves.map for node in self.nodes), key=lambda each: each.version)
        found = []
        for row in range(ROWS):
            own = self.nodes[owner(map_, row)]
            # Its mover was lost before it could say so; what asks for the row next does.
            for number in own.adopt(0, map_) if map_.version > own.moves.map.version else ():
                (copy,) = [node.handle(-1, "kept", number) for node in self.nodes if number in node.moves.gone]
                own.handle(-1, "install", (None, number, *copy))
            assert own.adopt(0, map_) == []
            should = sorted(lease for lease, rows in enumerate(self.touched) if row in rows)
            if sorted(own.rows.get(row, [])) != should:
                found.append(f"row {row}: {sorted(own.rows.get(row, []))} for {should}")
        return found


class _Worker:
    """A worker: trains, and moves rows now and then."""

    def __init__(self, world: Moving, number: int) -> None:
        self.world, self.number, self.lease, self.dead = world, number, -1, False
        self.queues: dict[int, deque[tuple[str, Any]]] = {number: deque() for number in range(SERVERS)}
        self.waits: set[int] = set()
        self.answers: dict[int, Any] = {}
        self.asked: list[int] = []
        self.map = RowMap()
        self.program = self.work()

    def die(self) -> None:
        self.dead = True
        # It is given out again while messages of the lost worker are still on their way.
        self.world.free += [self.lease] if self.lease >= 0 else []
        for queue in self.queues.values():
            for _ in range(self.world.chance.randint(0, len(queue))):
                queue.pop()
            queue.append(("lost", None))

    def deliver(self, node: Node) -> None:
        kind, what = self.queues[node.number].popleft()
        if kind == "lost":
            if node.moves.mover == self.number:
                node.moves.mover = -1
            return
        chance = self.world.chance
        if self.world.failovers and chance.random() < 0.02:
            self.world.failovers -= 1
            # Before the message came, or when the answer was on its way.
            if chance.random() < 0.7:
                node.handle(self.number, kind, what)
            self.queues[node.number].appendleft((kind, what))
            self.world.fail_over(node)
            return
        self.world.answered(self.number, node.number, node.handle(self.number, kind, what))

    def take(self, number: int, answer: Any) -> None:
        self.waits.discard(number)
        self.answers[number] = answer
        if not self.waits:
            self.go([self.answers[each] for each in self.asked])

    def go(self, answers: list[Any]) -> None:
        try:
            asks = self.program.send(answers if self.asked else None)  # type: ignore[arg-type]
        except StopIteration:
            self.program, self.asked = self.work(), []
            return
        self.asked = [number for number, _, _ in asks]
        self.waits, self.answers = set(self.asked), {}
        for number, kind, what in asks:
            self.queues[number].append((kind, what))

    def work(self) -> Program:
        world = self.world
        if world.chance.random() < 0.3:
            yield from self.move()
        elif world.free:
            self.lease = world.free.pop(world.chance.randrange(len(world.free)))
            yield from self.push(self.lease)
            world.committed.add(self.lease)
            self.lease = -1

    def push(self, lease: int) -> Program:
        rows, version = self.world.touched[lease], self.map.version
        by_server = [[row for row in rows if owner(self.map, row) == number] for number in range(SERVERS)]
        answers = yield [(number, "push", (lease, version, own)) for number, own in enumerate(by_server)]
        while True:
            left = [row for rows, _ in answers for row in rows]
            newest = max((map_ for _, map_ in answers), key=lambda each: each.version)
            yield from self.adopt(newest)
            if not left:
                return
            asks = [(number, [row for row in left if owner(self.map, row) == number]) for number in range(SERVERS)]
            answers = yield [(number, "rest", (lease, self.map.version, own)) for number, own in asks if own]

    def adopt(self, changes: RowMap) -> Program:
        before = self.map.version
        if changes.version > before:
            self.map = self.map.updated(changes)
            told, servers = (before, self.map.changed_since(before)), list(range(SERVERS))
            while servers:
                missing = dict(zip(servers, (yield [(number, "map", told) for number in servers]), strict=True))
                for server, number in [(server, number) for server, own in missing.items() for number in own]:
                    copies = yield [(each, "kept", number) for each in range(SERVERS)]
                    for copy in [each for each in copies if each is not None][:1]:
                        yield [(server, "install", (None, number, *copy))]
                servers = [server for server, own in missing.items() if own]

    def gather(self) -> Generator[list[Ask], list[Any], int]:
        known = yield [(number, "ask", self.map.version) for number in range(SERVERS)]
        yield from self.adopt(max((changes for changes, _ in known), key=lambda each: each.version))
        return max(seen for _, seen in known)

    def move(self) -> Program:
        number = (yield from self.gather()) + 1
        claimed = yield [(server, "claim", number) for server in range(SERVERS)]
        if all(claimed):
            yield from self.gather()
            for more in range(self.world.chance.randint(1, 3)):
                if not (yield from self.moved(number + more)):
                    return

    def moved(self, own_number: int) -> Generator[list[Ask], list[Any], bool]:
        chance = self.world.chance
        source, target = chance.sample(range(SERVERS), 2)
        own = [row for row in range(ROWS) if owner(self.map, row) == source]
        if not own:
            return True
        chosen = sorted(chance.sample(own, chance.randint(1, min(4, len(own)))))
        rows = tuple(RowRange(0, row, row + 1) for row in chosen)
        if chosen == list(range(chosen[0], chosen[-1] + 1)):
            rows = (RowRange(0, chosen[0], chosen[-1] + 1),)
        move = Move(own_number, rows, source, target)
        (taken,) = yield [(source, "take", move)]
        if taken == "refused":
            return False
        yield [(target, "install", (self.map.version, move.number, *taken))]
        yield from self.adopt(RowMap().after(move))
        self.world.moved += 1
        return True
