"""Which rank holds which experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from headrace.policies.segments import everywhere, require_owners, rows
from headrace.spec.compute import ExpertSpec
from headrace.spec.model import ParameterSpec
from headrace.spec.plan import EVERY_WORKER, Segment


def by_experts(
    parameters: Sequence[ParameterSpec], experts: Mapping[str, ExpertSpec], owners: int
) -> tuple[Segment, ...]:
    """Gives each owner the parameters of its experts, and to every worker what belongs to none."""
    require_owners(owners)
    segments: list[Segment] = []
    for parameter in parameters:
        spec = experts.get(parameter.name)
        if not parameter.trainable:
            continue
        if spec is None:
            segments += everywhere([parameter])
            continue
        for owner in range(owners):
            start, stop = expert_bounds(spec.count, owner, owners)
            row = parameter.elements // spec.count
            if spec.index < 0 and start < stop:
                segments.append(Segment(parameter.name, start * row, stop * row, owner))
            elif start <= spec.index < stop:
                segments.append(Segment(parameter.name, 0, parameter.elements, owner))
    return tuple(segments)


def expert_bounds(count: int, owner: int, owners: int) -> tuple[int, int]:
    """Returns `[start, stop)` of an owner's experts of so many; the first owners may have one more."""
    fewest, more = divmod(count, owners)
    return owner * fewest + min(owner, more), (owner + 1) * fewest + min(owner + 1, more)


def by_experts_and_rows(
    parameters: Sequence[ParameterSpec], experts: Mapping[str, ExpertSpec], owners: int, parts: int
) -> tuple[Segment, ...]:
    """Cuts between rows, for as many parts, what each owner of experts has; part p of owner o is p x owners + o's.

    What belongs to no expert is cut once, for the first of the owners that have the same part. What has no rows is
    every worker's, or of an expert its owner's first part.
    """
    segments: list[Segment] = []
    for parameter in parameters:
        spec = experts.get(parameter.name)
        if spec is None:
            for each in rows([parameter], parts):
                segments.append(each if each.owner == EVERY_WORKER else replace(each, owner=each.owner * owners))
            continue
        for whole in by_experts([parameter], experts, owners):
            held = whole.stop - whole.start
            count = held // max(1, parameter.elements // spec.count) if spec.index < 0 else 0
            shape = (count, *parameter.shape[1:]) if spec.index < 0 else parameter.shape
            for each in rows([replace(parameter, shape=shape)], parts):
                part = 0 if each.owner == EVERY_WORKER else each.owner
                start, stop = whole.start + each.start, whole.start + each.stop
                segments.append(Segment(parameter.name, start, stop, part * owners + whole.owner))
    return tuple(segments)
