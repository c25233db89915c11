"""Pushes of many workers to several servers at once: `ours_pushes.py WORKERS SERVERS BYTES`; prints pushes/s in all.

Every push reaches every server, which holds its part of the `BYTES`, and is over when all of them have applied it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from functools import partial

import torch
from ours_push_pull import RATE, form_of, join, serve, spawn

from headrace.parameter_server.client.client import Client
from headrace.parameter_server.wire import Kind, Message, ShardLayout

SECONDS = 3.0


def work(worker: int, addresses: Sequence[str], form: ShardLayout, elements: int, start: float, pipe: int) -> None:
    """Pushes from `start` on; writes how many pushes were over before the time was."""
    torch.set_num_threads(1)
    gradient = torch.ones(elements)
    client = Client([join(address, form, torch.zeros(elements), worker) for address in addresses], worker)
    client.pull()
    gradients = [[gradient]] * len(addresses)
    while time.monotonic() < start:
        time.sleep(0.001)
    lease = worker << 32
    while time.monotonic() < start + SECONDS:
        refused = client.push(gradients, lease)
        assert refused is None, refused
        lease += 1
    os.write(pipe, str(lease - (worker << 32)).encode())
    os.close(pipe)
    client.close()


def check(addresses: Sequence[str], form: ShardLayout, elements: int, worker: int, pushes: int) -> None:
    """Looks whether every push was applied everywhere, and ends the servers."""
    parameters = [torch.zeros(elements) for _ in addresses]
    client = Client(
        [join(address, form, own, worker) for address, own in zip(addresses, parameters, strict=True)], worker
    )
    client.pull()
    for index, own in enumerate(parameters):
        assert torch.allclose(own, torch.full_like(own, -RATE * pushes), rtol=1e-2), (own[0], pushes)
        client.ask(index, Message(Kind.END))
    client.close()


if __name__ == "__main__":
    workers, servers, nbytes = map(int, sys.argv[1:])
    count = nbytes // 4 // servers
    shards = form_of(count, nbytes)
    doors = [spawn(partial(serve, shards, count, workers, False)) for _ in range(servers)]
    where = [os.read(pipe, 1024).decode() for _, pipe in doors]
    begin = time.monotonic() + 2.0
    working = [spawn(partial(work, worker, where, shards, count, begin)) for worker in range(workers)]
    done = 0
    for _, pipe in working:
        done += int(os.read(pipe, 1024))
    check(where, shards, count, workers, done)
    for pid, _ in doors + working:
        os.waitpid(pid, 0)
    print(done / SECONDS)
