"""The evidence of workers that go on by themselves, and come together from time to time."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.spec.events.base import Event


@dataclass(frozen=True)
class ParametersAveraged(Event):
    """When workers have met and their parameters were averaged: by rank 0, or by each where they meet through servers.

    Attributes:
        step: rounds done.
        rounds: since the meeting before.
        period: rounds until the next.
        why: that many, in words.
        drift: the largest distance of a worker's parameters from the workers' mean, over the norm of the mean.
        exchange_s: how long the meeting took rank 0, its wait for the others among it.
        left_out: ranks whose parameters were not finite; they went on from the others' mean.
        meeting: its number where each worker tells of it: then drift and time are that worker's own; else 0.
    """

    kind = "averaged"
    step: int
    rounds: int
    period: int
    why: str
    drift: float
    exchange_s: float
    left_out: tuple[int, ...] = ()
    meeting: int = 0
