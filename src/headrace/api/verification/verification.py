"""What a verification has found, as a table of 80 columns and as JSON values."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from headrace.api.verification.differences import DIFFERS, SKIPPED, Row
from headrace.report.format import clean, duration, plural

_WIDTH = 80


@dataclass(frozen=True)
class Verification:
    """What was compared, and what came out.

    Attributes:
        strategy: its name.
        workers, rounds, batch, examples: of the runs that were compared.
        precision: "double" or "single".
        reference: what the run was compared with.
        rows: one for each thing that was compared.
        notes: what a reader must know.
        cause: of a difference, as far as it was found.
        seconds: how long it took.

    Examples:
        >>> found = hr.verify(job, hr.Mirrored(workers=2), rounds=2)
        >>> found.equal, found.rows[0].what
        (True, 'losses')
    """

    strategy: str
    workers: int
    rounds: int
    batch: int
    examples: int
    precision: str
    reference: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    cause: str = ""
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether something was compared, and nothing differs but what differs by definition."""
        return not self.differences and any(row.verdict != SKIPPED for row in self.rows)

    @property
    def differences(self) -> tuple[Row, ...]:
        """The rows that differ and should not."""
        return tuple(row for row in self.rows if row.verdict == DIFFERS)

    def __str__(self) -> str:
        return "\n".join(table(self))


def table(found: Verification) -> Iterator[str]:
    """Yields the lines of the table, of at most 80 columns."""
    yield from textwrap.wrap(clean(headline(found)), _WIDTH)
    yield from textwrap.wrap(f"compared with: {found.reference}", _WIDTH, subsequent_indent="  ")
    yield ""
    wide = max(len(row.what) for row in found.rows) + 2
    yield f"{'':<{wide}}{'':<13}{'largest':>8}"
    for row in found.rows:
        largest = "" if row.largest is None else f"{row.largest:.1e}"
        yield f"{row.what:<{wide}}{row.verdict:<13}{largest:>8}  {row.why}".rstrip()
    yield ""
    for line in (*map(where, found.differences), *found.notes, answer(found)):
        yield from textwrap.wrap(clean(line), _WIDTH, subsequent_indent="  ")


def headline(found: Verification) -> str:
    """Returns what was trained."""
    workers = plural(found.workers, "worker")
    data = f"{plural(found.rounds, 'round')} of {found.batch} of {plural(found.examples, 'example')}"
    return f"{found.strategy}, {workers}: {data}, {found.precision} precision"


def where(row: Row) -> str:
    """Returns where a row begins to differ."""
    begins = f" from round {row.round} on" if row.round is not None else ""
    first = f", first {row.name}" if row.name else ""
    return f"{row.what}: differs{begins}{first}, by {row.by:.2g}"


def answer(found: Verification) -> str:
    """Returns the last sentence."""
    took = f" ({duration(found.seconds)})" if found.seconds else ""
    if all(row.verdict == SKIPPED for row in found.rows):
        return f"nothing was compared{took}"
    if found.equal:
        return f"equal: {found.strategy} computes what it is compared with{took}"
    return f"differs{f'; likely cause: {found.cause}' if found.cause else ''}{took}"


def plain_values(found: Verification) -> dict[str, Any]:
    """Returns it as JSON values."""
    return {"equal": found.equal, **asdict(found)}
