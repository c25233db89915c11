"""WHAT IT WILL COST: measured on this machine before a run."""

from __future__ import annotations

from headrace.planner.measuring import measure
from headrace.planner.profile import MeasuredLayers, profile

__all__ = ["MeasuredLayers", "measure", "profile"]
