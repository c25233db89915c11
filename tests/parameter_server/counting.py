"""The counting oracle: servers and workers as processes, faults of every kind, and a parameter that is the count.

With SGD, a learning rate of 1, and a coordinate of its own for every push of a round, a server's parameter says how
often each push was applied. After every round all workers meet, and every coordinate of every server must be the number
of the rounds: one less is a push that was lost, one more is one that was applied twice.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from time import monotonic, sleep

import numpy as np
import torch

from headrace.engine.local.fork_server import ForkServer
from headrace.errors import Replaced
from headrace.parameter_server.client.client import Client
from headrace.parameter_server.client.session import ServerConnection
from headrace.parameter_server.wire import Kind, Message, ShardLayout, ShardSpec
from transport.faulty import Odds
from transport.ways import open_link

FAULTS = [f"{way} {field.name}" for way in ("request", "reply") for field in fields(Odds)]
SCRIPT = Path(__file__).with_name("counting_script.py")
DEADLINE_S = 120.0
"""So long a round may take."""


@dataclass(frozen=True)
class World:
    """What happens in it.

    Attributes:
        folder: of its own.
        way: "local" or "remote".
        workers, servers: how many.
        width: pushes of a round.
        rounds: how many.
        odds: of all links, both ways.
        kills: workers that are killed and replaced, spread over the rounds.
        freezes: workers that are stopped and replaced, and wake up later.
        seed: of everything random.
        bug: of the servers, to see whether it is found; see `counting_script.Broken`.
    """

    folder: Path
    way: str = "local"
    workers: int = 3
    servers: int = 2
    width: int = 250
    rounds: int = 4
    odds: Odds = field(default_factory=Odds)
    kills: int = 0
    freezes: int = 0
    seed: int = 0
    bug: str = ""

    @property
    def seats(self) -> int:
        """Processes of workers that there will ever be."""
        return self.workers + self.kills + self.freezes


@dataclass
class Count:
    """What came of it.

    Attributes:
        pushes: acknowledged, each by all servers.
        lost, doubled: of them, on any server.
        faults: by kind.
        seconds: that it took.
    """

    pushes: int = 0
    lost: int = 0
    doubled: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


def layout_of(width: int) -> ShardLayout:
    """Returns what every server holds."""
    return ShardLayout([ShardSpec("count", 0, (width,))])


def address_file(folder: Path, server: int) -> Path:
    """Returns where a server's address is written."""
    return folder / f"server-{server}.address"


class Board:
    """What all processes see: a file of whole numbers, with a seat for every worker's process that there will ever be.

    Attributes:
        ended: whether all is over, `(1,)`.
        go: rounds that may be worked on, `(1,)`.
        met: at which fence each process waits, `(seats,)`.
        pids: of the processes, `(seats,)`.
        faults: by process and kind, `(seats, len(FAULTS))`.
    """

    def __init__(self, folder: Path, seats: int) -> None:
        path, count = folder / "board", 2 + seats * (2 + len(FAULTS))
        if not path.exists():
            path.write_bytes(bytes(8 * count))
        words = np.memmap(path, dtype=np.int64, mode="r+", shape=(count,))
        self.ended, self.go = words[0:1], words[1:2]
        self.met, self.pids = words[2 : 2 + seats], words[2 + seats : 2 + 2 * seats]
        self.faults = words[2 + 2 * seats :].reshape(seats, len(FAULTS))


def count(world: World) -> Count:
    """Lives through a world.

    Raises:
        AssertionError: something stood still, or a process failed.
    """
    with ExitStack() as closing:
        return _Counting(world, closing).run()


class _Counting:
    def __init__(self, world: World, closing: ExitStack) -> None:
        self.world, self.closing = world, closing
        self.board = Board(world.folder, world.seats)
        self.board.go[0] = 1
        self.chance = random.Random(world.seed)
        self.fork_server = ForkServer()
        closing.callback(self.fork_server.close)
        self.lifeline, held = os.pipe()
        closing.callback(os.close, self.lifeline)
        closing.callback(os.close, held)
        self.incarnations = [0] * world.workers
        self.seats = list(range(world.workers))
        self.free = world.workers
        self.codes: dict[int, int] = {}
        self.stopped: list[int] = []
        self.result = Count()

    def run(self) -> Count:
        world, servers = self.world, range(self.world.servers)
        for server in servers:
            self._spawn("server", server, 0, world.seats + server)
        self._until(lambda: all(address_file(world.folder, server).exists() for server in servers))
        for worker in range(world.workers):
            self._spawn("worker", worker, 0, worker)
        layout, copies = layout_of(world.width), [torch.zeros(world.width) for _ in servers]
        addresses = [address_file(world.folder, server).read_text() for server in servers]
        links = [open_link(world.way, address, layout.slots, layout.push_slots) for address in addresses]
        connections = [ServerConnection(link, layout, [copy]) for link, copy in zip(links, copies, strict=True)]
        client = Client(connections, worker=-1, observes=True)
        self.closing.callback(client.close)
        deeds = [self._kill] * world.kills + [self._freeze] * world.freezes
        self.chance.shuffle(deeds)
        began = monotonic()
        for round_ in range(1, world.rounds + 1):
            for deed in deeds[len(deeds) * (round_ - 1) // world.rounds : len(deeds) * round_ // world.rounds]:
                sleep(self.chance.random() * 0.1)
                deed()
            # All are told at once, when everything is acknowledged; a worker that comes later waits outside.
            self._until(lambda round_=round_: bool((self.board.met >= round_).any()))
            client.pull()
            self._look(copies, round_)
            for server in servers:
                client.ask(server, Message(Kind.SETTLE, lease=round_))
            client.ask(0, Message(Kind.ADVANCE, lease=round_, numbers=(round_ + 1, 0, round_, round_ + 1, 1)))
            self._wake()
            self.board.go[0] = round_ + 1
        self.result.seconds = monotonic() - began
        self.board.ended[0] = 1
        self.board.go[0] = world.rounds + 2
        self._until(lambda: len(self.codes) == self.free)
        for server in servers:
            client.ask(server, Message(Kind.END))
        self._until(lambda: len(self.codes) == self.free + world.servers)
        self._add_up()
        return self.result

    def _look(self, copies: list[torch.Tensor], round_: int) -> None:
        """Holds the servers' counts against the number of rounds."""
        self.result.pushes += self.world.width
        counts = torch.stack(copies)
        self.result.lost += int((round_ - counts).clamp(min=0).amax(0).sum())
        self.result.doubled += int((counts - round_).clamp(min=0).amax(0).sum())

    def _add_up(self) -> None:
        for name, times in zip(FAULTS, self.board.faults.sum(0), strict=True):
            self.result.faults[name] += int(times)
        workers = {code for seat, code in self.codes.items() if seat < self.world.seats}
        assert workers <= {0, -signal.SIGKILL, Replaced.exit_code}, self._words()

    def _kill(self) -> None:
        worker, seat = self._choose()
        os.kill(int(self.board.pids[seat]), signal.SIGKILL)
        self.result.faults["killed"] += 1
        self._replace(worker)

    def _freeze(self) -> None:
        worker, seat = self._choose()
        os.kill(int(self.board.pids[seat]), signal.SIGSTOP)
        self.stopped.append(seat)
        self.result.faults["frozen"] += 1
        self._replace(worker)

    def _choose(self) -> tuple[int, int]:
        worker = self.chance.randrange(self.world.workers)
        seat = self.seats[worker]
        self._until(lambda: bool(self.board.pids[seat]))
        return worker, seat

    def _replace(self, worker: int) -> None:
        self.incarnations[worker] += 1
        self.seats[worker] = self.free
        self.free += 1
        self._spawn("worker", worker, self.incarnations[worker], self.seats[worker])

    def _wake(self) -> None:
        while self.stopped:
            os.kill(int(self.board.pids[self.stopped.pop()]), signal.SIGCONT)

    def _spawn(self, role: str, number: int, incarnation: int, seat: int) -> None:
        world = json.dumps(asdict(self.world) | {"folder": str(self.world.folder), "seats": self.world.seats})
        order = {
            "script": str(SCRIPT),
            "arguments": [role, str(number), str(incarnation), str(seat), world],
            "environment": {},
            "threads": 1,
            "directory": str(self.world.folder),
            "path": [str(SCRIPT.parents[1]), *sys.path],
            "log": str(self._log(seat)),
        }
        self.fork_server.spawn(seat, order, [self.lifeline])

    def _until(self, happened: Callable[[], bool]) -> None:
        deadline = monotonic() + DEADLINE_S
        while not happened():
            self.codes.update(self.fork_server.ended(0.002))
            failed = [seat for seat, code in self.codes.items() if code not in (0, -signal.SIGKILL, Replaced.exit_code)]
            assert not failed, self._words()
            assert monotonic() < deadline, f"nothing happens: {self.board.met} of {self.board.go}; {self._words()}"

    def _log(self, seat: int) -> Path:
        return self.world.folder / f"{seat}.log"

    def _words(self) -> str:
        return "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in self.world.folder.glob("*.log"))
