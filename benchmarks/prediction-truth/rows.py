"""A row of a published table beside what is predicted, and a constant that makes one row right."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.spec.compute import BatchProfile, ComputeProfile, LayerSpec
from headrace.spec.model import ModelSpec, ParameterSpec

PUBLISHED: dict[str, Any] = json.loads((Path(__file__).parent / "published.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        missing: what the published inputs do not say, so that the row is not counted; "" where they say everything.
        fitted: whether it has given the constant of its machine type; such a row is not counted either.
    """

    table: str
    case: str
    published: float
    predicted: float | None
    missing: str = ""
    fitted: bool = False

    @property
    def counted(self) -> bool:
        return self.predicted is not None and not self.fitted and not self.missing

    @property
    def error(self) -> float | None:
        return None if self.predicted is None else self.predicted / self.published - 1


def fit(predict: Callable[[float], float], published: float, low: float, high: float) -> float:
    """Returns the constant between two with which a prediction is what was published; it grows with the constant."""
    for _ in range(25):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if predict(middle) < published else (low, middle)
    return math.sqrt(low * high)


def whole(parameters: float, batch: int, seconds: float, *, backward_s: float | None = None) -> ModelSpec:
    """Returns a model of which the parameters and one step's time are known."""
    backward = 2 * seconds / 3 if backward_s is None else backward_s
    profile = ComputeProfile((BatchProfile(batch, seconds - backward, backward),))
    return ModelSpec((ParameterSpec("parameters", (round(parameters),)),), compute=profile)


def layered(layers: list[LayerSpec], batch: int) -> ModelSpec:
    """Returns a model whose layers are known."""
    named = tuple(ParameterSpec(layer.name, (max(1, layer.parameter_bytes // 4),)) for layer in layers)
    times = sum(layer.forward_s for layer in layers), sum(layer.backward_s for layer in layers)
    profile = BatchProfile(batch, *times, 0, tuple(layers))
    return ModelSpec(named, layers=tuple(layers), compute=ComputeProfile((profile,)))
