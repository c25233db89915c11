"""Adds or removes workers of a running run: a command writes a request to its directory, its launcher an answer.

    headrace workers add 2 runs/a        runs/a/staffing/7f3a.wish   ──► the launcher reads it, starts the workers,
                                         runs/a/staffing/7f3a.answer ◄── or refuses with a reason

Where a launcher of another kind has started the workers, the first of them answers.

Files and not a socket: no port is open, and the directory's permissions decide who may change the run.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from headrace.errors import UsageError
from headrace.machine import disk
from headrace.machine.disk import takes_no_more, unless

_LOOK_EVERY_S = 0.05
_ANSWER_S = 15.0
_LONGEST = 200
_LIST = "list"


@dataclass(frozen=True)
class ListedWorker:
    """A worker of a running run: its rank, its host, which of the rank's processes it is, and what it does."""

    rank: int
    host: str
    process: int
    state: str


def changed_workers(
    count: int, stay: Sequence[int], free: Sequence[int], least: int, most: str, others: int = 0
) -> tuple[list[int], str]:
    """Returns the ranks that begin, or below 0 those that leave, and the answer; raises UsageError if it cannot be.

    Of `stay` some may leave, of `free` some may begin, and there are `others`; `most` says how many a run has.
    """
    least, total = max(1, least), len(stay) + others + count
    if count > len(free) or total < least or len(stay) + count < 1:
        raise UsageError(f"{total - count} workers and {count:+d} are {total}; a run has {least} to {most}")
    ranks = [*free[:count]] if count >= 0 else [*stay[count:]]
    named, one = ", ".join(f"rank {rank}" for rank in ranks), "s" * (len(ranks) == 1)
    does = f"begin{one}" if count >= 0 else f"leave{one} after the present round"
    return ranks, f"{total} worker{'s' * (total > 1)} from now on: {named} {does}"


class ScaleRequests:
    """The launcher's side; a run that `begins` leaves out requests to an earlier one in its directory."""

    def __init__(self, run_dir: Path, begins: bool = True) -> None:
        self._folder = run_dir / "staffing"
        self._foreign: set[str] = set()
        for left in self._folder.glob("*") if begins else ():
            self._delete(left)

    def look(self, change: Callable[[int], str], members: Callable[[], Sequence[ListedWorker]]) -> None:
        """Answers the requests in the directory by the result of `change`, or by the UsageError that it raises.

        Who asks for the workers gets those of `members`.
        """
        # Where the disk fails or takes no answer, who asks is told after a while that none has come.
        with unless(takes_no_more):
            self._answer(change, members)

    def _answer(self, change: Callable[[int], str], members: Callable[[], Sequence[ListedWorker]]) -> None:
        for wish in sorted(self._folder.glob("*.wish")):
            text = self._take(wish)
            if text is None:
                continue
            answer: dict[str, Any]
            try:
                answer = {"done": [asdict(each) for each in members()] if text == _LIST else change(_number(text))}
            except UsageError as error:
                answer = {"refused": str(error)}
            with suppress(PermissionError):
                _write(wish.with_suffix(".answer"), json.dumps(answer))

    def _take(self, wish: Path) -> str | None:
        """Removes a request and returns it; None where it was withdrawn, is no file, or is another user's."""
        if wish.name in self._foreign or not disk.is_file(wish):  # to open a named pipe would wait for its writer
            return None
        try:
            with wish.open(encoding="utf-8", errors="replace") as file:
                text = file.read(_LONGEST)
        except FileNotFoundError:
            return None
        except PermissionError:
            self._foreign.add(wish.name)
            return None
        # First, so that none is done twice, and none that was withdrawn.
        return text if self._delete(wish) else None

    def _delete(self, path: Path) -> bool:
        """Tells whether it deleted a file; what it may not delete is ignored from then on."""
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        except (IsADirectoryError, PermissionError):
            self._foreign.add(path.name)
            return False
        return True


def ask_for_workers(run_dir: Path, count: int, timeout_s: float = _ANSWER_S) -> str:
    """Asks a running run for more workers, or below 0 for fewer; returns the launcher's answer.

    Raises:
        UsageError: nothing runs there, or the run refuses.
    """
    return str(_ask(run_dir, str(count), timeout_s))


def ask_for_states(run_dir: Path, timeout_s: float = _ANSWER_S) -> list[ListedWorker]:
    """Returns the workers of a running run, by rank, and of those that are gone the ranks; raises as the other one."""
    return [ListedWorker(**each) for each in _ask(run_dir, _LIST, timeout_s)]


def _ask(run_dir: Path, text: str, timeout_s: float) -> Any:
    folder = run_dir / "staffing"
    if not disk.is_folder(run_dir):
        raise UsageError(f"{run_dir} is no directory of a run")
    wish = folder / f"{secrets.token_hex(8)}.wish"
    try:
        folder.mkdir(exist_ok=True)
        _write(wish, text)
    except PermissionError as error:
        raise UsageError(f"{folder} cannot be written to ({error.strerror}): ask as the user of the run") from None
    answer = wish.with_suffix(".answer")
    deadline = monotonic() + timeout_s
    while not disk.exists(answer):
        if monotonic() > deadline:
            with suppress(FileNotFoundError):
                wish.unlink()
            # Made by another user, it would keep the run's own user from asking.
            with suppress(OSError):
                folder.rmdir()
            raise UsageError(
                f"no run has answered in {run_dir} for {timeout_s:.0f} s: none of this user is running there"
            )
        sleep(_LOOK_EVERY_S)
    told = json.loads(answer.read_text(encoding="utf-8"))
    answer.unlink()
    if "refused" in told:
        raise UsageError(told["refused"])
    return told["done"]


def _write(path: Path, text: str) -> None:
    """Writes a file that a reader sees whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.rename(path)


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{text!r} is no number of workers") from None
