"""Layers split over devices: the parallel layers of tensor parallelism. Usable alone; see README.md."""

from headrace.splitting.split import RULES, RewrittenModel, split

__all__ = ["RULES", "RewrittenModel", "split"]
