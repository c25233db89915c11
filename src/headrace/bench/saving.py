"""The file of a measurement that goes on where the last one ended, and what other programs did meanwhile."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from headrace.bench.figures import PARTS, Figure, Gap, MachineFigures, OtherWork
from headrace.errors import UnfitMachine, UsageError
from headrace.machine import disk
from headrace.machine.resources import own_processor_s, processor_times
from headrace.report.format import percent

IDLE_SHARE = 0.05
"""Most of the processors' time that others may take while an idle machine is measured."""


class OtherWorkGauge:
    """Adds up, by part, what others took of the processors' time while numbers were measured."""

    def __init__(self) -> None:
        self._found: dict[str, OtherWork] = {}
        self._before = processor_times()
        self._own_s = own_processor_s()

    def measured(self, part: str) -> None:
        """Counts the time since the last call for a part."""
        before, own_before = self._before, self._own_s
        self._before, self._own_s = processor_times(), own_processor_s()
        if before is None or self._before is None:
            return
        own_s = self._own_s - own_before
        spent = OtherWork(
            part,
            self._before.total_s - before.total_s,
            max(0.0, self._before.busy_s - before.busy_s - own_s),
            self._before.stolen_s - before.stolen_s,
        )
        self._found[part] = self._found[part] + spent if part in self._found else spent

    def skipped(self) -> None:
        """Begins anew without counting the time since the last call."""
        self._before, self._own_s = processor_times(), own_processor_s()

    def work(self) -> tuple[OtherWork, ...]:
        """Returns what was counted so far."""
        return tuple(self._found.values())


def begun(file: Path | None, now: MachineFigures) -> MachineFigures:
    """Returns the figures that a file has of this machine, to which new ones are added; `now` where it has none.

    Args:
        now: the machine and the options, without figures.

    Raises:
        UsageError: the file is no such file, or of another machine, other versions or other options.
    """
    if file is None or not disk.exists(file):
        return now
    saved = MachineFigures.load(file)
    for what, there, here in (("facts", saved.facts, now.facts), ("options", saved.options, now.options)):
        # Of the options those of other parts may be missing.
        names = dict.fromkeys([*here, *there]) if what == "facts" else [name for name in here if name in there]
        name = next((name for name in names if there.get(name) != here.get(name)), "")
        if name:
            raise UsageError(
                f"{file} was measured with {name} {there.get(name, 'unknown')!r}, and here it is "
                f"{here.get(name, 'unknown')!r}: figures of two machines or ways to measure are not put into one file; "
                "name another file with --save, or go on with the options and on the machine that began it"
            )
    return replace(saved, options={**saved.options, **now.options})


def keep(file: Path | None, figures: MachineFigures) -> None:
    """Writes the file, if there is one: it is the old one or the new one whenever this is cut off."""
    if file is None:
        return
    new = file.with_name(f".{file.name}.new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with new.open("w", encoding="utf-8") as stream:
            json.dump(figures.plain(), stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        new.replace(file)
    except OSError as error:
        raise UnfitMachine(
            f"the figures cannot be kept in {file}: {error.strerror}; name another file with --save"
        ) from error


def merged(
    before: MachineFigures, figures: Sequence[Figure], gaps: Sequence[Gap], work: Sequence[OtherWork]
) -> MachineFigures:
    """Returns the figures that were there with those of this call, and the gaps as this call found them."""
    new = {(figure.part, figure.row, figure.column) for figure in figures}
    rest = [figure for figure in before.figures if (figure.part, figure.row, figure.column) not in new]
    seen = {figure.part for figure in figures} | {gap.part for gap in gaps}
    others = {other.part: other for other in before.others}
    for spent in work:
        others[spent.part] = others[spent.part] + spent if spent.part in others else spent
    order = list(PARTS)
    return replace(
        before,
        figures=tuple(sorted([*figures, *rest], key=lambda figure: order.index(figure.part))),
        gaps=(*(gap for gap in before.gaps if gap.part not in seen), *gaps),
        others=tuple(others[part] for part in PARTS if part in others),
    )


def disturbance(machine: MachineFigures) -> str:
    """Returns what disturbed the measurement; "" if the machine was idle."""
    parts = [work for work in machine.others if work.share > IDLE_SHARE]
    if not parts:
        return ""
    said = "; ".join(f"{PARTS[work.part]}: {work}" for work in parts)
    return (
        f"Not idle: others had more than {percent(IDLE_SHARE)} of the processors' time. {said}. The figures of these "
        "parts are lower than what the machine gives."
    )


def shown_facts(machine: MachineFigures) -> list[tuple[str, str]]:
    """Returns the machine's facts, and how much of the processors' time the measurement could not have."""
    worst = max(machine.others, key=lambda work: work.share, default=None)
    if worst is None:
        return list(machine.facts.items())
    others = f"at most {percent(worst.share)} of the processors' time ({PARTS[worst.part]})"
    return [*machine.facts.items(), ("other programs", others)]
