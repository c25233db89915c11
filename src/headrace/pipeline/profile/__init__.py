"""WHAT IT WILL COST: measured on this machine before a run."""

from __future__ import annotations

from headrace.pipeline.profile.layers import MeasuredLayers, profile
from headrace.pipeline.profile.measuring import measure

__all__ = ["MeasuredLayers", "measure", "profile"]
