"""Runs one process on each of several hosts of `scripts/hosts`, as a launcher would."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

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


def run_forked(
    act: Callable[[int, Path], dict[str, float]], on: Sequence[int], lost: Sequence[int] = ()
) -> dict[str, float]:
    """Runs `act(rank, folder)` in forks of this process, which must have no threads; returns what rank 0 says.

    They need not import anything, so that many runs take less time than with `run`. Arguments are those of `run`.
    """
    return run_all_forked(act, on, lost)[0]


def run_all_forked(
    act: Callable[[int, Path], dict[str, Any]], on: Sequence[int], lost: Sequence[int] = ()
) -> list[dict[str, Any]]:
    """Does the same; returns what every rank says that is not lost."""
    told = {**MASTER, "HEADRACE_SECRET": secrets.token_hex(32), "WORLD_SIZE": str(len(on))}
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank, host in enumerate(on):
            process = os.fork()
            if process == 0:
                os.environ.update(told, RANK=str(rank), HEADRACE_HOST=f"host-{host}")
                _be_rank(act, rank, host, Path(folder))
            ranks.append(process)
        codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in ranks]
        if any(code for rank, code in enumerate(codes) if rank not in lost):
            raise RuntimeError(f"the ranks ended with {codes}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(len(on)) if rank not in lost]


def enter(host: int) -> None:
    """Brings this thread, and those that it starts, to a host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{os.environ.get('HEADRACE_HOSTS', 'headrace')}-{host}") as namespace:
        if libc.setns(namespace.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")


def _be_rank(act: Callable[[int, Path], dict[str, Any]], rank: int, host: int, folder: Path) -> NoReturn:
    code = 1
    try:
        enter(host)
        (folder / f"{rank}.json").write_text(json.dumps(act(rank, folder)))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        # Not what this process has opened before.
        os._exit(code)
