"""Layers split over devices: the parallel layers of tensor parallelism. Usable alone; see README.md."""

from headrace.splitting.split import RULES, Split, split

__all__ = ["RULES", "Split", "split"]
