"""Which faults a run meets: drawn by a seed, and made shorter where it fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["CLOCKED", "KINDS", "MOUNTED", "Fault", "draw", "read", "reduce"]

KINDS = (
    "kill", "freeze", "pause", "slow", "terminate", "kill launcher", "damaged checkpoint", "cut checkpoint",
    "few descriptors", "small files", "little memory", "few threads", "quota", "full disk", "read-only disk",
    "failing disk", "cut", "cut one way", "short cut", "clock jump",
)  # fmt: skip
"""kill: SIGKILL. freeze: SIGSTOP for ever. pause: half the timeout. slow: half of the time for a while, as by a quota.
terminate: SIGTERM to the command. Damaged and cut: the launcher is killed, and the newest checkpoint's file changed
before the command is given again. Few, small, little: a limit of one process. quota: a twentieth of a core for a while.
Disks: that of the run directory; a failing one gives EIO for each operation, or for those that write. Cuts: the link
between two hosts, in both directions or one; a short one is mended after half the timeout. Clock jump: the wall clock
of one host is set, by up to an hour."""

MOUNTED = ("full disk", "read-only disk", "failing disk")
"""Those for which the run directory is a file system of its own."""

CUTS = ("cut", "cut one way")
"""Links that stay cut until the attempt has ended."""

LINKS = (*CUTS, "short cut")
"""Those that need several hosts."""

DAMAGES = ("damaged checkpoint", "cut checkpoint")

GROUPED = ("few threads", "quota")
"""Those that need a control group."""

CLOCKED = ("clock jump",)
"""Those for which the processes see a clock of their own, which needs a C compiler."""

MOST_STEPS = 60
"""Steps of all workers, from the beginning of an attempt, before a fault."""


@dataclass(frozen=True)
class Fault:
    """What happens, after how many steps of an attempt, to which of the processes that are there (by order of rank)."""

    kind: str
    after: int
    pick: int

    def __str__(self) -> str:
        return f"{self.kind}@{self.after}/{self.pick}"


def draw(seed: int, count: int, kinds: Sequence[str] = KINDS) -> tuple[Fault, ...]:
    """Returns the same faults for the same seed."""
    chance = random.Random(seed)
    return tuple(
        Fault(chance.choice(kinds), chance.randint(1, MOST_STEPS), chance.randrange(1000)) for _ in range(count)
    )


def read(text: str) -> Fault:
    """Returns the fault that was printed as "kill@40/7"."""
    kind, _, place = text.partition("@")
    after, _, pick = place.partition("/")
    if kind not in KINDS or not (after.isdigit() and pick.isdigit()):
        raise ValueError(
            f"{text!r} is no fault; one is KIND@STEPS/PICK, as 'kill@40/7', of the kinds {', '.join(KINDS)}"
        )
    return Fault(kind, int(after), int(pick))


def reduce(faults: tuple[Fault, ...], fails: Callable[[tuple[Fault, ...]], bool]) -> tuple[Fault, ...]:
    """Returns a part of the faults that fails too, of which no single one can be left out (delta debugging).

    Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002.
    """
    pieces = 2
    while len(faults) > 1:
        size = -(-len(faults) // pieces)
        starts = range(0, len(faults), size)
        rest = next((each for start in starts if fails(each := faults[:start] + faults[start + size :])), None)
        if rest is not None:
            faults, pieces = rest, max(2, pieces - 1)
        elif size == 1:
            break
        else:
            pieces = min(len(faults), 2 * pieces)
    return () if len(faults) == 1 and fails(()) else faults
