"""Runs one process on each of several hosts of `scripts/hosts`, as a launcher would."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HOSTS = Path(__file__).parents[1] / "scripts" / "hosts"
MASTER = {"MASTER_ADDR": "10.97.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0"}


def hosts(*arguments: str) -> None:
    """Makes or removes the hosts."""
    subprocess.run([HOSTS, *arguments], check=True)


def run(
    script: Path,
    count: int,
    *arguments: str,
    on: Sequence[int] | None = None,
    lost: Sequence[int] = (),
    python: str = sys.executable,
) -> list[dict[str, float]]:
    """Runs a script on hosts, each on a core of its own as far as there are; returns what every rank says.

    Args:
        script: its last argument is a folder, to which rank r writes `r.json`.
        count: of ranks.
        arguments: of the script, before the folder.
        on: the host of each rank; None for one on each.
        lost: ranks that say nothing, and end as they like.
        python: the interpreter.
    """
    told = {**os.environ, **MASTER, "HEADRACE_SECRET": secrets.token_hex(32), "WORLD_SIZE": str(count)}
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(count):
            environment = {**told, "RANK": str(rank)}
            command = [
                str(HOSTS),
                "exec",
                str(on[rank] if on else rank),
                "taskset",
                "--cpu-list",
                str(cores[rank % len(cores)]),
            ]
            command += [python, str(script), *arguments, folder]
            ranks.append(subprocess.Popen(command, env=environment))
        if codes := [process.wait() for rank, process in enumerate(ranks) if process.wait() and rank not in lost]:
            raise RuntimeError(f"{' '.join([script.name, *arguments])} failed with {codes}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(count) if rank not in lost]
