"""A server of a fleet, as a process: hears views, says where it is and whether its backup is ready.

Arguments: the launcher's address, this process's number, the way of its bytes, how many leases there are.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
from functools import partial

import torch

from headrace.parameter_server.core.shard import Shard
from headrace.parameter_server.replication.machine import View
from headrace.parameter_server.replication.transport import ReplicatedTransport
from headrace.parameter_server.server.optimizer import ShardOptimizer
from headrace.parameter_server.server.server import Server
from headrace.policies.staleness import EveryPush, Unbounded
from headrace.spec.model import ParameterSpec
from parameter_server.fleet_form import fleet_form
from transport.ways import open_link, open_port


def main() -> None:
    launcher, number, way, leases = sys.argv[1:]
    layout = fleet_form(int(leases))
    slots = (layout.slots, layout.push_slots, layout.reply_slots)

    def connect(address: str) -> object:
        return open_link(way, address, layout.slots, type(layout.slots)(()), layout.reply_slots)

    replicated = ReplicatedTransport(
        open_port(way, *slots), layout.push_slots, layout.reply_slots, int(number), connect
    )  # type: ignore[arg-type]
    specs = [ParameterSpec(piece.parameter, piece.shape) for piece in layout.pieces]
    applier = ShardOptimizer(layout, partial(torch.optim.SGD, lr=1.0), specs)
    machines = [Shard(range(1), Unbounded(), EveryPush()) for _ in range(len(layout))]
    server = Server(replicated.transport, layout, applier, machines, replicated=replicated)
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.connect("\0" + launcher)
    line.send(json.dumps({"up": int(number), "pid": os.getpid(), "address": server.address}).encode())
    told = 0

    def check() -> None:
        nonlocal told
        while select.select([line], [], [], 0)[0]:
            message = line.recv(65536)
            if not message:
                raise SystemExit
            view = json.loads(message)
            replicated.view(View(*view["view"]), view["address"])
        if replicated.ready > told:
            told = replicated.ready
            line.send(json.dumps({"ready": told}).encode())

    server.serve(check)
    server.close()


main()
