"""`headrace verify`: a job's first rounds, or a script's first steps, under a strategy and in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.combinations import refuse_idle, resolved
from headrace.cli.command import argument, command, option
from headrace.cli.commands.launch import is_job, stdout_for_results
from headrace.cli.engines import job_on_engine, refuse_launcher
from headrace.cli.jobfile import check_file, find_job
from headrace.cli.options import (
    RunDirOption,
    ServersOption,
    SettingsOption,
    StrategyOption,
    WorkersOption,
    check_strategies,
    job_name,
)
from headrace.cli.output import Answer, ExitCode, say, writing
from headrace.errors import RunFailed
from headrace.machine.identity import STEPS, STEPS_FOLDER
from headrace.machine.temporary import temporary_folder

if TYPE_CHECKING:
    from headrace.api.verification.verification import Verification

_EXAMPLES = """
  headrace verify job.py --workers 2
  headrace verify job.py --strategy "pipeline(stages=2)" --double
  headrace verify job.py --workers 2 --rounds 12 --html verify.html
  headrace verify job.py --workers 2 --json | jq .equal
  headrace verify script.py --workers 2
"""

_FileArgument = Annotated[
    Path, argument("JOB.py|SCRIPT.py", "A job's file; or a script that calls `headrace.setup`, `fit` or `launch`.")
]


@command(_EXAMPLES, "verifying the job")
def verify(
    answer: Answer,
    path: _FileArgument,
    arguments: Annotated[list[str] | None, argument("ARGUMENTS", "What a script finds in sys.argv.")] = None,
    strategy: StrategyOption = "mirrored",
    workers: WorkersOption = None,
    servers: ServersOption = None,
    rounds: Annotated[int, option("--rounds N", "How many are compared.", min=2)] = 6,
    examples: Annotated[
        int | None, option("--examples N", "Of the data. Default: two epochs within the rounds.", min=1)
    ] = None,
    double: Annotated[
        bool, option("--double", "In double precision at once, not only where rounding is in doubt.")
    ] = False,
    html: Annotated[Path | None, option("--html FILE", "Write a page, too.")] = None,
    run_dir: RunDirOption = None,
    settings: SettingsOption = None,
) -> None:
    """Prove that a strategy trains as a plain loop does.

    The first rounds are trained twice from the same start, by such a loop and by the strategy's own processes, and
    compared: losses, parameters, buffers, optimizer state, evaluations, the model that comes back, a resumed run.
    The exit code is 1 where something differs that should not, with the likely cause.
    """
    refuse_launcher("verify")
    check_strategies([strategy])
    check_file(path, "job file")
    if is_job(path):
        refuse_idle({" ".join(arguments or ()): bool(arguments)}, "for a script, and this file defines a job")
        find_job(path)
        with job_on_engine(path, settings) as (job, engine):
            chosen = resolved(strategy, workers, servers)
            # Lazily: it imports torch.
            from headrace.api.verification.verify import verify as verified

            verification = verified(
                job, chosen, rounds=rounds, double=double, examples=examples, run_dir=run_dir, engine=engine, say=say
            )
    else:
        given = answer.given("--strategy", "--servers", "--double", "--examples", "--set", "--run-dir")
        refuse_idle(given, "for a job, and this file is a script, which has its own; leave it out")
        with stdout_for_results(keep_clean=True):
            verification = of_script(path, arguments or (), workers, rounds)
    from headrace.api.verification.page import write_page
    from headrace.api.verification.verification import plain_values, table

    if html:
        with writing("the page", html, "--html"):
            write_page(html, verification, job_name(path))
    answer.give(plain_values(verification), "\n".join([*table(verification), *([f"page: {html}"] if html else [])]))
    if not verification.equal:
        raise typer.Exit(ExitCode.RUN_FAILED)


def of_script(script: Path, arguments: Sequence[str], workers: int | None, rounds: int) -> Verification:
    """Runs a script alone and, if it calls `setup`, launched, until each has made so many steps."""
    # Lazily: they import torch.
    from headrace.api.verification import script_alone
    from headrace.api.verification.script_steps import compare_scripts
    from headrace.engine.base import end_with, leave_alone
    from headrace.engine.local.engine import launch_script

    began, count = perf_counter(), workers or 2

    def alone() -> int:
        command = [sys.executable, "-m", script_alone.__name__, str(workers or 0), str(script), *arguments]
        process = subprocess.Popen(command)
        end_with(process.pid)
        try:
            # Where it is killed, what it has written goes with the folder below.
            return process.wait()
        finally:
            leave_alone(process.pid)

    with temporary_folder() as folder:
        say(f"{script.name}, alone")
        _run_recorded(alone, script, folder / "alone", rounds)
        verification = script_alone.read_verification(folder / "alone")
        if verification is not None:
            return verification
        say(f"{script.name}, launched")
        _run_recorded(lambda: launch_script(script, arguments, count), script, folder / "launched", rounds)
        verification = compare_scripts(script, folder / "alone", folder / "launched", count)
        return replace(verification, seconds=perf_counter() - began)


def _run_recorded(run: Callable[[], int], script: Path, folder: Path, rounds: int) -> None:
    os.environ |= {STEPS_FOLDER: str(folder), STEPS: str(rounds)}
    try:
        code = run()
    finally:
        del os.environ[STEPS_FOLDER], os.environ[STEPS]
    if code:
        from headrace.engine.local.fork_server import describe_end

        # A launch says itself which rank was lost; the script alone says nothing where it was killed.
        ended = describe_end(code) if code < 0 else f"ended with exit code {code}"
        raise RunFailed(f"{script}, {folder.name}: {ended}; what it said stands above")
