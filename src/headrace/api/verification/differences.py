"""How far two trainings are apart, and whether rounding alone explains it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.api.verification.recording import KINDS, Trained

EQUAL, BY_DEFINITION, DIFFERS, SKIPPED = "equal", "by definition", "differs", "not compared"


@dataclass(frozen=True)
class Tolerance:
    """How far equal numbers may be apart.

    Attributes:
        value: of a number, relative to it above 1.
        moved: of a parameter, relative to how far the parameters have moved since the start.
        bits: of a tensor, relative to its largest element: what rounding alone leaves.
    """

    value: float
    moved: float
    bits: float

    def of(self, name: str, plain: Trained) -> float:
        """Returns that of a loss or a metric, relative to it above 1."""
        return max(self.value, SINGLE.value) if name in plain.rounded and self.value else self.value


DOUBLE = Tolerance(1e-9, 1e-6, 1e-13)
SINGLE = Tolerance(1e-5, 1e-3, 1e-6)
EXACT = Tolerance(0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        what: is compared.
        verdict: `EQUAL`, `DIFFERS`, `BY_DEFINITION` or `SKIPPED`.
        largest: the largest difference; None where nothing was compared.
        round: the first round that differs, from 0; None where none does, or where it is no matter of rounds.
        name: of the first tensor, or the number, that differs.
        by: how far it is apart there.
        why: what a reader must know.
    """

    what: str
    verdict: str
    largest: float | None = None
    round: int | None = None
    name: str = ""
    by: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class _Gap:
    name: str
    by: float
    exceeds: bool


def compare_recordings(ours: Trained, plain: Trained, tolerance: Tolerance) -> list[Row]:
    """Returns a row for the losses, and one for each kind of tensors."""
    steps = [step for step in sorted(ours.rounds) if step in plain.rounds]
    of_losses = tolerance.of("losses", plain)
    losses = [[gap] for gap in _number_gaps(ours.losses, plain.losses, [of_losses] * len(plain.losses))]
    rows = _row("losses", losses, list(range(len(losses))))
    for kind in KINDS:
        if not all(kind in plain.rounds[step] for step in steps):
            continue
        gaps = [_gaps(kind, ours.rounds[step][kind], plain.rounds[step][kind], plain, tolerance) for step in steps]
        rows += _row(kind, [list(each) for each in gaps], [step - 1 for step in steps])
    return rows


def compare_tensors(
    what: str, ours: Mapping[str, Tensor], other: Mapping[str, Tensor], tolerance: Tolerance
) -> list[Row]:
    """Returns the row of tensors that are no matter of rounds."""
    return _row(what, [list(_tensor_gaps(ours, other, tolerance, math.inf))])


def compare_metrics(what: str, ours: Trained, plain: Trained, tolerance: Tolerance) -> list[Row]:
    """Returns the row of the metrics."""
    mine, other = ours.metrics, plain.metrics
    names = [name for name in other if name in mine]
    allowed = [tolerance.of(name, plain) for name in names]
    gaps = _number_gaps([mine[name] for name in names], [other[name] for name in names], allowed, names)
    missing = [_Gap(name, math.inf, True) for name in other if name not in mine]
    return _row(what, [[*gaps, *missing]])


def _row(what: str, by_round: Sequence[Sequence[_Gap]], rounds: Sequence[int] | None = None) -> list[Row]:
    """Returns a row, or nothing where neither training has such numbers."""
    every = [gap for gaps in by_round for gap in gaps]
    if not every:
        return []
    largest = max((gap.by for gap in every), key=lambda by: math.inf if math.isnan(by) else by)
    for index, gaps in enumerate(by_round):
        wrong = [gap for gap in gaps if gap.exceeds]
        if wrong:
            return [Row(what, DIFFERS, largest, rounds[index] if rounds else None, wrong[0].name, wrong[0].by)]
    return [Row(what, EQUAL, largest)]


def _number_gaps(
    ours: Sequence[float], other: Sequence[float], allowed: Sequence[float], names: Sequence[str] = ()
) -> list[_Gap]:
    gaps = []
    for index, (one, two, most) in enumerate(zip(ours, other, allowed, strict=False)):
        by = 0.0 if one == two or (math.isnan(one) and math.isnan(two)) else abs(one - two)
        gaps.append(_Gap(names[index] if names else "", by, not by <= most * max(1.0, abs(two))))
    if len(ours) != len(other):
        gaps.append(_Gap(f"{len(ours)} and {len(other)} numbers", math.inf, True))
    return gaps


def _gaps(
    kind: str, ours: Mapping[str, Tensor], other: Mapping[str, Tensor], plain: Trained, tolerance: Tolerance
) -> Iterator[_Gap]:
    if kind == "parameters" and 0 in plain.rounds:
        start = plain.rounds[0][kind]
        moved = max((_largest(other[name].double() - start[name].double()) for name in other), default=0.0)
        yield from _tensor_gaps(ours, other, tolerance, moved)
        return
    if kind != "optimizer state":
        yield from _tensor_gaps(ours, other, tolerance, math.inf)
        return
    # Second moments are small numbers: what is compared with is the largest one of their kind.
    scales: dict[str, float] = {}
    for name, tensor in other.items():
        key = name.rpartition("/")[2]
        scales[key] = max(scales.get(key, 0.0), _largest(tensor))
    for name, tensor in other.items():
        if name not in ours:
            yield _Gap(f"{name} (missing)", math.inf, True)
            continue
        by = _apart(ours[name], tensor)
        yield _Gap(name, by, not by <= tolerance.moved * scales[name.rpartition("/")[2]])


def _tensor_gaps(
    ours: Mapping[str, Tensor], other: Mapping[str, Tensor], tolerance: Tolerance, moved: float
) -> Iterator[_Gap]:
    for name, tensor in other.items():
        if name not in ours:
            yield _Gap(f"{name} (missing)", math.inf, True)
            continue
        by, size = _apart(ours[name], tensor), _largest(tensor)
        allowed = min(tolerance.value * max(1.0, size), tolerance.moved * moved) + tolerance.bits * size
        yield _Gap(name, by, not by <= allowed)


def _apart(one: Tensor, other: Tensor) -> float:
    """Returns the largest difference of two tensors; NaN where one has a NaN that the other has not."""
    one, other = (each.to_dense() if each.layout is not torch.strided else each for each in (one, other))
    if one.shape != other.shape:
        return math.inf
    if torch.equal(one, other):
        return 0.0
    one, other = one.double(), other.double()
    same = (one == other) | (one.isnan() & other.isnan())
    return _largest((one - other)[~same])


def _largest(tensor: Tensor) -> float:
    return float(tensor.to_dense().double().abs().max()) if tensor.numel() else 0.0
