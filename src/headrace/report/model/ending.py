"""How a run has ended, in the words that the terminal, every page and trackers show."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from headrace.checkpoint import CheckpointFolder
from headrace.errors import CorruptCheckpoint, HeadraceError, NonFiniteGradient, NonFiniteLoss, RunFailed, in_one_line
from headrace.machine import disk
from headrace.spec.events import LAUNCHER, Failed, RunEnded

UNFINISHED = "unfinished"
LOCK = "lock"
"""In the run's directory; the processes of a run hold it while they live."""
_SIGINT, _SIGTERM = "Ctrl-C (SIGINT)", "SIGTERM"
_KILLED = "often that is the kernel's out-of-memory killer, as `dmesg` says"
_GONE = "the process that led it is gone and has said nothing: it was killed, or its machine has stopped"


def ended_by(error: BaseException, run_dir: Path) -> tuple[str, str]:
    """Returns cause and remedy of a run that an error ends; the error says both afterwards."""
    if isinstance(error, RunFailed):
        killed = _KILLED if "SIGKILL" in error.what() else ""
        again = "" if isinstance(error, NonFiniteLoss | NonFiniteGradient) else resuming(run_dir)
        error.remedy = "; ".join(filter(None, (error.remedy, killed, again)))
        return error.what(), error.remedy
    if isinstance(error, HeadraceError):
        return str(error), ""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted (SIGINT)", ""
    return (in_one_line(error) if isinstance(error, Exception) else type(error).__name__), ""


def ended_by_signal(terminated: bool, run_dir: Path) -> tuple[str, str]:
    """Returns cause and remedy of a run that a signal has ended in order."""
    return _SIGTERM if terminated else _SIGINT, resuming(run_dir)


def resuming(run_dir: Path) -> str:
    """Returns how to go on with a run; "" where nothing was saved."""
    try:
        if not CheckpointFolder(run_dir / "checkpoints").steps():
            return ""
    except (OSError, CorruptCheckpoint):
        # What is told is how the run has ended, and not also that the disk fails.
        return ""
    what = "the servers' last snapshots" if disk.is_folder(run_dir / "snapshots") else "the last checkpoint"
    return f"resume=True (--resume) goes on from {what}"


def last_word(run_dir: Path, ended: RunEnded | None, failure: Failed | None) -> RunEnded:
    """Returns the run's last event; where it has none, what is known in its place, with the status "unfinished"."""
    if ended is None:
        gone = disk.is_left(run_dir / LOCK)
        return RunEnded(LAUNCHER, 0.0, UNFINISHED, _GONE if gone else "", resuming(run_dir) if gone else "")
    if not ended.words and failure is not None:
        # Written before runs said why they end.
        who = f"rank {failure.rank}" if failure.rank >= 0 else "the launcher"
        return replace(ended, cause=f"at step {failure.step}, says {who}: {failure.cause}")
    return ended
