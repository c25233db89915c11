"""Starts programs on simulated hosts, each with simulated devices; README.md has examples.

A host is a name and identities of devices, not a network: all are processes of this machine, and reach each other by
an address of it. What a loss of the network does is tested with scripts/hosts, see engine/networks.py.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.ranks import free_port
from simulated.library import COMPILER, library
from simulated.records import calls_of, counters_of
from warm.programs import PYTHON

COMPILES = bool(COMPILER)
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Ended:
    """What came of programs.

    Attributes:
        codes: their exit codes, by rank.
        said: what each printed as lines of JSON.
        errors: the end of what each wrote to stderr.
        counters: of each process, its workers too, by its id.
        calls: of the stand-in for NCCL, of each process, in their order.
    """

    codes: list[int]
    said: list[list[dict[str, Any]]]
    errors: list[str]
    counters: dict[int, dict[str, int]]
    calls: dict[int, list[dict[str, Any]]]


def on_hosts(
    program: str,
    folder: Path,
    hosts: int = 1,
    devices: int = 2,
    servers: int = 0,
    launched: bool = False,
    timeout_s: float = 280,
    **environment: str,
) -> Ended:
    """Runs a program of Python, once where there is one host, whose engine starts the workers; else a rank a device.

    Args:
        program: its text; `simulated.nccl` should be among its imports.
        servers: how many ranks more the last of several hosts has.
        launched: also on one host, a rank a device.
        folder: for its files, and the records of all processes.
        environment: more of it, such as SIMULATED_FAULTS.
    """
    told: Sequence[Mapping[str, str]] = [{}] if hosts == 1 and not launched else ranks(hosts, devices, servers)
    return started(program, folder, [{**one, **environment} for one in told], devices, timeout_s)


def started(
    program: str, folder: Path, told: Sequence[Mapping[str, str]], devices: int = 2, timeout_s: float = 280
) -> Ended:
    """Runs a program once for each of these environments, together, on hosts with so many devices."""
    # What it costs to compile is no part of the time that a program has.
    library()
    records = folder / "records"
    records.mkdir(exist_ok=True)
    began = [_begin(program, folder, records, devices, one) for one in told]
    deadline = time.monotonic() + timeout_s
    texts = []
    try:
        for process in began:
            try:
                texts.append(process.communicate(timeout=max(1.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                process.kill()
                texts.append(process.communicate())
    finally:
        # Also where the test itself is ended: what it leaves would fail the next one.
        for process in began[len(texts) :]:
            process.kill()
            process.communicate()
    said = [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in texts]
    codes = [process.returncode for process in began]
    return Ended(codes, said, [error[-6000:] for _, error in texts], counters_of(records), calls_of(records))


def own_address() -> str:
    """An address of this machine that is not its loopback, which headrace refuses among hosts; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        address: str = probe.getsockname()[0]
    return address


def ranks(hosts: int, devices: int, servers: int = 0) -> list[dict[str, str]]:
    """What a launcher says to each of its processes, of which each host has one a device."""
    everywhere = {
        "WORLD_SIZE": str(hosts * devices + servers),
        "MASTER_ADDR": own_address(),
        "MASTER_PORT": str(free_port()),
        "HEADRACE_SECRET": "0123456789abcdef0123456789abcdef",
    }
    sizes = [devices] * (hosts - 1) + [devices + servers]
    places = [(host, own) for host, size in enumerate(sizes) for own in range(size)]
    return [
        {
            **everywhere,
            "RANK": str(rank),
            "LOCAL_RANK": str(own),
            "LOCAL_WORLD_SIZE": str(sizes[host]),
            "HEADRACE_HOST": f"host-{host}",
        }
        for rank, (host, own) in enumerate(places)
    ]


def _begin(program: str, folder: Path, records: Path, devices: int, more: Mapping[str, str]) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests"), str(ROOT)])
    environment = {
        **os.environ, "PYTHONPATH": path, "FAKE_DEVICES": str(devices), "SIMULATED_RECORDS": str(records),
        "SIMULATED_NCCL": "1", **more
    }  # fmt: skip
    return subprocess.Popen(
        [PYTHON, "-c", program], cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
