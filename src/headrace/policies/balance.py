"""Shares of a global batch in proportion to the workers' speed: pure functions of what was measured.

A step lasts as long as its slowest worker. Where a worker needs `t` seconds for `n` examples, its speed is `n / t`, and
a step is shortest when all need the same time:

    equal shares    worker 0 │ 32 ████        in proportion    worker 0 │ 39 █████
                    worker 1 │ 32 ████        to speed         worker 1 │ 38 █████
                    worker 2 │ 32 ████████                     worker 2 │ 19 █████
"""

from __future__ import annotations

from collections.abc import Sequence

LEAST_GAIN = 0.05
"""A change must promise steps that are shorter by this part, so that noise changes nothing."""


def balanced_sizes(sizes: Sequence[int], seconds: Sequence[float], least_gain: float = LEAST_GAIN) -> tuple[int, ...]:
    """Returns how many examples of a batch each worker should get; `sizes` itself where a change would not pay.

    Each gets at least 1, because the speed of a worker without examples is not known.

    Args:
        sizes: examples that each has now, at least 1.
        seconds: that each needed for them, above 0.

    >>> balanced_sizes((32, 32, 32), (1.0, 1.0, 2.0))
    (39, 38, 19)
    >>> balanced_sizes((39, 38, 19), (1.0, 1.02, 0.98))
    (39, 38, 19)
    """
    speeds = [size / time for size, time in zip(sizes, seconds, strict=True)]
    total, workers = sum(sizes), range(len(sizes))
    wanted = [max(1, int(total * speed / sum(speeds))) for speed in speeds]
    while sum(wanted) > total:
        wanted[max((rank for rank in workers if wanted[rank] > 1), key=lambda rank: wanted[rank] / speeds[rank])] -= 1
    while sum(wanted) < total:
        wanted[min(workers, key=lambda rank: (wanted[rank] + 1) / speeds[rank])] += 1
    expected = max(size / speed for size, speed in zip(wanted, speeds, strict=True))
    return tuple(wanted) if expected < (1 - least_gain) * max(seconds) else tuple(sizes)
