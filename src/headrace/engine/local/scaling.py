"""Adds or removes workers of a run that goes on: a command asks in its directory, its launcher answers there.

    headrace workers add 2 runs/a        runs/a/staffing/7f3a.wish  ──► the launcher looks, a few times a second
                                         runs/a/staffing/7f3a.answer ◄── starts them, or says why not

Files and not a socket: no port is open, and the directory's permissions say who may change the run.
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
        # Of a run before in this directory.
        for left in self._folder.glob("*"):
            left.unlink()

    def look(self, change: Callable[[int], str]) -> None:
        """Answers the requests that lie in the directory.

        Args:
            change: adds so many workers, removes them below 0; returns what happened. Raises `UsageError`.
        """
        for wish in sorted(self._folder.glob("*.wish")):
            text = wish.read_text(encoding="utf-8", errors="replace")[:_LONGEST]
            try:
                answer = {"done": change(_number(text))}
            except UsageError as error:
                answer = {"refused": str(error)}
            wish.unlink()
            part = wish.with_suffix(".part")
            part.write_text(json.dumps(answer), encoding="utf-8")
            part.rename(wish.with_suffix(".answer"))


def ask_for_workers(run_dir: Path, count: int, timeout_s: float = _ANSWER_S) -> str:
    """Asks a run that goes on for further workers, or below 0 to let some go; returns what its launcher says.

    Raises:
        UsageError: nothing runs there, or the run cannot do that.
    """
    folder = run_dir / "staffing"
    if not run_dir.is_dir():
        raise UsageError(f"{run_dir} is no directory of a run")
    folder.mkdir(exist_ok=True)
    wish = folder / f"{secrets.token_hex(8)}.wish"
    part = wish.with_suffix(".new")
    part.write_text(str(count), encoding="utf-8")
    part.rename(wish)
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


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{text!r} is no number of workers") from None
