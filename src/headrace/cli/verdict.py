"""Verdicts on facts, as `headrace doctor` shows them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table


class Verdict(StrEnum):
    """How good a fact is; the worst is last."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Check:
    """One line of `headrace doctor`; the remedy is empty where it is ok."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


_STYLES = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.PROBLEM: "red"}


def worst(checks: Iterable[Check]) -> Verdict:
    """Returns the worst verdict of all."""
    order = list(Verdict)
    return max((check.verdict for check in checks), key=order.index, default=Verdict.OK)


def ok(name: str, found: str) -> Check:
    return Check(name, Verdict.OK, found)


def warning(name: str, found: str, remedy: str) -> Check:
    return Check(name, Verdict.WARNING, found, remedy)


def warning_if(unfit: bool, name: str, found: str, remedy: str) -> Check:
    return warning(name, found, remedy) if unfit else ok(name, found)


def problem(name: str, found: str, remedy: str) -> Check:
    return Check(name, Verdict.PROBLEM, found, remedy)


def table(checks: Sequence[Check]) -> Table:
    # Lazily: `--help` need not wait for rich.
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    shown.add_column(no_wrap=True)
    shown.add_column(no_wrap=True)
    shown.add_column(overflow="fold")
    for check in checks:
        text = f"{check.found}\n-> {check.remedy}" if check.remedy else check.found
        shown.add_row(Text(check.verdict.value, style=_STYLES[check.verdict]), Text(check.name), Text(text))
    return shown
