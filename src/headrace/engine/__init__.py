"""Starts the processes of a run, watches them, and runs the loop in each."""

__all__: list[str] = []
