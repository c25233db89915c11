"""How the workers of a run were fed: what each stage of the input cost, and who waited for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from headrace.report.model.events import Attempt, of_kind
from headrace.spec.events import InputStageStats, InputStats

_COUNTS = ("seconds", "waited_s", "ready", "batches", "examples", "bytes", "skipped")


@dataclass(frozen=True)
class InputSummary:
    """The input of all workers, in all attempts together. Batches that a later attempt read again count twice."""

    by_rank: Mapping[int, InputStats]

    @property
    def stages(self) -> tuple[InputStageStats, ...]:
        """The stages of all workers together."""
        merged: tuple[InputStageStats, ...] = ()
        for each in self.by_rank.values():
            merged = _merged(merged, each.stages)
        return merged

    @property
    def busiest(self) -> InputStageStats:
        return max(self.stages, key=lambda stage: stage.busy_s)

    @property
    def busy_s(self) -> float:
        """Seconds in all stages, in all readers of all workers together."""
        return sum(stage.busy_s for stage in self.stages)

    @property
    def first(self) -> InputStats:
        return next(iter(self.by_rank.values()))

    @property
    def ms_per_example(self) -> float | None:
        return 1e3 * self.busy_s / self.examples if self.examples else None

    @property
    def least_occupancy(self) -> float:
        return min(map(occupancy, self.by_rank.values()))

    @property
    def examples(self) -> int:
        return sum(each.examples for each in self.by_rank.values())

    @property
    def skipped(self) -> int:
        """Examples that could not be read and were left out."""
        return sum(each.skipped for each in self.by_rank.values())


def inputs_of(attempts: Iterable[Attempt]) -> InputSummary | None:
    """Returns the input of a run; None without input events."""
    by_rank: dict[int, InputStats] = {}
    for attempt in attempts:
        for fed in _lasts(of_kind(InputStats, attempt.events)):
            by_rank[fed.rank] = _sum(fed, by_rank.get(fed.rank))
    return InputSummary(dict(sorted(by_rank.items()))) if by_rank else None


def busy_s(fed: InputStats) -> float:
    """Returns the seconds in all stages, in all readers together."""
    return sum(stage.busy_s for stage in fed.stages)


def blocked_s(fed: InputStats) -> float:
    """Returns the seconds in which readers idled because the queue or memory was full; 0 for inline reading."""
    return 0.0 if fed.parallel == "inline" else max(0.0, fed.readers * fed.seconds - busy_s(fed))


def occupancy(fed: InputStats) -> float:
    """Returns the mean number of ready batches when one was asked for."""
    return fed.ready / fed.batches if fed.batches else 0.0


def cost_s(fed: InputStats) -> float:
    """Returns the seconds for which one example keeps all readers busy."""
    return busy_s(fed) / fed.readers / fed.examples if fed.readers and fed.examples else 0.0


def _lasts(events: Iterable[InputStats]) -> list[InputStats]:
    """Returns each worker's last event; where a replacement began to count anew, the last of both."""
    lasts: list[InputStats] = []
    current: dict[int, InputStats] = {}
    for event in events:
        before = current.get(event.rank)
        if before is not None and event.batches < before.batches:
            lasts.append(before)
        current[event.rank] = event
    return [*lasts, *current.values()]


def _sum(fed: InputStats, before: InputStats | None) -> InputStats:
    """Returns both added; the reader settings are the later one's."""
    if before is None:
        return fed
    added = {name: getattr(fed, name) + getattr(before, name) for name in _COUNTS}
    return replace(fed, stages=_merged(before.stages, fed.stages), **added)


def _merged(some: Sequence[InputStageStats], more: Sequence[InputStageStats]) -> tuple[InputStageStats, ...]:
    """Adds up stages with the same position and name; two steps of a pipeline may share a name."""
    merged = list(some)
    for place, stage in enumerate(more):
        if place < len(merged) and merged[place].name == stage.name:
            old = merged[place]
            sums = {"busy_s": old.busy_s + stage.busy_s, "waiting_s": old.waiting_s + stage.waiting_s}
            merged[place] = replace(stage, **sums)
        else:
            merged.append(stage)
    return tuple(merged)
