"""A job on several hosts, which are network namespaces: python tests/storm/hosts.py STRATEGY RUN_DIR; as root."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from storm.clock import HOST

__all__ = ["HOSTS", "STILL", "cut", "mend", "several_hosts"]

HOSTS = 3
NETWORK = os.environ.get("HEADRACE_HOSTS", "storm")
"""Another name for each of several storms side by side."""

NOWHERE = "02:00:00:00:00:ff"
"""The address of no network card: packets to it are lost."""

STILL = "storm: a rank stands still"
ENDS_WITHIN_S = 25.0
"""After the first rank has ended: the timeout, and what a busy machine needs more."""

FROZEN_S = 3.0
"""Longer than a pause: of those that are stopped for so long none goes on."""

POLL_S = 0.02
DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG."""

SCRIPT = Path(__file__).parents[2] / "scripts" / "hosts"


@contextmanager
def several_hosts() -> Iterator[None]:
    """Makes hosts, and removes them."""
    told = {**os.environ, "HEADRACE_HOSTS": NETWORK}
    subprocess.run([SCRIPT, "up", str(HOSTS)], check=True, env=told)
    try:
        yield
    finally:
        subprocess.run([SCRIPT, "down"], check=True, env=told)


def cut(source: int, target: int, both: bool) -> None:
    """Loses every packet from one host to another from now on, and if `both` is set those in the other direction."""
    for here, there in ((source, target), (target, source))[: 1 + both]:
        command = ["ip", "-n", f"{NETWORK}-{here}", "neigh", "replace", _address(there), "lladdr", NOWHERE]
        subprocess.run([*command, "dev", "eth0", "nud", "permanent"], check=True)


def mend() -> None:
    """Lets all packets through again."""
    for here in range(HOSTS):
        for there in range(HOSTS):
            command = ["ip", "-n", f"{NETWORK}-{here}", "neigh", "del", _address(there), "dev", "eth0"]
            # Where nothing was cut there is nothing to delete.
            subprocess.run(command, check=False, capture_output=True)


def _address(host: int) -> str:
    return f"10.97.0.{host + 1}"


def main(strategy: str, run_dir: str) -> int:
    """Runs a rank on each host; returns 0 if a rank has come to the end of the run."""
    libc = ctypes.CDLL(None)
    told = {"MASTER_ADDR": _address(0), "MASTER_PORT": "29500", "WORLD_SIZE": str(HOSTS), "HEADRACE_SECRET": "5a" * 32}
    ranks = []
    for rank in range(HOSTS):
        own = {**os.environ, **told, "RANK": str(rank), "HEADRACE_HOST": f"host-{rank}", HOST: str(rank)}
        command = ["ip", "netns", "exec", f"{NETWORK}-{rank}", sys.executable, str(Path(__file__).with_name("jobs.py"))]
        # No rank outlives this process, whatever ends it.
        ranks.append(
            subprocess.Popen(
                [*command, strategy, run_dir], env=own, preexec_fn=lambda: libc.prctl(DEATH_SIGNAL, signal.SIGKILL)
            )
        )
    _await(ranks)
    codes = [rank.wait() for rank in ranks]
    return 0 if 0 in codes else max(codes, default=1) if max(codes) > 0 else 1


def _await(ranks: list[subprocess.Popen[bytes]]) -> None:
    """Waits for all; a rank that was frozen from outside is killed, one that waits for ever is told of."""
    first, frozen, killed = math.inf, math.inf, False
    while left := [rank for rank in ranks if rank.poll() is None]:
        now, stopped = time.monotonic(), [_is_stopped(rank) for rank in left]
        if len(left) < len(ranks):
            first = min(first, now)
        frozen = min(frozen, now) if all(stopped) else math.inf
        # Who is killed on a busy machine is there for a while, and no longer stopped.
        if not killed and (now > first + ENDS_WITHIN_S or now > max(first, frozen + FROZEN_S)):
            killed = True
            for rank, is_stopped in zip(left, stopped, strict=True):
                if not is_stopped:
                    sys.stderr.write(f"{STILL}, process {rank.pid}\n")
                rank.kill()
        time.sleep(POLL_S)


def _is_stopped(rank: subprocess.Popen[bytes]) -> bool:
    return Path(f"/proc/{rank.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
