"""What a server needs besides parameters and optimizer state, as the kernel counts it. See README.md."""

from __future__ import annotations

import argparse
import ctypes
import functools
import os
import re
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "rivals"))
import torch
from harness import alternate, report
from ours_push_pull import cut, form_of, join, serve, spawn

from headrace.parameter_server.client.client import Client
from headrace.parameter_server.wire import Kind, Message, ShardLayout

MODEL_BYTES = 100 << 20
SHARD_BYTES = {False: 4 << 20, True: 1 << 20}
"""What is the default, without and with TCP."""
PUSHES = 20
LOOK_S = 0.02
OPTIMIZERS = {
    "SGD": (functools.partial(torch.optim.SGD, lr=0.1), 0),
    "SGD with momentum": (functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9), 1),
    "Adam": (functools.partial(torch.optim.Adam, lr=0.1), 2),
}
"""And how many times the parameters their state is."""


def held(process: int) -> int:
    """Returns the bytes of a process's own memory: its segment of parameters, and whatever is no file's."""
    total, field = 0, ""
    os.kill(process, signal.SIGSTOP)  # or mappings come and go while they are read
    try:
        lines = Path(f"/proc/{process}/smaps").read_text().splitlines()
    finally:
        os.kill(process, signal.SIGCONT)
    for line in lines:
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            # What links push lies in segments of theirs.
            field = "Rss:" if "headrace-parameters" in line else "Anonymous:"
        elif line.startswith(field):
            total += 1024 * int(line.split()[1])
    return total


def warm_up(factory: Callable[..., torch.optim.Optimizer]) -> None:
    """Loads what torch loads when it is used first."""
    weight = torch.nn.Parameter(torch.ones(1 << 10))
    weight.grad = torch.ones_like(weight)
    factory([weight]).step()


def run(
    form: ShardLayout, elements: int, factory: Callable[..., torch.optim.Optimizer], workers: int, tcp: bool
) -> int:
    """Returns the most bytes that a server has taken in the time of some pushes."""
    torch.set_num_threads(1)
    begin, started = os.pipe()
    going, go = os.pipe()

    def server(door: int) -> None:
        warm_up(factory)
        ctypes.CDLL(None).malloc_trim(0)
        os.write(started, b".")
        os.read(going, 1)
        serve(form, elements, workers, tcp, door, factory)

    def worker(number: int, address: str, pipe: int) -> None:
        parameters, gradient = torch.zeros(elements), torch.ones(elements)
        client = Client([join(address, form, parameters, number)], number)
        client.pull()
        for push in range(PUSHES):
            client.push([cut(form, gradient)], number * PUSHES + push, pull=True)
        os.write(pipe, b".")
        os.close(pipe)
        client.close()

    process, door = spawn(server)
    os.read(begin, 1)
    before = held(process)
    os.write(go, b".")
    address = os.read(door, 1024).decode()
    pipes = [spawn(functools.partial(worker, number, address))[1] for number in range(workers)]
    most = 0
    while pipes:
        over, _, _ = select.select(pipes, (), (), LOOK_S)
        pipes = [pipe for pipe in pipes if pipe not in over]
        most = max(most, held(process))
    last = Client([join(address, form, torch.zeros(elements), workers)], workers)
    last.ask(0, Message(Kind.END))
    last.close()
    os.waitpid(process, 0)
    return most - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    elements = MODEL_BYTES // 4

    def extra(name: str, workers: int, tcp: bool) -> float:
        factory, states = OPTIMIZERS[name]
        form = form_of(elements, SHARD_BYTES[tcp])
        return (run(form, elements, factory, workers, tcp) - (1 + states) * MODEL_BYTES) / 1e6

    cases = [(name, 1, False) for name in OPTIMIZERS] + [("Adam", 4, False), ("Adam", 1, True), ("Adam", 4, True)]
    contestants = {
        f"{name}, {workers} worker{'s' * (workers > 1)}{', TCP' * tcp}": functools.partial(extra, name, workers, tcp)
        for name, workers, tcp in cases
    }
    report(Path(__file__).parent, "server-memory", "MB", alternate(contestants, arguments.rounds), {})


if __name__ == "__main__":
    main()
