"""Measures all parts of a machine, or some."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from headrace.bench.arithmetic import matrix, memory, transfer
from headrace.bench.figures import Figure, Gap, MachineFigures
from headrace.bench.networks import networks
from headrace.bench.saving import OtherWorkGauge, begun, keep, merged
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
    kept = begun(save, MachineFigures(facts["host"], (), facts=facts, options=options))
    if kept.figures:
        say(f"{save} has {plural(len(kept.figures), 'number')} already; the others follow")
    figures: list[Figure] = []
    gaps: list[Gap] = []
    gauge = OtherWorkGauge()
    measured: dict[str, Callable[[], Iterator[Figure | Gap]]] = {
        "matrix": lambda: matrix(effort, kept),
        "memory": lambda: memory(effort, kept),
        "transfer": lambda: transfer(effort, kept),
        "storage": lambda: storage(effort, folder, kept),
        "networks": lambda: networks(effort, ends, kept),
    }
    for found in chain.from_iterable(measured[name]() for name in GROUPS if name in only):
        if isinstance(found, Gap):
            gaps.append(found)
        else:
            figures.append(found)
            if found != kept.at(found.part, found.row, found.column):
                gauge.measured(found.part)
                keep(save, merged(kept, figures, gaps, gauge.found()))
                say(f"{found.part}: {found.row}, {found.column}: {found.value:.4g} {found.unit}")
        gauge.skipped()
    result = merged(kept, figures, gaps, gauge.found())
    keep(save, result)
    return result
