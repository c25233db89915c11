"""`headrace report`: the page and the summary of a run, from its event files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from headrace.cli.command import argument, command, option
from headrace.cli.output import Answer, show_comparison, show_run, writing
from headrace.errors import DataError
from headrace.machine import disk

if TYPE_CHECKING:
    from headrace.report.model.summary import Summary
    from headrace.report.model.verdict import References

_COMPARISON = "comparison.json"

_EXAMPLES = """
  headrace report runs/a
  headrace report runs/compare-digits --out report.html
  headrace report runs/a --json | jq .examples_per_s
"""


@command(_EXAMPLES)
def report(
    answer: Answer,
    run_dir: Annotated[Path, argument("RUN_DIR", "The directory of a run or a comparison.")],
    out: Annotated[Path | None, option("--out FILE.html", "The page. Default: report.html in RUN_DIR.")] = None,
) -> None:
    """Write the page of a run or a comparison.

    It is made from the event files, and the summary is printed; it works on a run that failed, and on one that goes on.
    """
    # Lazily: `--help` need not wait for reports.
    from headrace.report.model.summary import summarize
    from headrace.report.views.page import write_page

    page = out or run_dir / "report.html"
    if disk.is_file(run_dir / _COMPARISON):
        summaries, references = _read_comparison(run_dir)
        with writing("the page", page, "--out"):
            write_page(page, summaries, references)
        show_comparison(answer, summaries, references, run_dir, page)
    else:
        summary = summarize(run_dir)
        with writing("the page", page, "--out"):
            write_page(page, (summary,))
        show_run(answer, summary, run_dir, page)


def _read_comparison(directory: Path) -> tuple[tuple[Summary, ...], References]:
    """Reads the measured references; everything else comes from the event files."""
    from headrace.report.model.verdict import References, compared

    file = directory / _COMPARISON
    try:
        document = json.loads(file.read_text(encoding="utf-8"))
        labels = [str(run["label"]) for run in document["runs"]]
        measured = document["references"]
        references = References(
            one_device_examples_per_s=measured["one_device_examples_per_s"],
            ceiling_examples_per_s={
                int(workers): float(rate) for workers, rate in measured["ceiling_examples_per_s"].items()
            },
            one_thread_examples_per_s=measured["one_thread_examples_per_s"],
            doubts={str(label): tuple(map(str, why)) for label, why in measured.get("doubts", {}).items()},
            one_device_doubts=tuple(map(str, measured.get("one_device_doubts", ()))),
            measured_again={str(label): str(name) for label, name in measured.get("measured_again", {}).items()},
            may_differ=tuple(map(str, measured.get("may_differ", ()))),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{file} is no comparison ({error!r}); run `headrace compare` again") from error
    return tuple(compared(directory, label, references) for label in labels), references
