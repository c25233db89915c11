"""Probes: each runs the model on one small batch before the start, and says what would differ from one device."""
