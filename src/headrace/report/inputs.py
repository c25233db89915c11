"""How the workers of a run were fed: what each stage of the input cost, and who waited for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace.report.attempts import Attempt, of_kind
from headrace.spec.event import Fed, FedStage

__all__ = ["Input", "Inputs", "input_of", "inputs_of"]


@dataclass(frozen=True)
class Input:
    """What fed one worker, in all attempts together.

    Attributes:
        parallel: "inline", "threads" or "processes"; of the last attempt.
        readers: how many threads or processes; 1 where the worker itself reads.
        seconds: from the first batch's being asked for to the last's coming.
        waited_s: of those, in which the worker waited for a batch.
        ready: batches that were there when one was asked for, summed.
        batches, examples, bytes: that came.
        skipped: examples that could not be had and were left out.
        stages: the source, each transform, and what makes the batch.
    """

    parallel: str
    readers: int
    seconds: float
    waited_s: float
    ready: int
    batches: int
    examples: int
    bytes: int
    skipped: int
    stages: tuple[FedStage, ...]

    @property
    def busy_s(self) -> float:
        """Seconds in all stages, in all readers together."""
        return sum(stage.busy_s for stage in self.stages)

    @property
    def blocked_s(self) -> float:
        """Seconds, in all readers together, in which they had nothing to do: enough batches waited, or memory was full.

        0 where the worker itself reads.
        """
        return 0.0 if self.parallel == "inline" else max(0.0, self.readers * self.seconds - self.busy_s)

    @property
    def occupancy(self) -> float:
        """Batches that were there when one was asked for, on the mean."""
        return self.ready / self.batches if self.batches else 0.0

    @property
    def cost_s(self) -> float:
        """Seconds for which one example keeps all readers busy."""
        return self.busy_s / self.readers / self.examples if self.examples else 0.0


@dataclass(frozen=True)
class Inputs:
    """What fed all workers. What a later attempt did again counts twice here: it was read twice.

    Attributes:
        by_rank: each worker's.
    """

    by_rank: Mapping[int, Input]

    @property
    def stages(self) -> tuple[FedStage, ...]:
        """Of all workers together."""
        merged: tuple[FedStage, ...] = ()
        for each in self.by_rank.values():
            merged = _merged(merged, each.stages)
        return merged

    @property
    def busiest(self) -> FedStage:
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


def inputs_of(attempts: Iterable[Attempt]) -> Inputs | None:
    """Returns how the workers of a run were fed; None where none has spoken yet."""
    by_rank: dict[int, Input] = {}
    for attempt in attempts:
        for fed in _lasts(of_kind(Fed, attempt.events)):
            by_rank[fed.rank] = _sum(input_of(fed), by_rank.get(fed.rank))
    return Inputs(dict(sorted(by_rank.items()))) if by_rank else None


def input_of(fed: Fed) -> Input:
    """Returns what one event says."""
    return Input(
        parallel=fed.parallel,
        readers=max(1, fed.readers),
        seconds=fed.seconds,
        waited_s=fed.waited_s,
        ready=fed.ready,
        batches=fed.batches,
        examples=fed.examples,
        bytes=fed.bytes,
        skipped=fed.skipped,
        stages=fed.stages,
    )


def _lasts(told: Iterable[Fed]) -> list[Fed]:
    """Returns what each worker said last; where another took its place and began to count anew, what both did."""
    lasts: list[Fed] = []
    current: dict[int, Fed] = {}
    for event in told:
        before = current.get(event.rank)
        if before is not None and event.batches < before.batches:
            lasts.append(before)
        current[event.rank] = event
    return [*lasts, *current.values()]


def _sum(work: Input, before: Input | None) -> Input:
    if before is None:
        return work
    return Input(
        parallel=work.parallel,
        readers=work.readers,
        seconds=work.seconds + before.seconds,
        waited_s=work.waited_s + before.waited_s,
        ready=work.ready + before.ready,
        batches=work.batches + before.batches,
        examples=work.examples + before.examples,
        bytes=work.bytes + before.bytes,
        skipped=work.skipped + before.skipped,
        stages=_merged(before.stages, work.stages),
    )


def _merged(some: Sequence[FedStage], more: Sequence[FedStage]) -> tuple[FedStage, ...]:
    """Adds stages up that have one place and name; two steps of a pipeline may share a name."""
    merged = list(some)
    for place, stage in enumerate(more):
        if place < len(merged) and merged[place].name == stage.name:
            old = merged[place]
            merged[place] = FedStage(stage.name, old.busy_s + stage.busy_s, old.waiting_s + stage.waiting_s)
        else:
            merged.append(stage)
    return tuple(merged)
