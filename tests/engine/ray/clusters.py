"""Ray clusters of several raylets on this machine; each raylet is a node, and what runs there sees one host."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

STORE_BYTES = 80_000_000
_START_S = 60.0


def own_address() -> str:
    """Returns the address by which this machine reaches others; "" if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Nothing is sent.
            probe.connect(("198.51.100.1", 9))
        except OSError:
            return ""
        address: str = probe.getsockname()[0]
        return "" if address.startswith("127.") else address


class LocalCluster:
    """A Ray cluster; its files, and all its processes, have a folder of its own in their command lines."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._host = own_address()
        with socket.socket() as probe:
            probe.bind((self._host, 0))
            self.address = f"{self._host}:{probe.getsockname()[1]}"
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, cpus: int, *more: str) -> None:
        """Starts a node; the first one is the head."""
        where = [f"--address={self.address}"] if self._started else ["--head", f"--port={self.address.split(':')[1]}"]
        command = [
            *(sysconfig.get_path("scripts") + "/ray", "start", "--block", *where, f"--node-ip-address={self._host}"),
            *(f"--node-name={name}", f"--num-cpus={cpus}", f"--object-store-memory={STORE_BYTES}"),
            *("--disable-usage-stats", f"--temp-dir={self._folder}", *more),
        ]
        log = Path(self._folder) / f"{name}.log"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        with log.open("wb") as output:
            child = subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, start_new_session=True, stdin=subprocess.DEVNULL
            )
        self._started.append(child)
        deadline = time.monotonic() + _START_S
        while b"--block" not in log.read_bytes():
            assert child.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)

    def close(self) -> None:
        """Ends all nodes."""
        for pid in self._processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for child in self._started:
            child.kill()
            child.wait()

    def _processes(self) -> Iterator[int]:
        for pid, words in command_lines():
            if any(self._folder in word for word in words):
                yield pid


def command_lines() -> Iterator[tuple[int, Sequence[str]]]:
    """Yields the processes of this machine with their command lines."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            yield int(process.name), (process / "cmdline").read_text(errors="replace").split("\0")


def raylet_of(node: str) -> int:
    """Returns the process of a node's raylet, by the node's id."""
    return next(
        pid for pid, words in command_lines() if words[0].endswith("raylet/raylet") and f"--node_id={node}" in words
    )


@contextmanager
def local_cluster(nodes: Sequence[tuple[str, int]]) -> Iterator[LocalCluster]:
    """Yields a cluster of nodes with names and numbers of CPUs."""
    # Short, because the names of sockets in it must be.
    with tempfile.TemporaryDirectory(prefix="hr-ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        cluster = LocalCluster(folder)
        try:
            for name, cpus in nodes:
                cluster.start(name, cpus, *(["--include-dashboard=false"] if name == nodes[0][0] else []))
            yield cluster
        finally:
            cluster.close()
