"""Measured figures of a machine, in parts that are tables, and their file."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from headrace.errors import UsageError
from headrace.report.format import percent
from headrace.spec.plain import from_plain, to_plain

PARTS: Mapping[str, str] = {
    "matrix": "Matrix product",
    "memory": "Memory",
    "transfer": "Transfer between host and GPU",
    "storage": "Storage",
    "inference": "Networks: inference, batch of 16",
    "training": "Networks: forward and backward, batch of 16",
}
"""Titles by part, in the order in which they are measured and shown."""


@dataclass(frozen=True)
class Figure:
    """One measured number, and its place in the table of a part.

    Attributes:
        value: the median, in `unit`; the larger the better, unless the unit is one of time.
        spread: the distance between the quartiles of the repetitions, over the median; 0 where it is not known.
    """

    part: str
    row: str
    column: str
    value: float
    unit: str
    spread: float = 0.0


@dataclass(frozen=True)
class Gap:
    """A place without a number, and why; a whole column if `row` is ""."""

    part: str
    row: str
    column: str
    why: str


@dataclass(frozen=True)
class OtherWork:
    """What a machine's processors did besides while a part was measured, in seconds of processor time.

    Attributes:
        total_s: what the cores had in all: their number times the time that measuring took.
        others_s: what other programs took.
        stolen_s: what a hypervisor gave to other machines.
    """

    part: str
    total_s: float
    others_s: float
    stolen_s: float

    def __add__(self, later: OtherWork) -> OtherWork:
        """Returns both together, of one part that was measured in two goes."""
        return OtherWork(
            self.part,
            self.total_s + later.total_s,
            self.others_s + later.others_s,
            self.stolen_s + later.stolen_s,
        )

    def __str__(self) -> str:
        stolen = self.stolen_s / self.total_s
        others = f"other programs {percent(self.others_s / self.total_s)}"
        return others + (f", the hypervisor for other machines {percent(stolen)}" if stolen > 0.005 else "")

    @property
    def share(self) -> float:
        """Of the processors' time, what the measurement could not have."""
        return (self.others_s + self.stolen_s) / self.total_s if self.total_s else 0.0


@dataclass(frozen=True)
class MachineFigures:
    """What was measured on a machine.

    Attributes:
        name: of the machine, for people.
        source: where published figures are from; "" for measured ones.
        facts: the processor, versions and the like, by name.
        options: how it was measured, by name.
        others: what else the machine did, by part.
    """

    name: str
    figures: tuple[Figure, ...]
    gaps: tuple[Gap, ...] = ()
    source: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)
    others: tuple[OtherWork, ...] = ()

    def parts(self) -> list[str]:
        """Returns the parts that were measured, or could not be."""
        found = {place.part for place in self._places()}
        return [part for part in PARTS if part in found]

    def rows(self, part: str) -> list[str]:
        """Returns a part's rows in the order of measurement."""
        return list(dict.fromkeys(place.row for place in self._places() if place.part == part and place.row))

    def columns(self, part: str) -> list[str]:
        """Returns a part's columns in the order of measurement, those without any number last."""
        return list(dict.fromkeys(place.column for place in self._places() if place.part == part))

    def _places(self) -> list[Figure | Gap]:
        return [*self.figures, *self.gaps]

    def at(self, part: str, row: str, column: str) -> Figure | None:
        """Returns the figure of a place."""
        place = (part, row, column)
        return next((figure for figure in self.figures if (figure.part, figure.row, figure.column) == place), None)

    @staticmethod
    def load(path: Path | str) -> MachineFigures:
        """Reads what `headrace bench` prints with --json, or keeps with --save; raises UsageError for another file."""
        try:
            document = json.loads(Path(path).read_text(encoding="utf-8"))
            if isinstance(document, dict):
                # What was said of them beside others, in the result of --json.
                document.pop("advice", None)
            machine = from_plain(MachineFigures, document)
            for figure in machine.figures:
                if not 0 < figure.value < math.inf:
                    raise ValueError(f"{figure.part}, {figure.row}, {figure.column} is {figure.value} {figure.unit}")
            return machine
        except (OSError, ValueError, TypeError) as error:
            raise UsageError(
                f"{path} cannot be read as figures of a machine: {error}; give a file of `headrace bench` with --json "
                "or --save"
            ) from None

    def plain(self) -> dict[str, object]:
        """Returns the document that `load` reads."""
        document: dict[str, object] = to_plain(self)
        return document


def figure(part: str, row: str, column: str, unit: str, values: Sequence[float]) -> Figure:
    """Returns the median of repetitions, and their spread."""
    middle = median(values)
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (middle, middle, middle)
    return Figure(part, row, column, middle, unit, (high - low) / middle if middle else 0.0)


def is_time(unit: str) -> bool:
    """Tells whether less is better."""
    return unit in ("ms", "us")


def missing(part: str, columns: Iterable[str], why: str) -> list[Gap]:
    """Returns the gaps of whole columns."""
    return [Gap(part, "", column, why) for column in columns]
