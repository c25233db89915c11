"""Options that go together: those that would change nothing beside the others are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import UsageError

if TYPE_CHECKING:
    from headrace.strategies import Strategy


def refuse_idle(given: Mapping[str, bool], why: str) -> None:
    """Raises UsageError where options are given that would change nothing.

    Args:
        given: whether each option has another value than its default, by name.
    """
    names = [name for name, is_given in given.items() if is_given]
    if names:
        raise UsageError(f"{', '.join(names)}: {why}")


def refuse_settings(job: Path | None, settings: Sequence[str] | None) -> None:
    """Raises UsageError where --set is given without a job's file."""
    refuse_idle({"--set": bool(settings) and job is None}, "for a job; name its file, or leave it out")


def resolved(strategy: str, workers: int | None, servers: int | None = None) -> Strategy:
    """Returns the strategy of a name with so many workers and servers.

    Raises:
        UsageError: it has other numbers of its own.
    """
    # Lazily: it imports torch.
    from headrace.strategies import resolve

    chosen = resolve(strategy, workers)
    count = count_of(chosen) or 1
    if workers is not None and workers != count:
        other = "try --strategy mirrored" if count == 1 else "say it once"
        raise UsageError(f"--workers {workers}: {strategy} runs on {count}; {other}")
    has = getattr(chosen, "servers", None)
    if servers is None or servers == has:
        return chosen
    if has != 1:
        other = "try --strategy parameter_server" if has is None else "say it once"
        raise UsageError(f"--servers {servers}: {strategy} has {has or 'none'}; {other}")
    return replace(chosen, servers=servers)  # type: ignore[type-var]


def count_of(strategy: Strategy) -> int | None:
    """Returns the number of workers, stages or devices that a strategy has of its own."""
    # Lazily: it imports torch.
    from headrace.strategies import COUNTS

    return next((n for name in COUNTS if (n := getattr(strategy, name, None)) is not None), None)
