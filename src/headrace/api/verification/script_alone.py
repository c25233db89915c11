"""Runs a script in one process, as `headrace verify` does: WORKERS SCRIPT ARGUMENTS.

A script that calls `hr.setup` runs as it would without a launcher. Of one that calls `hr.fit` or `hr.launch`, the job
is verified in the place of that call, with its strategy and its loop; then the script ends.
"""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from headrace.api import fit
from headrace.api.arguments import FitArguments
from headrace.api.run import Run
from headrace.api.verification.verification import Verification
from headrace.api.verification.verify import verify
from headrace.errors import UsageError
from headrace.machine import disk
from headrace.machine.identity import end_verified_steps, verified_steps
from headrace.spec.job import Job
from headrace.spec.plain import finite, from_plain, to_plain
from headrace.strategies import Strategy, resolve
from headrace.worker.worker import Worker

_FOUND = "verification.json"


def read_verification(folder: Path) -> Verification | None:
    """Returns what a script's own job has given; None where it has made none."""
    path = folder / "rank-0" / _FOUND
    return from_plain(Verification, json.loads(path.read_text(encoding="utf-8"))) if disk.exists(path) else None


def _verify_instead(
    workers: int | None,
    job: Job,
    train: Callable[[Worker], None] | None,
    strategy: str | Strategy,
    arguments: FitArguments,
) -> Run:
    asked = verified_steps()
    assert asked is not None
    folder, rounds = asked
    chosen = resolve(strategy, workers)
    own = getattr(chosen, "workers", None)
    if workers is not None and own not in (None, workers):
        raise UsageError(f"--workers {workers}, and the script asks for {own}; leave it out")
    # What runs below trains.
    fit.instead = None
    end_verified_steps()

    def say(line: str) -> None:
        sys.stderr.write(f"{line}\n")

    # There the caller deletes it, also where this process is killed.
    runs = folder / "runs"
    found = verify(job, chosen, train=train, rounds=rounds, run_dir=runs, engine=arguments.engine, say=say)
    notes = ["compared: the first call of hr.fit or hr.launch; the script ended there"]
    ignored: Mapping[str, Any] = {"callbacks": arguments.callbacks, "resume": arguments.resume}
    notes += [f"{name}=... of that call had no part in it" for name, value in ignored.items() if value]
    folder.mkdir(parents=True, exist_ok=True)
    values = finite(to_plain(replace(found, notes=(*found.notes, *notes))))
    (folder / _FOUND).write_text(json.dumps(values), encoding="utf-8")
    raise SystemExit(0)


def main() -> None:
    """Runs the script that `sys.argv` names."""
    workers, script, *arguments = sys.argv[1:]
    fit.instead = partial(_verify_instead, int(workers) or None)
    sys.argv = [script, *arguments]
    # Where a script finds the files beside it.
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
