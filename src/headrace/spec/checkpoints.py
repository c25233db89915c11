"""When a run saves its state, and how much of it is kept."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import UsageError


@dataclass(frozen=True)
class Checkpoints:
    """A run saves when either interval is over, when it is asked to end (SIGTERM, SIGINT), and at its end.

    Attributes:
        every_steps: rounds between two saves; None for no such interval.
        every_s: seconds between two saves; None for no such interval.
        keep: how many of the last checkpoints stay.
        snapshots_every_s: seconds between two snapshots of each parameter server that has no backup, which are taken
            while workers go on; None for none.
    """

    every_steps: int | None = None
    every_s: float | None = 600.0
    keep: int = 3
    snapshots_every_s: float | None = 30.0

    def __post_init__(self) -> None:
        for name in ("every_steps", "keep"):
            value = getattr(self, name)
            if name == "every_steps" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name} must be a whole number of at least 1, got {value!r}")
        for name in ("every_s", "snapshots_every_s"):
            seconds = getattr(self, name)
            number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
            if seconds is not None and not (number and seconds > 0):
                raise UsageError(f"{name} must be a number of seconds above 0, got {seconds!r}; None switches it off")
