"""A verification as one page."""

from __future__ import annotations

from pathlib import Path

from headrace.api.verification.differences import DIFFERS
from headrace.api.verification.verification import Verification, answer, headline, where
from headrace.report.format import MISSING
from headrace.report.views.document import (
    definitions,
    html_text,
    notices,
    page_header,
    scrolled_table,
    table_row,
    write_document,
)

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
    body = [
        page_header("headrace verify", name, f"{headline(found)}. {answer(found)}"),
        f"<section>\n<h2>Compared</h2>\n{table}\n{notices(told)}\n</section>",
        f"<section>\n<h2>How it is compared</h2>\n{definitions('how', _HOW.items())}\n</section>",
    ]
    write_document(path, f"verify {name}", body)
