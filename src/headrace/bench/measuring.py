"""Measures all parts of a machine, or some."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from headrace.bench.arithmetic import matrix, memory, transfer
from headrace.bench.figures import Figure, Gap, MachineFigures
from headrace.bench.networks import networks
from headrace.bench.settings import Effort, disturbance, machine_facts
from headrace.bench.storage import storage
from headrace.errors import UnknownName

GROUPS = ("matrix", "memory", "transfer", "storage", "networks")
"""What may be measured alone."""


def measure(
    effort: Effort, folder: Path, only: Sequence[str] = GROUPS, say: Callable[[str], object] = lambda line: None
) -> MachineFigures:
    """Measures parts of this machine; `say` is told each number when it is there.

    Raises UnknownName for no such part, UnfitMachine if files cannot be written into `folder`.
    """
    for name in only:
        if name not in GROUPS:
            raise UnknownName("part", name, GROUPS)
    ends = time.monotonic() + effort.until_s
    facts, disturbed = machine_facts(), disturbance()
    figures: list[Figure] = []
    gaps: list[Gap] = []
    for found in _all(effort, folder, only, ends):
        if isinstance(found, Gap):
            gaps.append(found)
            continue
        figures.append(found)
        say(f"{found.part}: {found.row}, {found.column}: {found.value:.4g} {found.unit}")
    return MachineFigures(facts["host"], tuple(figures), tuple(gaps), facts=facts, disturbed=disturbed)


def _all(effort: Effort, folder: Path, only: Iterable[str], ends: float) -> Iterator[Figure | Gap]:
    measured: dict[str, Callable[[], Iterator[Figure | Gap]]] = {
        "matrix": lambda: matrix(effort),
        "memory": lambda: memory(effort),
        "transfer": lambda: transfer(effort),
        "storage": lambda: storage(effort, folder),
        "networks": lambda: networks(effort, ends),
    }
    for name in GROUPS:
        if name in only:
            yield from measured[name]()
