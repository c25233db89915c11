"""`headrace bench`: what the hardware gives, and whether a GPU would help."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from headrace.cli.combinations import refuse_idle, refuse_settings
from headrace.cli.command import argument, command, option
from headrace.cli.jobfile import find_job, load_job
from headrace.cli.options import SettingsOption, job_name
from headrace.cli.output import Answer, say, writing

if TYPE_CHECKING:
    from headrace.bench.advice import JobFacts

SaveOption = Annotated[
    Path | None,
    option(
        "--save FILE.json",
        "Keep each number there; the same command goes on where it was cut off. --beside reads it, too.",
    ),
]
_EXAMPLES = """
  headrace bench --quick
  headrace bench --out bench.html
  headrace bench --only matrix,memory
  headrace bench --save here.json
  headrace bench --quick --json > here.json
  headrace bench job.py --quick --beside other.json
  headrace bench --beside other.json --out bench.html
"""


@command(_EXAMPLES, "measuring this machine")
def bench(
    answer: Answer,
    path: Annotated[Path | None, argument("JOB.py", "A job, to say whether a GPU would help it.")] = None,
    quick: Annotated[bool, option("--quick", "Fewer sizes and networks: about a minute.")] = False,
    only: Annotated[str, option("--only PART,PART", "Of matrix, memory, transfer, storage and networks.")] = "",
    beside: Annotated[
        Path | None,
        option(
            "--beside FILE.json",
            "Figures to compare with: what --json printed on another machine, or published ones in that form.",
        ),
    ] = None,
    folder: Annotated[
        Path, option("--folder DIR", "Where the files are written that storage is measured with.")
    ] = Path(),
    out: Annotated[Path | None, option("--out FILE.html", "Write a page with bars, too.")] = None,
    save: SaveOption = None,
    settings: SettingsOption = None,
) -> None:
    """Measure what the hardware gives.

    Matrix products by size and type, memory, transfers to a GPU, reading files, and inference and training of known
    networks: on the CPU by threads, and on the first GPU without cuDNN, with it, and compiled. What is not there is
    named with the reason. A paragraph at the end says whether a GPU would help, with a job file that job.
    """
    # Lazily: it imports torch.
    from headrace.bench.advice import answer as advice
    from headrace.bench.figures import MachineFigures
    from headrace.bench.measuring import GROUPS, measure
    from headrace.bench.page import write_page
    from headrace.bench.settings import FULL, QUICK
    from headrace.bench.text import lines

    compared = MachineFigures.load(beside) if beside else None
    chosen = tuple(only.split(",")) if only else GROUPS
    refuse_settings(path, settings)
    if "storage" not in chosen:
        refuse_idle(answer.given("--folder"), "for storage, which --only leaves out")
    job = _facts(path, settings or ()) if path else None
    measured = measure(QUICK if quick else FULL, folder, chosen, say, save)
    said = advice(measured, compared, job)
    if out:
        with writing("the page", out, "--out"):
            write_page(out, measured, said, compared)
    shown = [*lines(measured, said, compared), *([f"page: {out}"] if out else [])]
    answer.give({**measured.plain(), "advice": said}, "\n".join(shown))


def _facts(path: Path, settings: Sequence[str]) -> JobFacts:
    find_job(path)
    job = load_job(path, settings)
    # Lazily: it imports torch.
    from headrace.api.model_profile import job_facts

    return job_facts(job, job_name(path), say=say)
