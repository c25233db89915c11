"""`headrace launch`: a plain script in several processes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.jobfile import check_file
from headrace.cli.options import JsonOption, help_option
from headrace.cli.output import answering

_EXAMPLES = """
  headrace launch train.py --workers 2
  headrace launch train.py --workers 2 --epochs 3     # the script gets --epochs
  headrace launch --workers 2 -- train.py --json      # and here --json, too
"""


def launch(
    script: Annotated[
        Path,
        typer.Argument(metavar="SCRIPT.py", show_default=False, help="A Python script that calls `headrace.setup`."),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGUMENTS", show_default=False, help="What the script finds in sys.argv."),
    ] = None,
    workers: Annotated[int, typer.Option("--workers", min=1, help="How many processes run it.")] = 2,
    as_json: JsonOption = False,
    show_help: Annotated[bool, help_option(_EXAMPLES)] = False,
) -> None:
    """Run a plain script in several processes.

    The script calls `headrace.setup`. Its output goes where it would go alone (with --json to stderr);
    the exit code is the script's.
    """
    with answering(as_json) as answer:
        check_file(script, "script")
        # Lazily: --help need not wait for the engine.
        from headrace.engine.local.engine import launch_script

        with _stdout_for_results(as_json):
            code = launch_script(script, tuple(arguments or ()), workers)
        # A process that a signal ended has a negative code; shells call it 128 + signal.
        code = 128 - code if code < 0 else code
        if answer.as_json:
            answer.document({"script": str(script), "workers": workers, "exit_code": code})
    raise typer.Exit(code)


@contextlib.contextmanager
def _stdout_for_results(keep_clean: bool) -> Iterator[None]:
    """Meanwhile processes inherit stderr as their stdout, where stdout must carry one document alone."""
    if not keep_clean:
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
