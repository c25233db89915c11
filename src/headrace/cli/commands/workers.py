"""`headrace workers`: add or remove workers of a running run."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.options import JsonOption, help_option
from headrace.cli.output import answering
from headrace.engine.local.scaling import ask_for_workers
from headrace.errors import UsageError

_EXAMPLES = """
  headrace workers add 2 runs/a
  headrace workers remove 1 runs/a
"""


class Change(StrEnum):
    """Whether to add or remove."""

    ADD = "add"
    REMOVE = "remove"


def workers(
    change: Annotated[
        Change, typer.Argument(metavar="add|remove", show_default=False, help="Whether to add or remove.")
    ],
    count: Annotated[int, typer.Argument(metavar="N", show_default=False, help="How many workers.")],
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", show_default=False, help="The directory of a run that goes on.")
    ],
    as_json: JsonOption = False,
    show_help: Annotated[bool, help_option(_EXAMPLES)] = False,
) -> None:
    """Add workers to a run that goes on, or let some go.

    For strategies whose workers do not wait for each other: parameter_server without a bound, and downpour.
    """
    with answering(as_json) as answer:
        if count < 1:
            raise UsageError(f"N must be at least 1, got {count}")
        told = ask_for_workers(run_dir, count if change == Change.ADD else -count)
        answer.give({"said": told}, told)
