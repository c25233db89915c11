"""Failures: how often to save, and what is left of the time.

A run that ends with the first host that fails loses what was done since the last checkpoint, and begins again. With a
mean time M between failures of the whole run, a checkpoint that takes d and a restart that takes R,

    interval    sqrt(2 d M)                                             Young 1974
                sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + d / 18M) - d        Daly 2006, equation 37; M where d >= 2M
    time        M exp(R / M) (exp((t + d) / M) - 1) T / t               Daly 2006, equation 20; for T of work
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import UsageError
from headrace.spec.cluster import Host


@dataclass(frozen=True)
class Reliability:
    """What failures do to a run.

    Attributes:
        hours_between: failures of any of its hosts, on average.
        save_every_s: between the end of a checkpoint and the begin of the next.
        useful: the part of the time in which the run gets further.
    """

    hours_between: float
    save_every_s: float
    useful: float


def reliability(hosts: Sequence[Host], checkpoint_s: float, restart_s: float) -> Reliability | None:
    """Returns what failures of these hosts do; None if they never fail.

    Raises:
        UsageError: they fail so often that a run does not end.
    """
    rate = sum(1 / host.hours_between_failures for host in hosts if host.hours_between_failures)
    if not rate:
        return None
    mean_s = 3600 / rate
    every_s = interval(mean_s, checkpoint_s)
    useful = useful_share(mean_s, every_s, checkpoint_s, restart_s)
    if not useful:
        raise UsageError(
            f"{len(hosts)} hosts of which one fails every {mean_s:.3g} s on average get no further: a checkpoint takes "
            f"{checkpoint_s:g} s, and a restart {restart_s:g} s; is hours_between_failures in hours?"
        )
    return Reliability(1 / rate, every_s, useful)


def interval(mean_s: float, checkpoint_s: float) -> float:
    """Returns Daly's interval between two checkpoints."""
    if not checkpoint_s:
        return 0.0
    if checkpoint_s >= 2 * mean_s:
        return mean_s
    ratio = checkpoint_s / (2 * mean_s)
    return math.sqrt(2 * checkpoint_s * mean_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s


def useful_share(mean_s: float, every_s: float, checkpoint_s: float, restart_s: float) -> float:
    """Returns the work that is done in a time, over that time."""
    if not every_s:
        # A checkpoint that takes no time is always there.
        return math.exp(-restart_s / mean_s)
    # As logarithms: a run that hardly ever gets to its next checkpoint has a tiny share, not an overflow.
    length = (every_s + checkpoint_s) / mean_s
    grown = length + math.log(-math.expm1(-length))
    return math.exp(math.log(every_s / mean_s) - restart_s / mean_s - grown)
