"""How the workers of a run were fed: what each stage of the input cost, and who waited for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from headrace.report.model.attempts import Attempt, of_kind
from headrace.spec.events import InputStageStats, InputStats

_COUNTS = ("seconds", "waited_s", "ready", "batches", "examples", "bytes", "skipped")


@dataclass(frozen=True)
class InputSummary:
    """What fed all workers. What a later attempt did again counts twice here: it was read twice.

    Attributes:
        by_rank: what fed each worker, in all attempts together.
    """

    by_rank: Mapping[int, InputStats]

    @property
    def stages(self) -> tuple[InputStageStats, ...]:
        """Of all workers together."""
        merged: tuple[InputStageStats, ...] = ()
        for each in self.by_rank.values():
            merged = _merged(merged, each.stages)
        return merged

    @property
    def busiest(self) -> InputStageStats:
        """The stage that cost most."""
        return max(self.stages, key=lambda stage: stage.busy_s)

    @property
    def examples(self) -> int:
        """That came to all workers."""
        return sum(each.examples for each in self.by_rank.values())

    @property
    def skipped(self) -> int:
        """Examples that could not be had."""
        return sum(each.skipped for each in self.by_rank.values())


def inputs_of(attempts: Iterable[Attempt]) -> InputSummary | None:
    """Returns how the workers of a run were fed; None where none has spoken yet."""
    by_rank: dict[int, InputStats] = {}
    for attempt in attempts:
        for fed in _lasts(of_kind(InputStats, attempt.events)):
            by_rank[fed.rank] = _sum(fed, by_rank.get(fed.rank))
    return InputSummary(dict(sorted(by_rank.items()))) if by_rank else None


def busy_s(fed: InputStats) -> float:
    """Returns the seconds in all stages, in all readers together."""
    return sum(stage.busy_s for stage in fed.stages)


def blocked_s(fed: InputStats) -> float:
    """Returns the seconds in which readers had nothing to do: enough batches waited, or memory was full.

    0 where the worker itself reads.
    """
    return 0.0 if fed.parallel == "inline" else max(0.0, fed.readers * fed.seconds - busy_s(fed))


def occupancy(fed: InputStats) -> float:
    """Returns how many batches were there when one was asked for, on the mean."""
    return fed.ready / fed.batches if fed.batches else 0.0


def cost_s(fed: InputStats) -> float:
    """Returns the seconds for which one example keeps all readers busy."""
    return busy_s(fed) / fed.readers / fed.examples if fed.examples else 0.0


def _lasts(told: Iterable[InputStats]) -> list[InputStats]:
    """Returns what each worker said last; where another took its place and began to count anew, what both did."""
    lasts: list[InputStats] = []
    current: dict[int, InputStats] = {}
    for event in told:
        before = current.get(event.rank)
        if before is not None and event.batches < before.batches:
            lasts.append(before)
        current[event.rank] = event
    return [*lasts, *current.values()]


def _sum(fed: InputStats, before: InputStats | None) -> InputStats:
    """Returns both together; by whom it was read is of the later one."""
    if before is None:
        return fed
    added = {name: getattr(fed, name) + getattr(before, name) for name in _COUNTS}
    return replace(fed, stages=_merged(before.stages, fed.stages), **added)


def _merged(some: Sequence[InputStageStats], more: Sequence[InputStageStats]) -> tuple[InputStageStats, ...]:
    """Adds stages up that have one place and name; two steps of a pipeline may share a name."""
    merged = list(some)
    for place, stage in enumerate(more):
        if place < len(merged) and merged[place].name == stage.name:
            old = merged[place]
            merged[place] = InputStageStats(stage.name, old.busy_s + stage.busy_s, old.waiting_s + stage.waiting_s)
        else:
            merged.append(stage)
    return tuple(merged)
