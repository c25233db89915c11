"""What a run and a comparison are on stdout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.cli.output import Answer
from headrace.report.model.references import References, verdict
from headrace.report.model.summary import Summary, summarize
from headrace.report.views.table import comparison_plain, comparison_table, run_plain, run_table

_MODEL = "model.safetensors"


def show_run(answer: Answer, run_dir: Path, page: Path | None = None) -> None:
    """Prints what the event files of a run say and where its files lie.

    Raises:
        UsageError: the directory holds no events.
        DataError: they are damaged.
    """
    summary = summarize(run_dir)
    model = run_dir / _MODEL
    places = {"run_dir": run_dir, "model": model if model.is_file() else None, "page": page}
    if answer.as_json:
        answer.document({**run_plain(summary), **_paths(places)})
    else:
        answer.show(run_table(summary))
        answer.text(_lines(places))


def show_comparison(
    answer: Answer, summaries: Sequence[Summary], references: References, run_dir: Path, page: Path
) -> None:
    """Prints one row a run, whether distribution paid, and where the page lies."""
    places = {"run_dir": run_dir, "page": page}
    if answer.as_json:
        answer.document({**comparison_plain(summaries, references), **_paths(places)})
    else:
        answer.show(comparison_table(summaries, references))
        answer.text("")
        answer.show(verdict(summaries, references))
        answer.text("\n" + _lines(places))


def _paths(places: Mapping[str, Path | None]) -> dict[str, str | None]:
    return {name: None if path is None else str(path) for name, path in places.items()}


def _lines(places: Mapping[str, Path | None]) -> str:
    # Not in a table: a path that is broken into lines cannot be copied.
    return "\n".join(f"{name.replace('_', ' ')}: {path}" for name, path in places.items() if path is not None)
