"""Runs a strategy's job through faults until it has come to its end, and collects what it leaves."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from getpass import getuser
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from headrace.errors import CorruptCheckpoint
from headrace.report.model.events import read_events
from storm.clock import Clocks
from storm.disks import Disk, FailingDisk
from storm.evidence import Attempt, Evidence, Strike
from storm.faults import damage, strike, ungroup
from storm.hosts import HOSTS, mend
from storm.jobs import OVER_HOSTS
from storm.schedule import CLOCKED, DAMAGES, MOUNTED, Fault

__all__ = ["undisturbed", "weather"]

TESTS = Path(__file__).parents[1]
POLL_S = 0.01
STANDS_STILL_S = 90.0
"""Without a new event; a start on a busy machine takes its time."""

GONE_WITHIN_S = 10.0
CACHES = {f"torchinductor_{getuser()}"}
"""What torch keeps for later runs."""

PASSING = ("sem.", "torch_", "headrace-fuzz-")
"""Names in /dev/shm that other work on this machine has."""

SHARED_BYTES = 1 << 30
OWN_SHARED = ["unshare", "--mount", "--", "sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"']
"""Gives the command a folder as its /dev/shm, so that what lies there is of no other process of the machine."""


def undisturbed(strategy: str) -> str:
    """Returns the digest of the parameters of a run without faults."""
    evidence = weather(strategy, (), "")
    assert evidence.attempts[-1].code == 0, evidence.attempts[-1].said
    return evidence.parameters


def weather(strategy: str, faults: tuple[Fault, ...], expected: str) -> Evidence:
    """Gives the command until it ends well, at most twice more than there are faults.

    Where the only checkpoint is the one that was damaged, the command says so, and it is deleted as a user would.
    """
    with TemporaryDirectory(prefix="headrace-storm-") as where:
        folder = Path(where)
        kinds = {fault.kind for fault in faults}
        disk = _disk(folder / "run", kinds)
        hosts = HOSTS if strategy in OVER_HOSTS else 1
        clocks = Clocks(folder / "clocks", hosts) if kinds & set(CLOCKED) else None
        shared = Disk(folder / "shared", SHARED_BYTES) if os.geteuid() == 0 else None
        try:
            run_dir, left, attempts = folder / "run" / "a", list(faults), list[Attempt]()
            seen = (disk.inside if disk else folder / "run") / "a"
            most = 2 + sum(2 if fault.kind in DAMAGES else 1 for fault in faults)
            while len(attempts) < most and (not attempts or attempts[-1].code != 0):
                if disk:
                    disk.mend()
                if strategy in OVER_HOSTS:
                    mend()
                if not any(seen.glob("checkpoints/step-*[0-9]")):
                    shutil.rmtree(seen, ignore_errors=True)
                attempts.append(Command(strategy, run_dir, seen, folder / "tmp", disk, clocks, shared).attempt(left))
                if attempts[-1].code == CorruptCheckpoint.exit_code:
                    shutil.rmtree(seen / "checkpoints")
                for done in attempts[-1].strikes:
                    if done.fault.kind in DAMAGES:
                        damage(done.fault, seen)
            return _collect(strategy, tuple(attempts), seen, expected)
        finally:
            for each in filter(None, (disk, shared)):
                each.close()


def _disk(folder: Path, kinds: set[str]) -> Disk | FailingDisk | None:
    """Returns one that can fail in those ways, None where none is needed."""
    return FailingDisk(folder) if "failing disk" in kinds else Disk(folder) if kinds & set(MOUNTED) else None


def _collect(strategy: str, attempts: tuple[Attempt, ...], run_dir: Path, expected: str) -> Evidence:
    parameters = run_dir / "model.safetensors"
    digest = hashlib.sha256(parameters.read_bytes()).hexdigest() if parameters.exists() else ""
    unfinished = tuple(path.name for path in run_dir.glob("checkpoints/*") if path.suffix in (".part", ".old"))
    events = read_events(run_dir) if any(run_dir.glob("events/*.jsonl")) else ()
    return Evidence(strategy, attempts, events, digest, expected or digest, unfinished)


class Command:
    """One attempt. What it starts is known by a word in its environment.

    `seen` is where the run directory can be read although its disk fails.
    """

    def __init__(
        self,
        strategy: str,
        run_dir: Path,
        seen: Path,
        temporary: Path,
        disk: Disk | FailingDisk | None,
        clocks: Clocks | None,
        shared: Disk | None,
    ) -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        self._seen, self._temporary, self._disk, self._clocks = seen, temporary, disk, clocks
        self._word = f"STORM={uuid4().hex}"
        self._shared_folder = shared.folder if shared else Path("/dev/shm")
        self._shared = set(os.listdir(self._shared_folder))
        # Without a line that a killed process has left half written, which the next attempt cuts off.
        self._sizes = {path: path.read_bytes().rfind(b"\n") + 1 for path in seen.glob("events/*.jsonl")}
        self._steps, self._ranks = 0, dict[int, int]()
        env = {**os.environ, "TMPDIR": str(temporary), "STORM": self._word.partition("=")[2], "CI": "true"}
        env |= clocks.environment() if clocks else {}
        script = TESTS / "storm" / ("hosts.py" if strategy in OVER_HOSTS else "jobs.py")
        command = [*OWN_SHARED, str(shared.folder)] if shared else []
        command += [sys.executable, str(script), strategy, str(run_dir)]
        self._log = (temporary.parent / "stderr").open("w+")
        self._process = subprocess.Popen(
            command, env=env, stdout=subprocess.DEVNULL, stderr=self._log, start_new_session=True
        )

    def attempt(self, faults: list[Fault]) -> Attempt:
        """Does those faults whose time comes, which are taken from the list, and waits for the end."""
        try:
            return self._attempt(faults)
        finally:
            # Also where this program is interrupted.
            self._process.kill()
            self._process.wait()
            self._end()
            self._log.close()

    def _attempt(self, faults: list[Fault]) -> Attempt:
        strikes: list[Strike] = []
        moved = time.monotonic()
        ended = math.inf
        while time.monotonic() - moved < STANDS_STILL_S:
            if self._process.poll() is not None:
                ended = time.monotonic()
                break
            if self._read():
                moved = time.monotonic()
            if faults and self._steps >= faults[0].after and (ranks := dict(self._alive())):
                fault = faults.pop(0)
                with suppress(ProcessLookupError):  # it has ended meanwhile, and nothing has struck it
                    struck = strike(fault, self._process.pid, ranks, self._disk, self._clocks)
                    strikes.append(Strike(fault, struck, time.monotonic()))
                self._steps = 0
            time.sleep(POLL_S)
        self._process.kill()
        code = self._process.wait()
        processes = tuple(self._left()) if math.isfinite(ended) else ()
        self._end()
        self._log.seek(0)
        said = self._log.read()
        shared = set(os.listdir(self._shared_folder)) - self._shared
        files = [name for name in shared if not name.startswith(PASSING)]
        found = (path.relative_to(self._temporary) for path in self._temporary.rglob("*"))
        files += [str(path) for path in found if path.parts[0] not in CACHES]
        return Attempt(tuple(strikes), code, ended, said, processes, tuple(sorted(files)))

    def _read(self) -> bool:
        """Reads new whole lines: who is there, and how many steps there were."""
        found = False
        for path in self._seen.glob("events/*.jsonl"):
            with path.open("rb") as file:
                file.seek(self._sizes.get(path, 0))
                lines = file.read().rpartition(b"\n")[0]
            self._sizes[path] = self._sizes.get(path, 0) + len(lines) + bool(lines)
            for line in filter(None, lines.split(b"\n")):
                event, found = json.loads(line), True
                self._steps += event["kind"] == "stepped"
                if event["kind"] in ("worker_started", "server_started"):
                    self._ranks[event["rank"]] = event["pid"]
        return found

    def _alive(self) -> Iterator[tuple[int, int]]:
        ours = dict(self._processes())
        return ((rank, pid) for rank, pid in self._ranks.items() if pid in ours)

    def _processes(self) -> Iterator[tuple[int, str]]:
        """Yields those that have the word, with their names; zombies have no environment any more."""
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    if self._word.encode() in (folder / "environ").read_bytes():
                        yield int(folder.name), (folder / "comm").read_text().strip()
                except (FileNotFoundError, ProcessLookupError, PermissionError):
                    continue  # it ended meanwhile, or is another user's

    def _left(self) -> list[str]:
        give_up = time.monotonic() + GONE_WITHIN_S
        while (left := [name for _, name in self._processes()]) and time.monotonic() < give_up:
            time.sleep(0.05)
        return left

    def _end(self) -> None:
        for pid, _ in list(self._processes()):
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
        ungroup()
