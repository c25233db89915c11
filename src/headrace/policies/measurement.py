"""Whether a measured rate can be believed, and whether a loss is as good as one device's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MOST_SPREAD = 0.20
"""Most spread between the parts of a measurement, (fastest - slowest) / mean, of one that is believed."""
MOST_STOLEN = 0.05
"""Most of the machine's processor time that a hypervisor may give to other machines."""
MOST_OTHERS = 0.10
"""Most of a run's cores that other programs may keep busy when it begins or ends."""
MOST_LOAD = 0.50
"""Most of a run's cores that the load average may have taken before; it remembers programs that have ended."""
REACHED = 0.90
"""How much of one device's way from the first loss to its last a run must go to be as good."""
CHANCE = 0.10
"""A run that goes less of that way ends where it began: at chance."""


@dataclass(frozen=True)
class MachineLoad:
    """What else ran on a machine during a measurement.

    Attributes:
        cores: of the machine.
        used: by the run.
        others: cores that other programs kept busy just before or just after it.
        stolen: the share of the processor time that a hypervisor gave to other machines.
        average: the load average of the last minute, where no run of ours is in it; else None.
    """

    cores: int
    used: int
    others: float = 0.0
    stolen: float = 0.0
    average: float | None = None


@dataclass(frozen=True)
class Measurement:
    """A measured rate: examples a second of so many workers, the spread between its parts, and what else ran.

    What is None was not measured.
    """

    rate: float | None
    workers: int
    spread: float | None = None
    machine: MachineLoad | None = None


def doubts(measured: Measurement, one_device: float | None) -> tuple[str, ...]:
    """Returns why a measurement is not to be believed, given the rate of one device; empty if it is."""
    doubts = []
    if measured.rate is not None and one_device and measured.workers > 1:
        ratio = measured.rate / one_device
        if ratio > measured.workers:
            doubts.append(f"{ratio:.2f} x one device with {measured.workers} workers is impossible")
    if measured.spread is not None and measured.spread > MOST_SPREAD:
        doubts.append(f"its rate varied by {100 * measured.spread:.0f} %")
    return (*doubts, *_disturbances(measured.machine))


def _disturbances(machine: MachineLoad | None) -> tuple[str, ...]:
    if machine is None:
        return ()
    disturbances = []
    # Cores that the run does not use may be busy.
    idle = max(0, machine.cores - machine.used)
    if machine.others > idle + MOST_OTHERS * machine.used:
        disturbances.append(f"other programs kept {machine.others:.1f} of {machine.cores} cores busy")
    if machine.average is not None and machine.average > idle + MOST_LOAD * machine.used:
        disturbances.append(f"the load average was {machine.average:.1f} before it")
    if machine.stolen > MOST_STOLEN:
        disturbances.append(f"{100 * machine.stolen:.0f} % of the processor time was stolen")
    return tuple(disturbances)


@dataclass(frozen=True)
class Learning:
    """How a run's loss fell: pairs of epochs and loss, in order; the first is of the untrained model."""

    path: tuple[tuple[float, float], ...]

    @property
    def first(self) -> float:
        return self.path[0][1]

    @property
    def last(self) -> float:
        return self.path[-1][1]

    def progress(self, loss: float) -> float | None:
        """Returns how much of the way from this run's first loss to its last `loss` is; None if this one never fell."""
        fell = self.first - self.last
        # Not `<=`: NaN.
        return (self.first - loss) / fell if fell > 0 else None

    @property
    def target(self) -> float:
        """The loss that another run must reach to be as good."""
        return self.first - REACHED * (self.first - self.last)

    def epochs_to(self, loss: float) -> float | None:
        """Returns after how many epochs the loss was first reached, on straight lines; None if it never was."""
        before_epochs, before = self.path[0]
        for epochs, now in self.path:
            if math.isnan(now):
                continue
            if now <= loss:
                share = (before - loss) / (before - now) if before > now else 0.0
                return before_epochs + share * (epochs - before_epochs)
            before_epochs, before = epochs, now
        return None


def shortfall(run: Learning, best: Learning) -> str | None:
    """Returns "at chance" or "far above" for a run that ends so, compared to the best; None for one as good."""
    progress = best.progress(run.last)
    if progress is None or progress >= REACHED:
        return None
    # A NaN compares as false.
    return "far above" if progress >= CHANCE else "at chance"


def spread_of(rates: Sequence[float]) -> float | None:
    """Returns (fastest - slowest) / mean of the rates of a measurement's parts; None for fewer than two."""
    mean = sum(rates) / len(rates) if rates else 0.0
    return (max(rates) - min(rates)) / mean if len(rates) > 1 and mean > 0 else None
