"""`headrace compare`: one job under several strategies, one table, one page."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.jobfile import find_job, load_job
from headrace.cli.options import (
    Device,
    DeviceOption,
    JobFile,
    JsonOption,
    RunDirOption,
    SettingsOption,
    TensorBoardOption,
    TimeoutOption,
    WorkersOption,
    check_strategies,
    complete_strategies,
    help_option,
    split_names,
)
from headrace.cli.output import ExitCode, answering, show_comparison
from headrace.cli.runs import (
    check_tensorboard,
    default_run_dir,
    job_name,
    own_engine,
    refuse_launcher,
    saying_where,
    tensorboards,
)

_EXAMPLES = """
  headrace compare job.py --workers 2
  headrace compare job.py --strategies one_device,mirrored --workers 2
  headrace compare job.py --workers 2 --set epochs=1 --json | jq .verdict
"""


def compare(
    path: JobFile,
    strategies: Annotated[
        str,
        typer.Option(
            "--strategies",
            metavar="NAME,NAME,...",
            autocompletion=complete_strategies,
            help="Under which it is trained, one after the other.",
        ),
    ] = "one_device,mirrored,central_storage",
    workers: WorkersOption = None,
    device: DeviceOption = Device.AUTO,
    run_dir: RunDirOption = None,
    settings: SettingsOption = None,
    timeout_s: TimeoutOption = 10.0,
    tensorboard: TensorBoardOption = None,
    as_json: JsonOption = False,
    show_help: Annotated[bool, help_option(_EXAMPLES)] = False,
) -> None:
    """Train the job of a file under several strategies.

    Progress goes to stderr, the table to stdout, with the path of a page that needs no other file.
    """
    with answering(as_json) as answer:
        refuse_launcher("compare")
        names = split_names(strategies)
        check_strategies(names)
        find_job(path)
        check_tensorboard(tensorboard)
        where = run_dir or default_run_dir(f"compare-{job_name(path)}")
        # In this order for the same reason as in `train`.
        with own_engine() as engine, saying_where(where):
            job = load_job(path, settings or ())
            from headrace.api.comparison import compare as compare_strategies
            from headrace.strategies import resolve

            chosen = [resolve(name, workers) for name in names]
            with tensorboards(tensorboard) as on_event:
                comparison = compare_strategies(
                    job,
                    chosen,
                    device=device.value,
                    run_dir=where,
                    on_event=on_event,
                    timeout_s=timeout_s,
                    engine=engine,
                )
        show_comparison(answer, comparison.summaries, comparison.references, where, comparison.page)
    if any(summary.status == "interrupted" for summary in comparison.summaries):
        raise typer.Exit(ExitCode.INTERRUPTED)
