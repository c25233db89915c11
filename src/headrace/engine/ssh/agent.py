"""The agent of one host, `python -m headrace.engine.ssh.agent SCRIPT PORT`: ssh starts it, it starts the processes.

It prints one line about this host. Then it reads one line, what to run, and starts the processes, which write to its
stdout and stderr. Each further line is a sign of life, or the number of a signal for them. Where stdin ends or is
silent, the launcher has ended or is not reached: then the processes end, too. The exit code is that of the first that
failed.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from headrace.errors import PeerLost
from headrace.machine import disk
from headrace.machine.identity import host_name, installed_versions

HELLO = "headrace agent: "
GRACE_S = 10.0
"""That processes have to end by themselves when another one has failed, and after SIGTERM."""
_LOOK_EVERY_S = 0.1


def main() -> None:
    """Says what this host has, and does what the launcher asks for."""
    script, port = Path(sys.argv[1]), int(sys.argv[2])
    print(HELLO + json.dumps(_hello(script, port)), flush=True)  # noqa: T201
    orders = _Orders()
    line = orders.next(None)
    if line:
        sys.exit(_run(json.loads(line), orders))


def _hello(script: Path, port: int) -> dict[str, Any]:
    digest = hashlib.sha256(script.read_bytes()).hexdigest() if disk.is_file(script) else "nothing"
    # What sshd says: addresses and ports of the client and of this host.
    address = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    facts = {"host": host_name(), "versions": installed_versions(), "script": digest, "address": "".join(address)}
    with socket.socket(socket.AF_INET6 if ":" in facts["address"] else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((facts["address"], port))
        except OSError as error:
            return {**facts, "port": 0, "refused": f"port {port} of {facts['address']}: {error.strerror}"}
        return {**facts, "port": probe.getsockname()[1], "refused": ""}


class _Orders:
    """Lines from the launcher."""

    def __init__(self) -> None:
        self._text = b""
        self.heard = monotonic()
        self.ended = False

    def next(self, within_s: float | None) -> str:
        """Returns the next line, "" where none came in time or stdin has ended."""
        while b"\n" not in self._text:
            if self.ended or not select.select([0], [], [], within_s)[0]:
                return ""
            got = os.read(0, 1 << 16)
            self.ended, self.heard = not got, monotonic()
            self._text += got
        line, _, self._text = self._text.partition(b"\n")
        return line.decode()


def _run(request: Mapping[str, Any], orders: _Orders) -> int:
    ranks = request["ranks"]
    workers = [
        subprocess.Popen(
            [sys.executable, *request["command"]],
            stdin=subprocess.DEVNULL,
            # A process of its own group gets each signal once.
            start_new_session=True,
            env={
                **os.environ,
                **request["environment"],
                "RANK": str(rank),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(len(ranks)),
            },
        )
        for local, rank in enumerate(ranks)
    ]
    deadline = None
    while left := [worker for worker in workers if worker.poll() is None]:
        failed = any(code and not is_loss(code) for code in _codes(workers))
        lost = orders.ended or monotonic() - orders.heard > request["silent_s"]
        if deadline is None and (failed or lost):
            deadline = monotonic() + (0 if lost else GRACE_S)
        if deadline is not None and monotonic() >= deadline:
            _end(left)
            continue
        line = orders.next(_LOOK_EVERY_S)
        if line:
            _signal(left, int(line))
    codes = _codes(workers)
    return exit_code(codes, leads=ranks[0] == 0 and codes[0] == 0)


def _codes(workers: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    return [worker.returncode for worker in workers if worker.returncode is not None]


def is_loss(code: int) -> bool:
    """Whether a process was killed, or has lost another; the others end by themselves, or go on without it."""
    return code == PeerLost.exit_code or not 0 <= code <= 128


def exit_code(codes: Sequence[int], leads: bool = False) -> int:
    """Returns the code of the first that failed, before that of one that lost another; as shells say it.

    Losses do not count where the first one `leads`: it is rank 0, and has gone on to the end.
    """
    failed = [code for code in codes if code != 0 and not (leads and is_loss(code))]
    # A process that lost another has a code of its own; the lost one's explains.
    chosen = next((code for code in failed if code != PeerLost.exit_code), next(iter(failed), 0))
    return 128 - chosen if chosen < 0 else chosen


def _end(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    _signal(workers, signal.SIGTERM)
    deadline = monotonic() + GRACE_S
    for worker in workers:
        try:
            worker.wait(max(0.0, deadline - monotonic()))
        except subprocess.TimeoutExpired:
            _signal([worker], signal.SIGKILL)
            worker.wait()


def _signal(workers: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for worker in workers:
        if worker.poll() is None:
            os.killpg(worker.pid, number)


if __name__ == "__main__":
    main()
