"""A server or a worker of `ps.counting`, as a process of its own:
`counting_script.py ROLE NUMBER INCARNATION SEAT WORLD`.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import torch
from torch import Tensor

from headrace.errors import Replaced
from headrace.parameter_server.client.client import Client
from headrace.parameter_server.client.session import ServerConnection
from headrace.parameter_server.core.events import Action, ApplyStep, Event, Push, Reason
from headrace.parameter_server.core.leases import LeaseTable
from headrace.parameter_server.core.shard import Shard
from headrace.parameter_server.server.optimizer import ShardOptimizer
from headrace.parameter_server.server.server import Server
from headrace.parameter_server.wire import Kind, Message
from headrace.policies.staleness import EveryPush, Unbounded
from headrace.spec.model import ParameterSpec
from headrace.transport.base import ClientTransport
from parameter_server.counting import FAULTS, Board, address_file, layout_of
from transport.faulty import Faults, FaultyLink, Odds
from transport.ways import open_link, open_port


class Orphaned(Exception):
    """The process that has started this one has ended."""


def stay_with(parent: int) -> None:
    if os.getppid() != parent:
        raise Orphaned


class Broken:
    """A shard with a bug.

    Args:
        machine: a sound one.
        bug: "forgets" what it has applied, or "loses" a gradient now and then.
    """

    def __init__(self, machine: Shard, bug: str) -> None:
        self._machine, self._bug = machine, bug

    @property
    def version(self) -> int:
        return self._machine.version

    def handle(self, event: Event) -> list[Action]:
        if self._bug == "forgets":
            self._machine._done.clear()
            self._machine._last.clear()
        actions = self._machine.handle(event)
        if self._bug == "loses" and isinstance(event, Push) and event.lease % 100 == 7:
            actions = [action for action in actions if not isinstance(action, ApplyStep)]
        return actions


def serve(number: int, folder: Path, way: str, width: int, workers: int, bug: str) -> None:
    layout = layout_of(width)
    applier = ShardOptimizer(layout, partial(torch.optim.SGD, lr=1.0), [ParameterSpec("count", (width,))])
    machine = Shard(range(workers), Unbounded(), EveryPush())
    machines: list[Any] = [Broken(machine, bug) if bug else machine]
    coordinates = (LeaseTable(width, 1), 0, 1, 1) if number == 0 else None
    server = Server(
        open_port(way, layout.slots, layout.push_slots), layout, applier, machines, coordinates, grace_s=0.5
    )
    part = address_file(folder, number).with_suffix(".part")
    part.write_text(server.address)
    part.rename(address_file(folder, number))
    server.serve(partial(stay_with, os.getppid()))
    server.close()


def written(place: Tensor | None, coordinate: int, width: int) -> Tensor:
    """Returns the gradient that makes a coordinate one more; in its push slot, if there is a place."""
    gradient = torch.empty(width) if place is None else place
    gradient.zero_()
    gradient[coordinate] = -1.0
    return gradient


def work(board: Board, seat: int, client: Client, world: dict[str, Any], faults: Faults) -> None:
    """Counts every portion that it gets, until there are no more."""
    lease = -1
    while True:
        client.servers[0].tell(Message(Kind.ASK, lease=lease))
        answer = client.lease()
        if answer.kind == Kind.SYNC_POINT:
            lease, fence = -1, answer.numbers[4]
            board.met[seat] = fence
            while board.go[0] <= fence:
                sleep(0.001)
            if board.ended[0]:
                return
            continue
        lease = answer.lease
        places = [server.session.push_place(range(1)) for server in client.servers]
        gradients = [[written(place, answer.numbers[5], world["width"])] for place in places]
        said = client.push(gradients, lease)
        assert said in (None, Reason.DUPLICATE), said
        board.faults[seat] = [faults.happened[name] for name in FAULTS]


def main() -> None:
    torch.set_num_threads(1)
    role, number, incarnation, seat = sys.argv[1], *map(int, sys.argv[2:5])
    world = json.loads(sys.argv[5])
    folder, way, width = Path(world["folder"]), world["way"], world["width"]
    if role == "server":
        serve(number, folder, way, width, world["workers"], world["bug"])
        return
    layout, board, odds = layout_of(width), Board(folder, world["seats"]), Odds(**world["odds"])
    board.pids[seat] = os.getpid()
    faults = Faults(1000 * world["seed"] + seat, odds, odds)

    def reach(server: int) -> ClientTransport:
        # Read anew each time: another server may go on in the place of the first.
        address = address_file(folder, server).read_text()
        return FaultyLink(open_link(way, address, layout.slots, layout.push_slots), faults)

    check = partial(stay_with, os.getppid())
    try:
        connections = [
            ServerConnection(
                reach(server), layout, [torch.zeros(width)], server, "here", partial(reach, server), 20.0, 0.1
            )
            for server in range(world["servers"])
        ]
        client = Client(connections, number, incarnation, check)
        work(board, seat, client, world, faults)
        client.close()
    except Replaced as error:
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
