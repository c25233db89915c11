"""Measures all parts of a machine, or some."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from headrace.bench.arithmetic import matrix, memory, transfer
from headrace.bench.figures import Figure, Gap, MachineFigures
from headrace.bench.networks import networks
from headrace.bench.saving import OtherWorkGauge, SavedFigures, merged
from headrace.bench.settings import Effort, machine_facts
from headrace.bench.storage import storage
from headrace.errors import UnknownName
from headrace.report.format import plural

GROUPS = ("matrix", "memory", "transfer", "storage", "networks")
"""What may be measured alone."""


def measure(
    effort: Effort,
    folder: Path,
    only: Sequence[str] = GROUPS,
    say: Callable[[str], object] = lambda line: None,
    save: Path | None = None,
) -> MachineFigures:
    """Measures parts of this machine.

    Args:
        say: is told each number when it is there.
        save: a file that keeps each number; those that it has already are not measured again.

    Raises:
        UnknownName: no such part.
        UsageError: `save` has figures of another machine, other versions or other options.
        UnfitMachine: files cannot be written into `folder`, or `save` cannot.
    """
    for name in only:
        if name not in GROUPS:
            raise UnknownName("part", name, GROUPS)
    ends = time.monotonic() + effort.until_s
    facts = machine_facts()
    options = {"effort": effort.name, **({"folder": str(folder.resolve())} if "storage" in only else {})}
    saved = SavedFigures(save, MachineFigures(facts["host"], (), facts=facts, options=options))
    kept = saved.before
    if kept.figures:
        say(f"{save} has {plural(len(kept.figures), 'number')} already; the others follow")
    figures: list[Figure] = []
    gaps: list[Gap] = []
    gauge = OtherWorkGauge()
    for found in _all(effort, folder, only, ends, kept):
        if isinstance(found, Gap):
            gaps.append(found)
        else:
            figures.append(found)
            if found != kept.at(found.part, found.row, found.column):
                gauge.measured(found.part)
                saved.keep(merged(kept, figures, gaps, gauge.found()))
                say(f"{found.part}: {found.row}, {found.column}: {found.value:.4g} {found.unit}")
        gauge.skipped()
    result = merged(kept, figures, gaps, gauge.found())
    saved.keep(result)
    return result


def _all(
    effort: Effort, folder: Path, only: Iterable[str], ends: float, kept: MachineFigures
) -> Iterator[Figure | Gap]:
    measured: dict[str, Callable[[], Iterator[Figure | Gap]]] = {
        "matrix": lambda: matrix(effort, kept),
        "memory": lambda: memory(effort, kept),
        "transfer": lambda: transfer(effort, kept),
        "storage": lambda: storage(effort, folder, kept),
        "networks": lambda: networks(effort, ends, kept),
    }
    for name in GROUPS:
        if name in only:
            yield from measured[name]()
