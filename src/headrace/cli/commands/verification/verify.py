"""`headrace verify`: a job's first rounds under a strategy beside a plain PyTorch loop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.combinations import resolved
from headrace.cli.engines import own_engine, refuse_launcher
from headrace.cli.jobfile import find_job, load_job
from headrace.cli.options import (
    JobFile,
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
from headrace.errors import UnfitMachine

_EXAMPLES = """
  headrace verify job.py --workers 2
  headrace verify job.py --strategy "pipeline(stages=2)" --double
  headrace verify job.py --workers 2 --rounds 12 --html verify.html
  headrace verify job.py --workers 2 --json | jq .equal
"""


def verify(
    path: JobFile,
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
        find_job(path)
        # In this order: the engine forks this process, which must not have run the job file before.
        with own_engine() as engine:
            job, chosen = load_job(path, settings or ()), resolved(strategy, workers, servers)
            # Lazily: they import torch.
            from headrace.api.verification.page import write_page
            from headrace.api.verification.verification import plain_values, table
            from headrace.api.verification.verify import verify as verified

            found = verified(
                job,
                chosen,
                rounds=rounds,
                double=double,
                examples=examples,
                run_dir=run_dir,
                engine=engine,
                say=lambda line: typer.echo(line, err=True),
            )
        if html:
            try:
                write_page(html, found, job_name(path))
            except OSError as error:
                raise UnfitMachine(f"the page {html} cannot be written: {error.strerror}; name another") from error
        answer.give(plain_values(found), "\n".join([*table(found), *([f"page: {html}"] if html else [])]))
    if not found.equal:
        raise typer.Exit(ExitCode.RUN_FAILED)
