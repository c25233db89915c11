"""The directory of a run, which one run at a time locks."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import weakref
from pathlib import Path

from headrace.errors import UnfitMachine, UsageError
from headrace.machine import disk
from headrace.machine.temporary import delete_with_process, forget
from headrace.report.model.ending import LOCK
from headrace.spec.events import LAUNCHER
from headrace.worker.run_spec import RENDEZVOUS, events_path


class TemporaryRunDir:
    """A temporary directory that is deleted with its holder.

    Without the warning of `tempfile.TemporaryDirectory`: a run is never closed.
    """

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="headrace-"))
        delete_with_process(self.path)
        self._delete = weakref.finalize(self, _delete, self.path, os.getpid())

    def delete(self) -> None:
        """Deletes the directory now."""
        self._delete()


def _delete(folder: Path, owner: int) -> None:
    # A child that user code forks has a copy of the holder.
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
        forget(folder)


class RunDirLock:
    """Locks a directory until `close`, or until this process and all that inherit `lock` have ended.

    Args:
        continues: whether an interrupted run goes on in it; else it must hold none.
        needed_bytes: what must fit on its disk.

    Attributes:
        attempt_s: when this attempt begins, on the run's clock.

    Raises:
        UsageError: it holds a run already, or one that lives.
        UnfitMachine: it cannot be written to, or has too little space.
    """

    def __init__(self, directory: Path, continues: bool, needed_bytes: int = 0) -> None:
        try:
            holds_one = disk.exists(events_path(directory, LAUNCHER))
        except OSError as error:
            raise _unwritable(directory, error) from error
        if holds_one and not continues:
            refuse_living(directory)
            raise UsageError(
                f"{directory} holds a run already; name another run_dir, or delete it; resume=True (--resume) goes on "
                "from its last checkpoint"
            )
        try:
            events_path(directory, LAUNCHER).parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
            self.lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _unwritable(directory, error) from error
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self.lock)
            raise _living(directory) from None
        try:
            os.ftruncate(self.lock, 0)
            os.pwrite(self.lock, str(os.getpid()).encode(), 0)
            # Workers end without tidying up, and those of this attempt would read what the earlier ones said.
            (directory / RENDEZVOUS).unlink(missing_ok=True)
            free = shutil.disk_usage(directory).free
            if free < needed_bytes:
                raise UnfitMachine(
                    f"a checkpoint takes about {needed_bytes:,} bytes and {directory} has {free:,} left; free some, "
                    "name another run_dir, or save nothing (checkpoints=False)"
                )
            self.attempt_s = _mend(directory)
        except OSError as error:
            self.close()
            raise _unwritable(directory, error) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unlocks it, as far as this process is concerned."""
        os.close(self.lock)


def _unwritable(directory: Path, error: OSError) -> UnfitMachine:
    return UnfitMachine(f"cannot write to the run directory {directory}: {error.strerror}; name another")


def refuse_living(directory: Path) -> None:
    """Raises UsageError where a run lives in the directory."""
    try:
        lock = os.open(directory / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return  # no run has ever locked it, or it cannot be read, which `RunDirLock` reports
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _living(directory) from None
    finally:
        os.close(lock)


def _living(directory: Path) -> UsageError:
    who = (directory / LOCK).read_text(encoding="ascii", errors="replace")[:20]
    return UsageError(
        f"{directory} is in use by a run that lives (process {who or 'unknown'}); wait for its end, end it, or name "
        "another run_dir"
    )


_TIME = re.compile(rb'"time_s":([0-9]{1,15}(?:[.][0-9]+)?(?:e-[0-9]+)?)[,}]')


_AFTER_S = 0.001
"""An attempt begins after the last event of the one before: events of the same time would come in another order."""


def _mend(directory: Path) -> float:
    """Cuts off the incomplete last line that a killed process has left in its events; returns a time after all, s."""
    last_s = 0.0
    for path in events_path(directory, LAUNCHER).parent.glob("*.jsonl"):
        whole = 0
        # Line by line: the files of a long run have gigabytes.
        with path.open("rb") as stream:
            for line in stream:
                if not line.endswith(b"\n"):
                    os.truncate(path, whole)
                    break
                whole += len(line)
                # The last line is not always the latest: a save's is written after steps that followed its end.
                last_s = max(last_s, *(float(time) + _AFTER_S for time in _TIME.findall(line)), 0.0)
    return last_s
