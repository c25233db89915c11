"""`headrace doctor`: what this machine has and lacks, with remedies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.checks import Check, Verdict, examine, worst
from headrace.cli.options import JsonOption, help_option
from headrace.cli.output import ExitCode, answering
from headrace.spec.plain import to_plain

if TYPE_CHECKING:
    from rich.table import Table

_EXAMPLES = """
  headrace doctor
  headrace doctor --json | jq '.checks[] | select(.verdict != "ok")'
"""

_STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.PROBLEM: "red"}


def doctor(
    as_json: JsonOption = False,
    show_help: Annotated[bool, help_option(_EXAMPLES)] = False,
) -> None:
    """Say what this machine has and what it lacks.

    Versions, cores, memory, shared memory, accelerators, disk: each line is ok, a warning or a problem,
    with a remedy; a problem makes the exit code 3.
    """
    with answering(as_json) as answer:
        checks = examine()
        verdict = worst(checks)
        if answer.as_json:
            answer.document({"verdict": verdict.value, "checks": [to_plain(check) for check in checks]})
        else:
            answer.show(_table(checks))
    if verdict is Verdict.PROBLEM:
        raise typer.Exit(ExitCode.ENVIRONMENT)


def _table(checks: Sequence[Check]) -> Table:
    # Lazily: `--help` need not wait for rich.
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        found = f"{check.found}\n-> {check.remedy}" if check.remedy else check.found
        table.add_row(Text(check.verdict.value, style=_STYLES[check.verdict]), Text(check.name), Text(found))
    return table
