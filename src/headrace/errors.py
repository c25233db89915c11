"""Every error that headrace raises on purpose, and the user's part of a traceback.

    HeadraceError
    ├── UsageError                an invalid request: exit code 2
    │   ├── UnknownName           a strategy, option or key that does not exist, with a suggestion
    │   ├── NoStandardInput       a program reads standard input in a process that has none
    │   ├── CheckpointMismatch    a checkpoint of another job, with what differs
    │   ├── JobError              a job that cannot be loaded, built or sent
    │   └── InfeasiblePlan        a cluster that cannot hold the plan, with the numbers
    ├── UnfitMachine              the machine lacks something: exit code 3
    ├── DataError                 the data set is empty, ragged or of the wrong form: exit code 5
    ├── CorruptCheckpoint         a checkpoint is not what was saved: exit code 5
    ├── ServerRefused             a parameter server has refused an invalid request: exit code 1
    └── RunFailed                 the run began and failed: exit code 1
        ├── WorkerFailed          a worker raised; carries rank, host and the worker's own traceback
        ├── NonFiniteLoss         the loss of a step is NaN or infinite
        ├── NonFiniteGradient     the loss is finite, its gradient is not
        ├── RanksDiffer           a worker's copy of the model is no longer that of the others
        ├── CollectiveFailed      a rank has not come to a collective of accelerators, or it does not end: exit code 4
        ├── PeerLost              a process was killed, vanished or froze: exit code 4
        ├── PeersApart            two processes live and do not reach each other: exit code 4
        ├── ForkServerLost        the process that starts the workers has ended: exit code 4
        ├── Replaced              this process gave no sign of life, and another does its work: exit code 4
        └── LeftBehind            the other workers go on without this one, which they do not reach: exit code 4

Every message contains what happened, the numbers, and the remedy.
"""

from __future__ import annotations

import difflib
import os
import re
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Self

_HEADRACE = str(Path(__file__).parent) + os.sep
_PATHS = (sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
# Also packages of another environment that this one sees: the system's, the user's.
LIBRARIES = re.compile("|".join([*map(re.escape, _PATHS), r".*/(?:site|dist)-packages/"]))

__all__ = [
    "CheckpointMismatch",
    "CollectiveFailed",
    "CorruptCheckpoint",
    "DataError",
    "ForkServerLost",
    "HeadraceError",
    "InfeasiblePlan",
    "JobError",
    "LeftBehind",
    "NoStandardInput",
    "NonFiniteGradient",
    "NonFiniteLoss",
    "PeerLost",
    "PeersApart",
    "RanksDiffer",
    "Replaced",
    "RunFailed",
    "ServerRefused",
    "UnfitMachine",
    "UnknownName",
    "UsageError",
    "WorkerFailed",
]


def in_one_line(error: BaseException) -> str:
    """Returns an error of other code's, its kind and the beginning of its message, as a part of a sentence."""
    return f"{type(error).__name__}: {' '.join(str(error).split()):.200}"


class HeadraceError(Exception):
    """The root of the tree; `remedy` is what to do, where that is not a part of `what()` happened."""

    exit_code: ClassVar[int] = 1
    remedy = ""

    def __str__(self) -> str:
        return f"{self.what()}; {self.remedy}" if self.remedy else self.what()

    def what(self) -> str:
        """Returns what happened, without the remedy."""
        return super().__str__()

    def with_remedy(self, remedy: str) -> Self:
        """Returns this error, whose message goes on with a remedy."""
        self.remedy = remedy
        return self


class UsageError(HeadraceError, ValueError):
    """An invalid request."""

    exit_code = 2


class UnknownName(UsageError):
    """A name that does not exist where it was used; suggests the nearest one that does.

    Args:
        kind: what the name should be, for the message ("strategy", "option").
        name: the name that was given.
        known: the names that exist.
        of: what they belong to, for the message ("mirrored").
        hint: in place of that suggestion.
    """

    def __init__(self, kind: str, name: str, known: Iterable[str], of: str = "", hint: str = "") -> None:
        names = sorted(known)
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"{hint}; " if hint else f"did you mean {near[0]!r}? " if near else ""
        super().__init__(f"there is no {kind} {name!r}{of and f' of {of}'}; {hint}known: {', '.join(names) or 'none'}")


class NoStandardInput(UsageError, EOFError):
    """A program reads standard input in a process that has none; also for code that goes on at the end of its input."""


class JobError(UsageError):
    """A job that cannot be loaded, built or sent to a worker."""


class CheckpointMismatch(UsageError):
    """A checkpoint is of another job.

    Args:
        path: the checkpoint.
        differences: one line each.
    """

    def __init__(self, path: Path, differences: tuple[str, ...]) -> None:
        shown = "; ".join(differences[:5]) + (f"; and {len(differences) - 5} more" if len(differences) > 5 else "")
        super().__init__(
            f"{path} is of another job: {shown}. Resume the job that saved it, or begin a new run in another run_dir"
        )
        self.path = path
        self.differences = differences


class InfeasiblePlan(UsageError):
    """A cluster that cannot hold the plan."""


class UnfitMachine(HeadraceError):
    """The machine lacks something that the run needs."""

    exit_code = 3


class DataError(HeadraceError, ValueError):
    """The data set is empty, ragged or of the wrong form."""

    exit_code = 5


class CorruptCheckpoint(HeadraceError):
    """A checkpoint is not what was saved: damaged, incomplete, exchanged, of another version, or hostile.

    Args:
        path: the file or folder that is wrong; of a copy elsewhere its URL.
        reason: what is wrong with it, with the numbers.
        remedy: what to do.
    """

    exit_code = 5

    def __init__(
        self, path: Path | str, reason: str, remedy: str = "resume from an older checkpoint, or restore it from a copy"
    ) -> None:
        super().__init__(f"{path}: {reason}")
        self.remedy, self.path, self.reason = remedy, path, reason


class ServerRefused(HeadraceError):
    """A parameter server has refused a worker's invalid request; the message names the reason."""


class RunFailed(HeadraceError):
    """The run began and failed."""


class WorkerFailed(RunFailed):
    """A worker raised.

    Args:
        rank: the first rank that failed.
        host: the machine it ran on.
        cause: one line, "ValueError: ...".
        traceback: the worker's own traceback, the user's frames last; empty if there is none.
        exit_code: the exit code of the error that the worker raised, where it was one of this tree.
        part: what it holds of the model, where that is a part: "stage 1 of 2".
    """

    def __init__(
        self, rank: int, host: str, cause: str, traceback: str = "", exit_code: int = 1, part: str = ""
    ) -> None:
        super().__init__(f"rank {rank}{part and f' ({part})'} on {host} failed: {cause}")
        self.rank, self.host, self.cause = rank, host, cause
        self.traceback = traceback
        self.worker_exit_code = exit_code
        if traceback:
            # So that Python prints it last, below the frames of the launcher.
            self.add_note(traceback.rstrip())


class NonFiniteLoss(RunFailed):
    """The loss of a step is NaN or infinite.

    Args:
        rank: the worker that found it.
        step: the step, counted from 0.
        loss: what the loss was.
        row: how many rounds in a row were bad.
    """

    remedy = (
        "lower the learning rate, clip the gradients (Options(clip_norm=1.0)) or look at that batch; "
        "Options(on_nonfinite='skip') leaves such rounds out"
    )

    def __init__(self, rank: int, step: int, loss: float, row: int = 1) -> None:
        super().__init__(f"the loss is {loss} on rank {rank} at step {step}{_in_a_row(row)}")
        self.rank, self.step, self.loss = rank, step, loss


class NonFiniteGradient(RunFailed):
    """The loss of a step is finite, but not its gradient.

    Args:
        step: the step, counted from 0.
        row: how many rounds in a row were bad.
    """

    remedy = (
        "lower the learning rate, look for a division by zero or a root of zero in the model's backward pass; "
        "Options(on_nonfinite='skip') leaves such rounds out"
    )

    def __init__(self, step: int, row: int = 1) -> None:
        super().__init__(f"the gradient is not finite at step {step}{_in_a_row(row)}, though every loss is")
        self.step = step


def _in_a_row(row: int) -> str:
    return f", the {row}th bad round in a row" if row > 3 else ""


class RanksDiffer(RunFailed):
    """A worker's copy of the model is no longer that of the others, which the strategy keeps equal.

    Args:
        rank, other: the worker that differs, and one that most are like.
        name: the first parameter or buffer that differs.
        what: its name, how much of it differs, and by how much.
        done: rounds that were done.
        strategy: its name.
    """

    remedy = (
        "look for what changes it on one worker alone: a forward, loss, hook or loop that writes to it, random "
        "numbers, or the memory of that machine"
    )

    def __init__(self, rank: int, other: int, name: str, what: str, done: int, strategy: str) -> None:
        super().__init__(
            f"after {done} round{'s' if done != 1 else ''} rank {rank} has another {what} than rank {other}, and "
            f"{strategy} keeps them equal"
        )
        self.rank, self.name, self.done = rank, name, done


class PeerLost(RunFailed):
    """A process was killed, vanished or froze.

    Args:
        rank: who was lost.
        host: the machine it ran on.
        cause: what is known, "killed by signal 9 (SIGKILL)", "gave no sign of life for 10 s".
        part: what it holds of the model, where that is a part: "stage 1 of 2".
    """

    exit_code = 4

    def __init__(self, rank: int, host: str, cause: str, part: str = "") -> None:
        super().__init__(f"rank {rank}{part and f' ({part})'} on {host} was lost: {cause}")
        self.rank = rank
        self.host = host
        self.cause = cause


class CollectiveFailed(RunFailed):
    """Ranks have not come to a collective of accelerators, have called different ones, or it has not ended."""

    exit_code = 4


class PeersApart(RunFailed):
    """Two processes live and do not reach each other.

    Args:
        here: rank and host of the process that has noticed it.
        there: rank and host of the other one; its `rank` is an attribute.
        cause: what is known of the connection, and for how long nothing came.
    """

    exit_code = 4

    def __init__(self, here: tuple[int, str], there: tuple[int, str], cause: str) -> None:
        (own, home), (self.rank, host) = here, there
        super().__init__(
            f"rank {own} on {home} and rank {self.rank} on {host} live and do not reach each other ({cause}); look for "
            "a firewall or a broken link between these two hosts (headrace doctor tests every pair)"
        )


class ForkServerLost(RunFailed):
    """The process that starts the workers has ended, and its workers with it, or was stopped for too long."""

    exit_code = 4


class Replaced(RunFailed):
    """This worker gave no sign of life for too long, and another process goes on in its place.

    Args:
        rank: of the worker.
        incarnation: of the one that counts now.
    """

    exit_code = 4

    def __init__(self, rank: int, incarnation: int) -> None:
        super().__init__(
            f"rank {rank} was replaced by its incarnation {incarnation}, because it had stopped or could not be "
            "reached; the run goes on without this process, and what it has not finished is done again"
        )
        self.rank = rank
        self.incarnation = incarnation


class LeftBehind(RunFailed):
    """The other workers of an elastic run go on without this one, or may do so, because they do not reach each other.

    Args:
        rank: of this worker.
        why: what it knows.
    """

    exit_code = 4

    def __init__(self, rank: int, why: str) -> None:
        super().__init__(f"rank {rank} ends: {why}; what it has not finished is done again by the others")
        self.rank = rank


def user_traceback(error: BaseException, fallback: bool = False) -> str:
    """Returns the traceback from the first frame of user code on, without headrace's frames.

    A syntax error has no frame of its own and is shown as it is. Where no user code was running the result is "", or
    with `fallback` the frames of libraries, or if there are none all frames.
    """
    shown = traceback.TracebackException.from_exception(error)
    frames = _user_frames(shown)
    if not frames and fallback:
        frames = [frame for frame in shown.stack if not _is_ours(frame)] or list(shown.stack)
    elif not frames and not isinstance(error, SyntaxError):
        return ""
    shown.stack = traceback.StackSummary.from_list(frames)
    return "".join(shown.format()).rstrip("\n")


def user_place(error: BaseException) -> str:
    """Returns the last line of user code in the traceback, "job.py, line 12"; empty if there is none."""
    frames = _user_frames(traceback.TracebackException.from_exception(error))
    own = [frame for frame in frames if not LIBRARIES.match(frame.filename)]
    return f"{own[-1].filename}, line {own[-1].lineno}" if own else ""


def _user_frames(shown: traceback.TracebackException) -> list[traceback.FrameSummary]:
    frames = [frame for frame in shown.stack if not _is_ours(frame)]
    # A library's compiled frame has a relative name: "uvloop/loop.pyx".
    while frames and (LIBRARIES.match(frames[0].filename) or frames[0].filename.endswith(".pyx")):
        del frames[0]
    return frames


def _is_ours(frame: traceback.FrameSummary) -> bool:
    # "<frozen importlib...>" loads a file, and `dataclass` writes methods in "<string>".
    generated = frame.filename == "<string>" and frame.name.startswith("__")
    return generated or frame.filename.startswith(("<frozen ", _HEADRACE))
