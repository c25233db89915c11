"""`headrace ps` and `headrace stop`: the runs of this machine and of a directory, and the orderly end of one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Annotated, Any

from headrace.cli.command import argument, command, option
from headrace.cli.options import MOST_SECONDS
from headrace.cli.output import Answer, cut
from headrace.errors import UnfitMachine, UsageError
from headrace.machine import disk
from headrace.report.format import short

_EXAMPLES = """
  headrace ps
  headrace ps runs
"""
_STOP_EXAMPLES = """
  headrace stop runs/a
"""
_LOOK_S = 0.1
_PROCESSES = Path("/proc")


@command(_EXAMPLES)
def ps(
    answer: Answer,
    directories: Annotated[list[Path] | None, argument("[DIR]", "Directories of runs; these are listed, too.")] = None,
) -> None:
    """List the runs of this machine and of directories."""
    # Lazily: `--help` need not wait for the events.
    from headrace.report.model.glance import DEPTH, glanced, runs_below

    leaders = {run_dir: leader for run_dir, leader in _living().items() if leader}
    found = dict.fromkeys(leaders)
    for directory in directories or ():
        if not (below := runs_below(directory)):
            raise UsageError(f"{directory} holds no run, nor do the folders up to {DEPTH} below; name another one")
        found |= dict.fromkeys(each.resolve() for each in below)
    rows: list[dict[str, Any]] = []
    for run_dir in found:
        rows.append({"run_dir": str(run_dir), **glanced(run_dir), "process": leaders.get(run_dir)})
    answer.give({"runs": rows}, "\n".join(_table(rows)) if rows else "no run goes on on this machine")


def _table(rows: list[dict[str, Any]]) -> list[str]:
    here = f"{Path.cwd()}{os.sep}"
    lines = [f"{'process':>8}  {'status':<12}{'strategy':<20}{'workers':>7}  {'step':>13}  {'loss':>6}  run"]
    for row in rows:
        step = f"{row['step'] or 0}/{row['rounds']}" if row["rounds"] else str(row["step"] or 0)
        lines.append(
            f"{row['process'] or '':>8}  {row['status']:<12}{cut(row['strategy'], 20):<20}{row['workers'] or '':>7}  "
            f"{step:>13}  {short(row['loss']):>6}  {row['run_dir'].removeprefix(here)}"
        )
    return lines


@command(_STOP_EXAMPLES)
def stop(
    answer: Answer,
    run_dir: Annotated[Path, argument("RUN_DIR", "The directory of a run that goes on.")],
    timeout_s: Annotated[
        float, option("--timeout-s SECONDS", "How long to wait for its end.", min=0, max=MOST_SECONDS)
    ] = 60.0,
) -> None:
    """End a run in order.

    All workers end after the same round, and a last checkpoint is saved.
    """
    leader = _living().get(run_dir.resolve())
    if leader is None:
        raise UsageError(f"no run goes on in {run_dir} on this machine; headrace ps lists those that do")
    try:
        os.kill(leader, signal.SIGTERM)
    except PermissionError as error:
        raise UnfitMachine(f"process {leader} is another user's: {error.strerror}; ask as that user") from None
    deadline = time.monotonic() + timeout_s
    while run_dir.resolve() in _living():
        if time.monotonic() > deadline:
            raise UnfitMachine(
                f"{run_dir} was asked to end, and process {leader} goes on after {timeout_s:g} s; it ends after its "
                f"round and its last checkpoint: wait, or end it at once with kill -9 {leader}"
            )
        time.sleep(_LOOK_S)
    from headrace.report.model.glance import glanced

    row = glanced(run_dir)
    text = f"{run_dir}: {row['status']} after step {row['step'] or 0}; --resume goes on from there"
    answer.give({"run_dir": str(run_dir), "process": leader, **row}, text)


def _living() -> dict[Path, int]:
    """Returns the directories of runs whose lock some process of this user holds, with the process that leads each.

    That is the one whose number is in the lock, 0 where it is gone and others have not ended yet.
    """
    found: dict[Path, int] = {}
    for process in _PROCESSES.iterdir():
        if not process.name.isdecimal():
            continue
        try:
            opened = [os.readlink(each) for each in (process / "fd").iterdir()]
        except OSError:
            continue  # It has ended, or is another user's.
        for name in opened:
            path = Path(name)
            if path.name == "lock" and disk.is_folder(path.parent / "events"):
                leader = path.read_text(encoding="ascii", errors="replace")[:20]
                if leader == process.name or path.parent not in found:
                    found[path.parent] = int(process.name) if leader == process.name else 0
    return found
