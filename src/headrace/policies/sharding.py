"""Which worker updates which parameters: pure functions from parameters to segments.

Every function covers each trainable parameter wholly and without overlap, in the model's order, and gives the
same answer for the same input.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from headrace.errors import UsageError
from headrace.spec.model import ParameterSpec
from headrace.spec.plan import EVERY_WORKER, Segment

__all__ = ["everywhere", "slices", "whole"]

_LINE = 16
"""Elements between possible cuts: 64 bytes of float32, so that two owners do not write to one cache line."""


def slices(parameters: Sequence[ParameterSpec], owners: int) -> tuple[Segment, ...]:
    """Cuts the concatenated parameters into `owners` contiguous ranges of nearly equal length.

    The cuts are the multiples of 16 elements nearest to equal parts, where there are 16 elements an owner;
    otherwise the parts differ by at most 1. A parameter that crosses a cut becomes several segments.

    Raises:
        UsageError: `owners` is below 1.
    """
    _require_owners(owners)
    trainable = [parameter for parameter in parameters if parameter.trainable]
    total = sum(parameter.elements for parameter in trainable)
    line = _LINE if total >= _LINE * owners else 1
    cuts = [(2 * part * total + owners * line) // (2 * owners * line) * line for part in range(1, owners)]
    segments = []
    offset = 0
    for parameter in trainable:
        start, end = offset, offset + parameter.elements
        owner = bisect_right(cuts, start)
        while owner < owners - 1 and cuts[owner] < end:
            stop = cuts[owner]
            # Where there are more owners than elements, equal cuts leave some of them without any.
            if stop > start:
                segments.append(Segment(parameter.name, start - offset, stop - offset, owner))
            start, owner = stop, owner + 1
        segments.append(Segment(parameter.name, start - offset, end - offset, owner))
        offset = end
    return tuple(segments)


def whole(parameters: Sequence[ParameterSpec], owners: int) -> tuple[Segment, ...]:
    """Gives every parameter to one owner: the largest first, to whoever has the fewest bytes so far.

    For optimizers that need whole matrices. No owner has more than 4/3 of the least possible maximum
    (Graham, "Bounds on multiprocessing timing anomalies", 1969, theorem 3).

    Raises:
        UsageError: `owners` is below 1.
    """
    _require_owners(owners)
    trainable = [parameter for parameter in parameters if parameter.trainable]
    loads = [0] * owners
    chosen = [0] * len(trainable)
    for index in sorted(range(len(trainable)), key=lambda index: (-trainable[index].bytes, index)):
        owner = loads.index(min(loads))
        loads[owner] += trainable[index].bytes
        chosen[index] = owner
    return tuple(
        Segment(parameter.name, 0, parameter.elements, owner)
        for parameter, owner in zip(trainable, chosen, strict=True)
    )


def everywhere(parameters: Sequence[ParameterSpec], owners: int = 1) -> tuple[Segment, ...]:
    """Gives every parameter to every worker, however many `owners` there are: each updates its own mirror.

    Raises:
        UsageError: `owners` is below 1.
    """
    _require_owners(owners)
    return tuple(
        Segment(parameter.name, 0, parameter.elements, EVERY_WORKER) for parameter in parameters if parameter.trainable
    )


def _require_owners(owners: int) -> None:
    if owners < 1:
        raise UsageError(f"parameters need at least 1 owner, got {owners}")
