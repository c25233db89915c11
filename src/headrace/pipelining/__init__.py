"""Models in stages: traced as they are, cut, run."""

from __future__ import annotations

from headrace.pipelining.layers import Layer
from headrace.pipelining.stage import OUTPUT, Stage, Value, cut, shared
from headrace.pipelining.trace import Traced, trace, unchanged

__all__ = ["OUTPUT", "Layer", "Stage", "Traced", "Value", "cut", "shared", "trace", "unchanged"]
