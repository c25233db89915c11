"""A plain script in several processes: what `headrace launch` does."""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from headrace.engine.local.fork_server import ForkServer
from headrace.engine.local.process import log_path
from headrace.errors import PeerLost
from headrace.machine import cores, host_name
from headrace.policies.roles import threads_per_worker

_LOOK_EVERY_S = 0.05
_GRACE_S = 2.0


def launch_script(path: Path, arguments: Sequence[str], workers: int) -> int:
    """Runs a script in `workers` processes, as torchrun would; returns the exit code of the first that failed.

    Rank 0's output goes on as it comes; the others' is kept and shown where they fail.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        fork_server = ForkServer()
        held, lifeline = os.pipe()
        try:
            return _run(fork_server, path, arguments, workers, Path(folder), held)
        finally:
            fork_server.close()
            os.close(held)
            os.close(lifeline)


def _run(fork_server: ForkServer, path: Path, arguments: Sequence[str], workers: int, folder: Path, held: int) -> int:
    logs = [log_path(folder, rank) for rank in range(workers)]
    logs[0].parent.mkdir()
    for log in logs:
        log.touch()
    port = _free_port()
    for rank in range(workers):
        order = {
            "script": str(path.absolute()),
            "arguments": list(arguments),
            "environment": _environment(rank, workers, port),
            "threads": threads_per_worker(cores(), workers),
            "directory": os.getcwd(),
            "path": [str(path.absolute().parent), *sys.path],
            "log": str(logs[rank]),
        }
        fork_server.spawn(rank, order, [held])
    running = set(range(workers))
    codes: dict[int, int] = {}
    deadline = math.inf
    with logs[0].open(encoding="utf-8", errors="replace") as output:
        while running and monotonic() < deadline:
            for rank, code in fork_server.ended(_LOOK_EVERY_S):
                running.discard(rank)
                codes[rank] = code
                if code != 0:
                    # The others get the time to find out and end by themselves.
                    deadline = min(deadline, monotonic() + _GRACE_S)
            sys.stdout.write(output.read())
            sys.stdout.flush()
    fork_server.kill(sorted(running))
    return _conclude(codes, logs)


def _conclude(codes: dict[int, int], logs: Sequence[Path]) -> int:
    failed = [rank for rank, code in codes.items() if code != 0]
    if not failed:
        return 0
    # Who was lost to another has an exit code of its own; it is the other that explains.
    first = next((rank for rank in failed if codes[rank] != PeerLost.exit_code), failed[0])
    text = logs[first].read_text(encoding="utf-8", errors="replace")
    if first != 0:
        sys.stderr.write(text)
    code = codes[first]
    if code < 0:
        sys.stderr.write(f"rank {first} on {host_name()} was lost: killed by {signal.Signals(-code).name}\n")
        return PeerLost.exit_code
    return code


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _environment(rank: int, workers: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
