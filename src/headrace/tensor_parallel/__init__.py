"""Layers split over devices: the parallel layers of tensor parallelism. Usable alone; see README.md."""

from headrace.tensor_parallel.replica import RewrittenModel
from headrace.tensor_parallel.rewriting import RULES, split

__all__ = ["RULES", "RewrittenModel", "split"]
