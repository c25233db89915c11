"""Processes as a launcher starts them, forked from one that has imported torch."""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from headrace.engine.local.fork_server import ForkServer
from headrace.errors import HeadraceError

TESTS = Path(__file__).resolve().parent.parent

Said = list[dict[str, Any]]


def until(condition: Callable[[], bool], within_s: float) -> bool:
    """Waits for a condition; returns whether it came true in time."""
    deadline = time.monotonic() + within_s
    while not (reached := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return reached


@dataclass(frozen=True)
class Ended:
    """What came of the ranks: exit codes of those that ended by themselves, what each said, what its log holds."""

    codes: dict[int, int]
    said: list[Said]
    logs: list[str]

    def one(self, rank: int, key: str) -> dict[str, Any]:
        (found,) = [line for line in self.said[rank] if key in line]
        return found


def say(**facts: object) -> None:
    """Prints facts as one of them, for `Ended.said`."""
    print(json.dumps({"at": time.monotonic(), **facts}))  # noqa: T201


@contextmanager
def errors_said() -> Iterator[None]:
    """Says an error of headrace, too."""
    try:
        yield
    except HeadraceError as error:
        say(error=type(error).__name__, message=str(error))
        raise


def total(model: nn.Module) -> float:
    """The sum of all its numbers."""
    return float(sum(tensor.double().sum() for tensor in model.state_dict().values()))


def free_port() -> int:
    """A free port, outside the range from which the system assigns ports."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.sample(range(first // 2, first), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"none of a hundred ports below {first} is free")


def launcher(world: int, address: str) -> list[dict[str, str]]:
    """What a launcher says to each of its processes, in the environment."""
    said = {"WORLD_SIZE": str(world), "MASTER_ADDR": address, "MASTER_PORT": str(free_port())}
    return [{"RANK": str(rank), **said} for rank in range(world)]


def run_ranks(
    fork_server: ForkServer,
    folder: Path,
    script: Path,
    arguments: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    awaited: int,
) -> Ended:
    """Runs a rank of the script for each environment, of which `awaited` must end by themselves."""
    held, lifeline = os.pipe()
    logs = [folder / f"{rank}.log" for rank in range(len(environments))]
    codes: dict[int, int] = {}
    try:
        for rank, environment in enumerate(environments):
            order = {
                "script": str(script),
                "arguments": arguments,
                "environment": environment,
                "threads": 1,
                "directory": str(folder),
                "path": [str(TESTS), *sys.path],
                "log": str(logs[rank]),
            }
            fork_server.spawn(rank, order, [held])
        deadline = time.monotonic() + 120
        while len(codes) < awaited and time.monotonic() < deadline:
            codes.update(fork_server.ended(0.1))
        ended = dict(codes)
        fork_server.kill([rank for rank in range(len(logs)) if rank not in codes])
        while len(codes) < len(logs):
            codes.update(fork_server.ended(0.1))
    finally:
        os.close(held)
        os.close(lifeline)
    texts = [log.read_text() for log in logs]
    said = [[json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in texts]
    assert len(ended) == awaited, texts
    return Ended(ended, said, texts)
