"""HOW TO DECIDE: pure functions and state. No torch, no clock, no socket."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from headrace.policies.placement import Placement, greedy, round_robin
from headrace.policies.sharding import everywhere, slices, whole
from headrace.spec.model import ParameterSpec
from headrace.spec.plan import Segment

__all__ = ["PLACEMENTS", "SHARDINGS"]

SHARDINGS: Mapping[str, Callable[[Sequence[ParameterSpec], int], tuple[Segment, ...]]] = {
    "everywhere": everywhere,
    "slices": slices,
    "whole": whole,
}
"""Shardings by name: from parameters and a number of owners to segments."""

PLACEMENTS: Mapping[str, Placement] = {
    "greedy": greedy,
    "round_robin": round_robin,
}
"""Placements by name: from pieces and a number of owners to the index of each piece's owner."""
