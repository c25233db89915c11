"""How many threads a worker may use: pure arithmetic."""

from __future__ import annotations

from headrace.errors import UsageError


def threads_per_worker(cores: int, workers_on_host: int) -> int:
    """Returns the threads of one worker so that those of a host do not crowd each other out; at least 1.

    >>> threads_per_worker(8, 3)
    2

    Raises:
        UsageError: either is below 1.
    """
    if cores < 1 or workers_on_host < 1:
        raise UsageError(f"need at least 1 core and 1 worker, got {cores} and {workers_on_host}")
    return max(1, cores // workers_on_host)
