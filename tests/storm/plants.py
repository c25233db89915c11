"""Faults planted in what a run has left: the checker must find each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from msgspec import structs

from headrace.spec.events import RunEnded, Stepped
from storm.evidence import Evidence, Strike
from storm.hosts import STILL
from storm.schedule import Fault

__all__ = ["PLANTS"]

KILL = Fault("kill", 1, 0)


def _attempt(evidence: Evidence, **changes: object) -> Evidence:
    """Changes the last attempt."""
    changed = replace(evidence.attempts[-1], **changes)  # type: ignore[arg-type]
    return replace(evidence, attempts=(*evidence.attempts[:-1], changed))


def _failed(evidence: Evidence, said: str, after_s: float) -> Evidence:
    """Puts an attempt before the first, in which rank 1 was killed."""
    strike = Strike(KILL, (1,), 100.0)
    failed = replace(evidence.attempts[0], strikes=(strike,), code=4, ended=100.0 + after_s, said=said)
    return replace(evidence, attempts=(failed, *evidence.attempts))


def _steps(evidence: Evidence, change: Callable[[list[Stepped]], list[Stepped]]) -> Evidence:
    steps = [event for event in evidence.events if isinstance(event, Stepped)]
    begins = [event for event in evidence.events if event.kind == "run_started"]
    rest = [event for event in evidence.events if event.kind not in ("run_started", "stepped")]
    return replace(evidence, events=(*begins, *change(steps), *rest))


def _ended(evidence: Evidence, status: str) -> Evidence:
    events = (structs.replace(each, status=status) if isinstance(each, RunEnded) else each for each in evidence.events)
    return replace(evidence, events=tuple(events))


PLANTS: dict[str, Callable[[Evidence], Evidence]] = {
    "a process is left": lambda seen: _attempt(seen, processes=("python",)),
    "a file is left": lambda seen: _attempt(seen, files=("headrace-1",)),
    "it stands still": lambda seen: _attempt(seen, ended=math.inf),
    "a rank stands still": lambda seen: _attempt(seen, said=f"{STILL}, process 7"),
    "a traceback": lambda seen: _attempt(seen, said="Traceback (most recent call last):\n  ...\nKeyError: 1"),
    "no error": lambda seen: _failed(seen, "", 0.1),
    "another rank is named": lambda seen: _failed(seen, "PeerLost: rank 0 was lost", 0.1),
    "the error comes late": lambda seen: _failed(seen, "PeerLost: rank 1 was lost", 60.0),
    "other parameters": lambda seen: replace(seen, parameters="0" * 64),
    "a round is missing": lambda seen: _steps(seen, lambda steps: steps[:-1]),
    "a round counts twice": lambda seen: _steps(seen, lambda steps: [*steps, steps[-1]]),
    "examples are missing": lambda seen: _steps(
        seen, lambda steps: [*steps[:-1], structs.replace(steps[-1], examples=steps[-1].examples - 1)]
    ),
    "a half checkpoint": lambda seen: replace(seen, unfinished=("step-00000008.part",)),
    "the end is not said": lambda seen: _ended(seen, "failed"),
}
