"""How a run has ended, in the words that the terminal, every page and trackers show."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from msgspec.structs import replace

from headrace.checkpoint import CheckpointFolder
from headrace.errors import (
    LIBRARIES,
    CorruptCheckpoint,
    ForkServerLost,
    HeadraceError,
    NonFiniteGradient,
    NonFiniteLoss,
    PeerLost,
    RunFailed,
    WorkerFailed,
    in_one_line,
)
from headrace.machine import disk
from headrace.spec.events import ENDS_EARLY, LAUNCHER, Failed, RunEnded, RunStarted

UNFINISHED = "unfinished"
LOCK = "lock"
"""In the run's directory; the processes of a run hold it while they live."""
_SIGINT, _SIGTERM, _TWICE = "Ctrl-C (SIGINT)", "SIGTERM", "interrupted (SIGINT) before its round was done"
_GONE = "the process that led it is gone and has said nothing: it was killed, or its machine has stopped"
_UNSAVED = "nothing was saved to go on from: --checkpoint-every 30s (hr.Checkpoints(every_s=30)) saves sooner"
_CRASHED = "compiled code has crashed: with PYTHONFAULTHANDLER=1 in the environment that rank's log says where"
_HINTS = {
    "SIGKILL": "often that is the kernel's out-of-memory killer, as `dmesg` says",
    "no sign of life": "where it was only slow, --timeout-s (timeout_s) waits longer",
    **dict.fromkeys(("SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"), _CRASHED),
}
_FRAME = re.compile(r'^  File "(.+)", line (\d+)', re.MULTILINE)
_TRAIN = "headrace train "
_GOING_ON = ("--resume", "--resume-if-saved", "--watch")


def ended_by(error: BaseException, run_dir: Path, command: str = "") -> tuple[str, str]:
    """Returns cause and remedy of a run of a command that an error ends; the error says both afterwards."""
    if isinstance(error, RunFailed):
        lost = isinstance(error, PeerLost | ForkServerLost)
        hint = next((each for said, each in _HINTS.items() if lost and said in error.what()), "")
        last = ("" if _is_not_finite(error) else resuming(run_dir, command)) or (_UNSAVED if lost else "")
        error.remedy = "; ".join(filter(None, (error.remedy or _place_of(error), hint, last)))
        return error.what(), error.remedy
    if isinstance(error, HeadraceError):
        return error.what(), error.remedy
    if isinstance(error, KeyboardInterrupt):
        # What it says is shown, as that of any error.
        remedy = resuming(run_dir, command) or _UNSAVED
        error.args = (f"{_TWICE}; {remedy}",)
        return _TWICE, remedy
    return (in_one_line(error) if isinstance(error, Exception) else type(error).__name__), ""


def _place_of(error: RunFailed) -> str:
    """Returns the last line of user code in a worker's traceback; "" where there is none."""
    frames = _FRAME.findall(error.traceback) if isinstance(error, WorkerFailed) else []
    own = [f"{file}, line {line}" for file, line in frames if not LIBRARIES.match(file)]
    return f"see {own[-1]}" if own else ""


def _is_not_finite(error: RunFailed) -> bool:
    """Tells whether the parameters may be at fault, which a checkpoint has, too."""
    kinds = NonFiniteLoss, NonFiniteGradient
    told = tuple(f"{kind.__name__}:" for kind in kinds)
    return isinstance(error, kinds) or (isinstance(error, WorkerFailed) and error.cause.startswith(told))


def ended_by_signal(terminated: bool, early: str, run_dir: Path, command: str = "") -> tuple[str, str]:
    """Returns cause and remedy of a run that a signal has ended in order; `early` is what the run has said of it."""
    said = early.removeprefix(ENDS_EARLY)
    return said or (_SIGTERM if terminated else _SIGINT), resuming(run_dir, command)


def resuming(run_dir: Path, command: str = "") -> str:
    """Returns how to go on with a run; "" where nothing was saved."""
    try:
        if not CheckpointFolder(run_dir / "checkpoints").steps():
            return ""
    except (OSError, CorruptCheckpoint):
        # What is told is how the run has ended, and not also that the disk fails.
        return ""
    what = "the servers' last snapshots" if disk.is_folder(run_dir / "snapshots") else "the last checkpoint"
    typed = resuming_command(command, run_dir)
    return f"{f'`{typed}`' if typed else 'resume=True (--resume)'} goes on from {what}"


def resuming_command(command: str, run_dir: Path) -> str:
    """Returns what to type to go on with a run that a command has started; "" where another program has."""
    if not command.startswith(_TRAIN):
        return ""
    words, kept = shlex.split(command), list[str]()
    while words:
        word = words.pop(0)
        if word == "--resume-from" and words:
            del words[0]
        elif word not in _GOING_ON and not word.startswith("--resume-from="):
            kept.append(word)
    named = any(each.partition("=")[0] == "--run-dir" for each in kept)
    return shlex.join([*kept, *(() if named else ("--run-dir", str(run_dir))), "--resume"])


def last_word(
    run_dir: Path, ended: RunEnded | None, failure: Failed | None, started: RunStarted | None = None
) -> RunEnded:
    """Returns the run's last event; where it has none, what is known in its place, with the status "unfinished"."""
    if ended is None:
        gone = disk.is_left(run_dir / LOCK)
        again = resuming(run_dir, started.command if started else "") or _UNSAVED
        return RunEnded(LAUNCHER, 0.0, UNFINISHED, _GONE if gone else "", again if gone else "")
    if not ended.words and failure is not None:
        # Written before runs said why they end.
        who = f"rank {failure.rank}" if failure.rank >= 0 else "the launcher"
        return replace(ended, cause=f"at step {failure.step}, says {who}: {failure.cause}")
    return ended
