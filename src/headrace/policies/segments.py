"""Which owner gets which part of the parameters, where workers share them: pure functions of names and sizes.

Every cut covers each trainable parameter wholly and without overlap, in the model's order. A number of owners below 1
is a `UsageError`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from headrace.errors import UsageError
from headrace.spec.model import ParameterSpec
from headrace.spec.plan import EVERY_WORKER, Segment

_LINE = 16
"""Elements between possible cuts: 64 bytes of float32, so that two owners do not write to one cache line."""


def rows(parameters: Sequence[ParameterSpec], owners: int) -> tuple[Segment, ...]:
    """Cuts each parameter between rows, as `torch.chunk` does: all owners get as many, the last ones fewer or none.

    One without rows or elements is everyone's.
    """
    require_owners(owners)
    segments = []
    for parameter in parameters:
        if not parameter.trainable:
            continue
        if not parameter.shape or not parameter.elements:
            segments.append(Segment(parameter.name, 0, parameter.elements, EVERY_WORKER))
            continue
        length = part_length(parameter.shape, owners)
        segments += [
            Segment(parameter.name, start, min(start + length, parameter.elements), owner)
            for owner, start in enumerate(range(0, parameter.elements, length))
        ]
    return tuple(segments)


def evenly(parameters: Sequence[ParameterSpec], owners: int) -> tuple[Segment, ...]:
    """Cuts each parameter as `rows` does; the first owner gets one without rows or elements."""
    require_owners(owners)
    segments = []
    for parameter in parameters:
        if not parameter.trainable:
            continue
        length = part_length(parameter.shape, owners)
        segments += [
            Segment(parameter.name, start, min(start + length, parameter.elements), owner)
            for owner, start in enumerate(range(0, max(1, parameter.elements), length))
        ]
    return tuple(segments)


def part_length(shape: Sequence[int], owners: int) -> int:
    """Returns the most elements of one parameter that an owner gets where it is cut between rows; at least 1."""
    row = math.prod(shape[1:])
    return max(1, -(-shape[0] // owners) * row) if shape else 1


def slices(parameters: Sequence[ParameterSpec], owners: int) -> tuple[Segment, ...]:
    """Cuts the concatenated parameters into `owners` contiguous ranges of nearly equal length.

    The cuts are the multiples of 16 elements nearest to equal parts, where there are 16 elements an owner;
    otherwise the parts differ by at most 1. A parameter that crosses a cut becomes several segments. One in
    channels-last order is cut between rows: inside a row its elements lie in another order than they are numbered.
    """
    require_owners(owners)
    trainable = [parameter for parameter in parameters if parameter.trainable]
    total = sum(parameter.elements for parameter in trainable)
    line = _LINE if total >= _LINE * owners else 1
    cuts = [(2 * part * total + owners * line) // (2 * owners * line) * line for part in range(1, owners)]
    offsets = list(accumulate((parameter.elements for parameter in trainable), initial=0))
    cuts = [_allowed(cut, trainable, offsets) for cut in cuts]
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


def _allowed(cut: int, parameters: Sequence[ParameterSpec], offsets: Sequence[int]) -> int:
    """Returns the place nearest to a cut where the parameter there may be cut; `offsets` is where each begins."""
    index = bisect_right(offsets, cut) - 1
    if index == len(parameters) or not parameters[index].channels_last:
        return cut
    begin, parameter = offsets[index], parameters[index]
    row = parameter.elements // parameter.shape[0]
    return begin + (2 * (cut - begin) + row) // (2 * row) * row


def everywhere(parameters: Sequence[ParameterSpec], owners: int = 1) -> tuple[Segment, ...]:
    """Gives every parameter to every worker, however many `owners` there are: each updates its own mirror."""
    require_owners(owners)
    return tuple(
        Segment(parameter.name, 0, parameter.elements, EVERY_WORKER) for parameter in parameters if parameter.trainable
    )


def require_owners(owners: int) -> None:
    """Raises a UsageError for a number of owners below 1."""
    if owners < 1:
        raise UsageError(f"parameters need at least 1 owner, got {owners}")
