"""`headrace bench`: what the hardware gives, and whether a GPU would help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.options import JsonOption, help_option
from headrace.cli.output import answering
from headrace.errors import UnfitMachine

_EXAMPLES = """
  headrace bench --quick
  headrace bench --out bench.html
  headrace bench --only matrix,memory
  headrace bench --quick --json > here.json
  headrace bench --beside other.json --out bench.html
"""


def bench(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and networks: about a minute.")] = False,
    only: Annotated[
        str,
        typer.Option(
            "--only", metavar="PART,PART", help="Of matrix, memory, transfer, storage and networks.", show_default=False
        ),
    ] = "",
    beside: Annotated[
        Path | None,
        typer.Option(
            "--beside",
            metavar="FILE.json",
            show_default=False,
            help="Figures to compare with: what --json printed on another machine, or published ones in that form.",
        ),
    ] = None,
    folder: Annotated[
        Path,
        typer.Option("--folder", metavar="DIR", help="Where the files are written that storage is measured with."),
    ] = Path(),
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.html", show_default=False, help="Write a page with bars, too.")
    ] = None,
    as_json: JsonOption = False,
    show_help: Annotated[bool, help_option(_EXAMPLES)] = False,
) -> None:
    """Measure what the hardware gives.

    Matrix products by size and type, memory, transfers to a GPU, reading files, and inference and training of known
    networks: on the CPU by threads, and on the first GPU without cuDNN, with it, and compiled. What is not there is
    named with the reason. A paragraph at the end says whether a GPU would help.
    """
    with answering(as_json) as answer:
        # Lazily: it imports torch.
        from headrace.bench.advice import answer as advice
        from headrace.bench.figures import MachineFigures
        from headrace.bench.measuring import GROUPS, measure
        from headrace.bench.page import write_page
        from headrace.bench.settings import FULL, QUICK
        from headrace.bench.text import lines

        compared = MachineFigures.load(beside) if beside else None
        chosen = tuple(only.split(",")) if only else GROUPS
        found = measure(QUICK if quick else FULL, folder, chosen, lambda line: typer.echo(line, err=True))
        said = advice(found, compared)
        if out:
            try:
                write_page(out, found, said, compared)
            except OSError as error:
                raise UnfitMachine(
                    f"the page {out} cannot be written: {error.strerror}; name another place with --out"
                ) from error
        answer.give(found.plain(), "\n".join([*lines(found, said, compared), *([f"page: {out}"] if out else [])]))
