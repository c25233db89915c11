"""Mixtures of experts whose experts are divided among the workers, and whose tokens travel to them."""
