"""A verification as one page."""

from __future__ import annotations

from pathlib import Path

from headrace.api.verification.differences import DIFFERS
from headrace.api.verification.verification import Verification, answer, headline, where
from headrace.report.format import MISSING
from headrace.report.views.document import document, html_text, scrolled_table, table_row

_HOW = {
    "The plain loop": (
        "src/headrace/api/verification/plain_loop.py, 80 lines of plain PyTorch in one process: the job's own model "
        "object, loss, optimizer and hooks; loss.backward(), optimizer.step()."
    ),
    "The run": "The strategy's real processes; saved after every round, and gone on with from the middle in new ones.",
    "Equal": (
        "In double precision to 1e-9, and to 1e-6 of how far the parameters have moved. In single precision what "
        "rounding explains; where that is in doubt, double precision decides."
    ),
}


def write_page(path: Path, found: Verification, name: str) -> None:
    """Writes the page; makes its directory."""
    head = (
        f'<header>\n<p class="eyebrow">headrace verify</p>\n<h1>{html_text(name)}</h1>\n'
        f'<p class="lede">{html_text(headline(found))}. {html_text(answer(found))}</p>\n</header>'
    )
    told = [*map(where, found.differences), f"compared with: {found.reference}", *found.notes]
    rows = [
        table_row(
            html_text(row.what),
            [
                row.verdict,
                MISSING if row.largest is None else f"{row.largest:.1e}",
                MISSING if row.round is None else str(row.round),
                f'<div class="words">{html_text(row.name or row.why)}</div>',
            ],
            "best" if row.verdict == DIFFERS else "",
        )
        for row in found.rows
    ]
    table = scrolled_table(("", "largest difference", "first round", ""), rows, "compared")
    items = "".join(f"<li>{html_text(line)}</li>" for line in told)
    how = "".join(f"<dt>{html_text(term)}</dt><dd>{html_text(words)}</dd>" for term, words in _HOW.items())
    body = [
        head,
        f'<section>\n<h2>Compared</h2>\n{table}\n<ul class="notices">{items}</ul>\n</section>',
        f'<section>\n<h2>How it is compared</h2>\n<dl class="how">{how}</dl>\n</section>',
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(document(f"verify {name}", body), encoding="utf-8")
