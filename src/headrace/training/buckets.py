"""Which gradients travel together: pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import UsageError


def buckets(sizes: Sequence[int], bucket_bytes: int) -> tuple[tuple[int, int], ...]:
    """Returns runs `(start, stop)` of parameter indices, in the order in which their gradients are ready.

    Backward runs from the last parameter to the first, so the first bucket ends with the last parameter. A
    bucket closes as soon as it has `bucket_bytes`: each is at least that large, but for the last, which holds
    what is left, and none would still be that large without its own first parameter.

    >>> buckets((40, 10, 10, 30, 5), 20)
    ((3, 5), (1, 3), (0, 1))

    Args:
        sizes: bytes of each parameter, in the model's order.
        bucket_bytes: when a bucket is full.

    Raises:
        UsageError: `bucket_bytes` is below 1.
    """
    if bucket_bytes < 1:
        raise UsageError(f"bucket_bytes must be at least 1, got {bucket_bytes}")
    runs = []
    stop = len(sizes)
    held = 0
    for start in reversed(range(len(sizes))):
        held += sizes[start]
        if held >= bucket_bytes or start == 0:
            runs.append((start, stop))
            stop, held = start, 0
    return tuple(runs)
