"""Measures the links between hosts, and compares what is on them."""
