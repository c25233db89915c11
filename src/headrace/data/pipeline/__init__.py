"""The definition of an input pipeline."""
