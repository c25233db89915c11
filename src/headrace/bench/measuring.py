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
    saved = begun(save, MachineFigures(facts["host"], (), facts=facts, options=options))
    if saved.figures:
        say(f"{save} has {plural(len(saved.figures), 'number')} already; the others follow")
    figures: list[Figure] = []
    gaps: list[Gap] = []
    gauge = OtherWorkGauge()
    measured: dict[str, Callable[[], Iterator[Figure | Gap]]] = {
        "matrix": lambda: matrix(effort, saved),
        "memory": lambda: memory(effort, saved),
        "transfer": lambda: transfer(effort, saved),
        "storage": lambda: storage(effort, folder, saved),
        "networks": lambda: networks(effort, ends, saved),
    }
    for entry in chain.from_iterable(measured[name]() for name in GROUPS if name in only):
        if isinstance(entry, Gap):
            gaps.append(entry)
        else:
            figures.append(entry)
            if entry != saved.at(entry.part, entry.row, entry.column):
                gauge.measured(entry.part)
                keep(save, merged(saved, figures, gaps, gauge.work()))
                say(f"{entry.part}: {entry.row}, {entry.column}: {entry.value:.4g} {entry.unit}")
        gauge.skipped()
    result = merged(saved, figures, gaps, gauge.work())
    keep(save, result)
    return result
