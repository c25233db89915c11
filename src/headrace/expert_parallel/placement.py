"""Which rank holds which experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.policies.segments import everywhere, require_owners
from headrace.spec.compute import ExpertSpec
from headrace.spec.model import ParameterSpec
from headrace.spec.plan import Segment


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
