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
from headrace.cli.commands.launch import is_job, stdout_for_results
from headrace.cli.engines import own_engine, refuse_launcher
from headrace.cli.jobfile import check_file, find_job, load_job
from headrace.cli.options import (
    JsonOption,
    RunDirOption,
    ServersOption,
    SettingsOption,
    WorkersOption,
    check_strategies,
    complete_strategy,
    help_option,
    job_name,
    option,
)
from headrace.cli.output import ExitCode, answering
from headrace.errors import RunFailed, UnfitMachine
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
    Path,
    typer.Argument(
        metavar="JOB.py|SCRIPT.py",
        show_default=False,
        help="A job's file; or a script that calls `headrace.setup`, `fit` or `launch`.",
    ),
]


def verify(
    path: _FileArgument,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGUMENTS", show_default=False, help="What a script finds in sys.argv."),
    ] = None,
    strategy: Annotated[
        str,
        typer.Option(
            "--strategy", metavar="NAME", autocompletion=complete_strategy, help="How the run is distributed."
        ),
    ] = "mirrored",
    workers: WorkersOption = None,
    servers: ServersOption = None,
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", min=2, help="How many are compared.")] = 6,
    examples: Annotated[
        int | None,
        option("--examples", metavar="N", min=1, help="Of the data. Default: two epochs within the rounds."),
    ] = None,
    double: Annotated[
        bool, typer.Option("--double", help="In double precision at once, not only where rounding is in doubt.")
    ] = False,
    html: Annotated[Path | None, option("--html", metavar="FILE", help="Write a page, too.")] = None,
    run_dir: RunDirOption = None,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
    show_help: Annotated[bool, help_option(_EXAMPLES)] = False,
) -> None:
    """Prove that a strategy trains as a plain loop does.

    The first rounds are trained twice from the same start, by such a loop and by the strategy's own processes, and
    compared: losses, parameters, buffers, optimizer state, evaluations, the model that comes back, a resumed run.
    The exit code is 1 where something differs that should not, with the likely cause.
    """
    with answering(as_json) as answer:
        refuse_launcher("verify")
        check_strategies([strategy])
        check_file(path, "job file")
        if is_job(path):
            refuse_idle({" ".join(arguments or ()): bool(arguments)}, "for a script, and this file defines a job")
            found = _of_job(path, strategy, (workers, servers), settings or (), rounds, examples, double, run_dir)
        else:
            given = {"--strategy": strategy != "mirrored", "--servers": servers is not None, "--double": double}
            given |= {"--examples": examples is not None, "--set": bool(settings), "--run-dir": run_dir is not None}
            refuse_idle(given, "for a job, and this file is a script, which has its own; leave it out")
            with stdout_for_results(keep_clean=True):
                found = _of_script(path, arguments or (), workers, rounds)
        from headrace.api.verification.page import write_page
        from headrace.api.verification.verification import plain_values, table

        if html:
            try:
                write_page(html, found, job_name(path))
            except OSError as error:
                raise UnfitMachine(f"the page {html} cannot be written: {error.strerror}; name another") from error
        answer.give(plain_values(found), "\n".join([*table(found), *([f"page: {html}"] if html else [])]))
    if not found.equal:
        raise typer.Exit(ExitCode.RUN_FAILED)


def _say(line: str) -> None:
    typer.echo(line, err=True)


def _of_job(
    path: Path,
    strategy: str,
    counts: tuple[int | None, int | None],
    settings: Sequence[str],
    rounds: int,
    examples: int | None,
    double: bool,
    run_dir: Path | None,
) -> Verification:
    find_job(path)
    # In this order: the engine forks this process, which must not have run the job file before.
    with own_engine() as engine:
        job, chosen = load_job(path, settings), resolved(strategy, *counts)
        # Lazily: it imports torch.
        from headrace.api.verification.verify import verify as verified

        more = {"rounds": rounds, "double": double, "examples": examples, "run_dir": run_dir}
        return verified(job, chosen, engine=engine, say=_say, **more)  # type: ignore[arg-type]


def _of_script(script: Path, arguments: Sequence[str], workers: int | None, rounds: int) -> Verification:
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
        _say(f"{script.name}, alone")
        _run_recorded(alone, script, folder / "alone", rounds)
        found = script_alone.read_verification(folder / "alone")
        if found is not None:
            return found
        _say(f"{script.name}, launched")
        _run_recorded(lambda: launch_script(script, arguments, count), script, folder / "launched", rounds)
        found = compare_scripts(script, folder / "alone", folder / "launched", count)
        return replace(found, seconds=perf_counter() - began)


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
