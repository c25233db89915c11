"""A step: compute, synchronize, update."""
