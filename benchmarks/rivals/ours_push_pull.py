"""Pushes and pulls through headrace.parameter_server, to and from the worker's private memory; see `--help`."""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from headrace.parameter_server.client.client import Client, ServerConnection
from headrace.parameter_server.core.shard import Shard
from headrace.parameter_server.server.optimizer import ShardOptimizer
from headrace.parameter_server.server.server import Server
from headrace.parameter_server.wire import Kind, Message, ShardLayout, ShardSpec
from headrace.policies.staleness import EveryPush, Unbounded
from headrace.spec.model import ParameterSpec
from headrace.transport.local_client import LocalClientTransport
from headrace.transport.local_server import LocalServerTransport
from headrace.transport.remote_client import RemoteClientTransport
from headrace.transport.remote_server import RemoteServerTransport

RATE = 0.1
SECRET = b"both ends of a benchmark know it"
WARM_UP = 3


class Orphaned(Exception):
    """The process that started this one is gone."""


def form_of(elements: int, shard_bytes: int) -> ShardLayout:
    """Returns one parameter, cut into shards."""
    length = shard_bytes // 4
    return ShardLayout(
        [ShardSpec("weight", start, (min(length, elements - start),)) for start in range(0, elements, length)]
    )


def serve(
    form: ShardLayout,
    elements: int,
    workers: int,
    tcp: bool,
    door: int,
    factory: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, lr=RATE),  # noqa: B008 (a constant)
) -> None:
    """Opens a server's port, writes its address to `door`, and serves until the end or the parent's."""
    torch.set_num_threads(1)
    port = (
        RemoteServerTransport(form.slots, form.slots, secret=SECRET)
        if tcp
        else LocalServerTransport(form.slots, form.slots)
    )
    applier = ShardOptimizer(form, factory, [ParameterSpec("weight", (elements,))])
    server = Server(port, form, applier, [Shard(range(workers), Unbounded(), EveryPush()) for _ in form.pieces])
    parent = os.getppid()
    os.write(door, server.address.encode())
    os.close(door)
    server.serve(partial(_check, parent))
    server.close()


def _check(parent: int) -> None:
    if os.getppid() != parent:
        raise Orphaned


def spawn(run: Callable[[int], None]) -> tuple[int, int]:
    """Forks a process that runs `run(pipe)`; returns its number and the pipe's other end."""
    # As in headrace's own processes: what has been imported is never garbage.
    gc.freeze()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        run(writing)
        os._exit(0)
    os.close(writing)
    return child, reading


def join(address: str, form: ShardLayout, parameters: torch.Tensor, worker: int) -> ServerConnection:
    """Returns a worker's connection to the server of these parameters."""
    slots = form.slots
    link = (
        LocalClientTransport(address, slots, slots)
        if address.startswith("local:")
        else RemoteClientTransport(address, slots, slots, secret=SECRET)
    )
    return ServerConnection(link, form, cut(form, parameters))


def cut(form: ShardLayout, whole: torch.Tensor) -> list[torch.Tensor]:
    """Returns the shards of a parameter."""
    return [whole[piece.start : piece.start + piece.elements] for piece in form.pieces]


def measure(address: str, form: ShardLayout, elements: int, known: bool | None) -> float:
    """Returns the mean time of a push and pull, ms: gradient in private memory to parameters in private memory."""
    torch.set_num_threads(1)
    parameters, gradient = torch.ones(elements), torch.ones(elements)
    client = Client([join(address, form, parameters, 0)], 0)
    client.pull()
    gradients = [cut(form, gradient)]
    repeats, took = WARM_UP + (2000 if elements < 1_000_000 else 20), []
    for lease in range(repeats):
        began = time.perf_counter()
        client.push(gradients, lease, finite=known, pull=True)
        took.append(time.perf_counter() - began)
    # Servers begin with zeros.
    assert torch.allclose(parameters, torch.full_like(parameters, -RATE * repeats), rtol=1e-3), parameters[:3]
    client.ask(0, Message(Kind.END))
    client.close()
    return 1e3 * statistics.fmean(took[WARM_UP:])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("elements", type=int, help="of float32")
    parser.add_argument("--tcp", action="store_true", help="over TCP, encrypted and authenticated")
    parser.add_argument("--shard-bytes", type=int, default=4 << 20)
    parser.add_argument("--look", action="store_true", help="look first whether all of the gradient is finite")
    options = parser.parse_args()
    shards = form_of(options.elements, options.shard_bytes)
    pid, pipe = spawn(partial(serve, shards, options.elements, 1, options.tcp))
    print(measure(os.read(pipe, 1024).decode(), shards, options.elements, None if options.look else True))
    os.waitpid(pid, 0)
