"""How sure a prediction is: where the rows of the validation tables fell, by kind of case.

An error is the predicted rate over the measured one, less 1. Of a kind's rows nine in ten have errors between the two
bounds; a kind of few rows has those of all its rows. benchmarks/prediction-truth has the rows, and a test counts them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Band:
    """Between which factors of a predicted rate nine in ten measured ones are.

    Attributes:
        kind: of the rows, in words.
        rows: how many there are; 0 where none is of the kind.
        low, high: factors.
    """

    kind: str
    rows: int
    low: float
    high: float

    def wider(self, times: float, why: str) -> Band:
        """Returns a band that goes so many times as far from the prediction."""
        kind = f"{self.kind}, {why}"
        return Band(kind, self.rows, max(0.0, 1 + times * (self.low - 1)), 1 + times * (self.high - 1))

    @property
    def where(self) -> str:
        """Where it is from."""
        return f"nine in ten of {self.rows} rows of {self.kind}" if self.rows else f"a guess: no row is of {self.kind}"

    def __str__(self) -> str:
        """Says where it is from."""
        return f"{100 * (self.low - 1):+.0f} to {100 * (self.high - 1):+.0f} %, {self.where}"


def _of_errors(kind: str, rows: int, slow: float, fast: float) -> Band:
    return Band(kind, rows, 1 / (1 + fast), 1 / (1 + slow))


BANDS = {
    "cpu": _of_errors("CPU hosts", 16, -0.122, 0.111),
    "host": _of_errors("one host of devices", 96, -0.061, 0.152),
    "varied": _of_errors("one host of devices and examples that vary in length", 28, -0.035, 0.123),
    "hosts": _of_errors("several hosts of devices", 17, -0.049, 0.160),
    "pipeline": _of_errors("pipelines", 9, -0.105, 0.074),
    "other": _of_errors("this kind", 0, -0.244, 0.320),
}
"""By kind; of what no table has, twice as wide as the widest."""
