"""A run's directory, held for one run: nobody else writes to it while a process of the run lives."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from headrace.errors import UnfitMachine, UsageError
from headrace.spec.events import LAUNCHER, decode
from headrace.worker.events import events_path

_LOCK = "lock"


class RunDirLock:
    """Holds a directory until `close`, or until this process and all that got `lock` have ended.

    Args:
        directory: made if it is missing.
        continues: whether an interrupted run goes on in it; else it must hold none.
        needed_bytes: what must fit on its disk.

    Attributes:
        lock: the descriptor that holds it.
        attempt_s: where on the run's clock this attempt begins.

    Raises:
        UsageError: it holds a run already, or one that lives.
        UnfitMachine: it cannot be written to, or has too little space.
    """

    def __init__(self, directory: Path, continues: bool, needed_bytes: int = 0) -> None:
        if events_path(directory, LAUNCHER).exists() and not continues:
            refuse_living(directory)
            raise UsageError(
                f"{directory} holds a run already; name another run_dir, or delete it; resume=True (--resume) goes on "
                "from its last checkpoint"
            )
        try:
            events_path(directory, LAUNCHER).parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
            self.lock = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _unwritable(directory, error) from error
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.lock)
            raise _living(directory) from None
        try:
            self._sign(directory)
            _require_space(directory, needed_bytes)
            self.attempt_s = _mend(directory)
        except BaseException:
            self.close()
            raise

    def _sign(self, directory: Path) -> None:
        """Says who holds it."""
        try:
            os.ftruncate(self.lock, 0)
            os.pwrite(self.lock, str(os.getpid()).encode(), 0)
        except OSError as error:
            raise _unwritable(directory, error) from error

    def close(self) -> None:
        """Lets go of it, as far as this process is concerned."""
        os.close(self.lock)


def _unwritable(directory: Path, error: OSError) -> UnfitMachine:
    return UnfitMachine(f"cannot write to the run directory {directory}: {error.strerror}; name another")


def _require_space(directory: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed_bytes:
        raise UnfitMachine(
            f"a checkpoint takes about {needed_bytes:,} bytes and {directory} has {free:,} left; free some, name "
            "another run_dir, or save nothing (checkpoints=False)"
        )


def refuse_living(directory: Path) -> None:
    """Raises:
    UsageError: a run lives in the directory.
    """
    try:
        lock = os.open(directory / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return  # no run has ever held it, or it cannot be read, which whoever claims it finds out
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _living(directory) from None
    finally:
        os.close(lock)


def _living(directory: Path) -> UsageError:
    who = (directory / _LOCK).read_text(encoding="ascii", errors="replace")[:20]
    return UsageError(
        f"{directory} is in use by a run that lives (process {who or 'unknown'}); wait for its end, end it, or name "
        "another run_dir"
    )


def _mend(directory: Path) -> float:
    """Cuts off half a line that a killed process has left in its events; returns the last time in them, seconds."""
    last_s = 0.0
    for path in events_path(directory, LAUNCHER).parent.glob("*.jsonl"):
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(path, whole)
        lines = content[:whole].splitlines()
        # A line that is no event is the reports' to complain of.
        with suppress(ValueError):
            for line in lines[-1:]:
                last_s = max(last_s, decode(line.decode()).time_s)
    return last_s
