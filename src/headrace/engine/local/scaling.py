"""Adds or removes workers of a running run: a command writes a request to its directory, its launcher an answer.

    headrace workers add 2 runs/a        runs/a/staffing/7f3a.wish   ──► the launcher reads it, starts the workers,
                                         runs/a/staffing/7f3a.answer ◄── or refuses with a reason

Files and not a socket: no port is open, and the directory's permissions decide who may change the run.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

from headrace.errors import UsageError

_LOOK_EVERY_S = 0.05
_ANSWER_S = 15.0
_LONGEST = 200


class ScaleRequests:
    """The launcher's side."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / "staffing"
        # Of an earlier run in this directory.
        for left in self._folder.glob("*"):
            left.unlink()

    def look(self, change: Callable[[int], str]) -> None:
        """Answers the requests in the directory by the result of `change`, or by the UsageError that it raises."""
        for wish in sorted(self._folder.glob("*.wish")):
            text = wish.read_text(encoding="utf-8", errors="replace")[:_LONGEST]
            try:
                answer = {"done": change(_number(text))}
            except UsageError as error:
                answer = {"refused": str(error)}
            wish.unlink()
            _write(wish.with_suffix(".answer"), json.dumps(answer))


def ask_for_workers(run_dir: Path, count: int, timeout_s: float = _ANSWER_S) -> str:
    """Asks a running run for more workers, or below 0 for fewer; returns the launcher's answer.

    Raises:
        UsageError: nothing runs there, or the run refuses.
    """
    folder = run_dir / "staffing"
    if not run_dir.is_dir():
        raise UsageError(f"{run_dir} is no directory of a run")
    folder.mkdir(exist_ok=True)
    wish = folder / f"{secrets.token_hex(8)}.wish"
    _write(wish, str(count))
    answer = wish.with_suffix(".answer")
    deadline = monotonic() + timeout_s
    while not answer.exists():
        if monotonic() > deadline:
            with suppress(FileNotFoundError):
                wish.unlink()
            raise UsageError(f"no run has answered in {run_dir} for {timeout_s:.0f} s: none is running there")
        sleep(_LOOK_EVERY_S)
    told = json.loads(answer.read_text(encoding="utf-8"))
    answer.unlink()
    if "refused" in told:
        raise UsageError(told["refused"])
    return str(told["done"])


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
