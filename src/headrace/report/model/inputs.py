"""How the workers of a run were fed: what each stage of the input cost, and who waited for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from msgspec.structs import replace

from headrace.report.format import fixed, percent
from headrace.report.model.events import Attempt, of_kind
from headrace.report.model.training import StepTimes
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
            merged[place] = InputStageStats(stage.name, old.busy_s + stage.busy_s, old.waiting_s + stage.waiting_s)
        else:
            merged.append(stage)
    return tuple(merged)


WORTH = 0.1
"""The part of a step that a worker must lose to something for it to be what holds the run up."""

_UNEVEN = 1.5
"""A worker whose input costs above so many times the others' is on its own the cause."""

_WAITS = 0.5
"""A stage that does not compute for more than this part of its time waits."""


@dataclass(frozen=True)
class Bottleneck:
    """What limits a run's speed, and what to try next.

    `kind` is "INPUT-BOUND", "STRAGGLER", "EXCHANGE-BOUND" or "COMPUTE-BOUND"; `stage` is of the input, `rank` the
    straggler's; `share` is the part of the mean step that is spent on it.
    """

    kind: str
    stage: str | None
    rank: int | None
    share: float
    because: str
    remedy: str

    @property
    def line(self) -> str:
        return f"{self.kind}: {self.because}"


def bottleneck_of(times: Mapping[int, StepTimes], inputs: InputSummary) -> Bottleneck | None:
    """Returns what limits a run's speed, from each worker's mean step and its input; None without a measured step.

    Where workers go in step, the last one is waited for in the exchange by all others. So the worker with the longest
    wait for data counts, not the mean. Whether it alone is the cause follows from the cost of its input, since one of
    several equal workers is the last, too.
    """
    times = {rank: each for rank, each in times.items() if each.total_s > 0}
    if not times:
        return None
    waits = {rank: each.wait_s / each.total_s for rank, each in times.items()}
    starved = max(waits, key=waits.__getitem__)
    slow, lag = _slowest(times)
    if waits[starved] >= WORTH and waits[starved] >= lag and starved in inputs.by_rank:
        return _input(starved, waits[starved], inputs)
    if lag >= WORTH:
        others_s = median(each.compute_s for rank, each in times.items() if rank != slow)
        longer = (
            f"{fixed(times[slow].compute_s / others_s)} × as long as the others" if others_s > 0 else "for all others"
        )
        because = f"rank {slow} computes {longer}, who wait for it"
        remedy = "look at what else runs on its machine, or give it a smaller share of each batch"
        return Bottleneck("STRAGGLER", None, slow, lag, because, remedy)
    exchange, total = (sum(getattr(each, part) for each in times.values()) for part in ("exchange_s", "total_s"))
    # On a GPU, the time between two steps is a wait for the computation.
    compute = sum(each.total_s - each.wait_s - each.exchange_s for each in times.values())
    waiting = f"{percent(waits[starved])} waits for data"
    if exchange > compute:
        because = f"{percent(exchange / total)} of a step goes to the exchange, {waiting}"
        remedy = "larger batches, so that each exchange is of more examples; or fewer workers"
        return Bottleneck("EXCHANGE-BOUND", None, None, exchange / total, because, remedy)
    because = f"{percent(compute / total)} of a step computes, {waiting}"
    remedy = "nothing of the input; a smaller or compiled model, a lower precision, or more workers"
    return Bottleneck("COMPUTE-BOUND", None, None, compute / total, because, remedy)


def _slowest(times: Mapping[int, StepTimes]) -> tuple[int, float]:
    """Returns the rank that computes longest, and which part of its step is beyond the others' median."""
    slow = max(times, key=lambda rank: times[rank].compute_s)
    others = [each.compute_s for rank, each in times.items() if rank != slow]
    return slow, (times[slow].compute_s - median(others)) / times[slow].total_s if others else 0.0


def _input(rank: int, share: float, inputs: InputSummary) -> Bottleneck:
    own = inputs.by_rank[rank]
    costs = {other: cost_s(each) for other, each in inputs.by_rank.items() if each.examples}
    others = [cost for other, cost in costs.items() if other != rank]
    if others and own.examples and cost_s(own) > _UNEVEN * median(others):
        stage = max(own.stages, key=lambda each: each.busy_s)
        times = cost_s(own) / median(others) if median(others) > 0 else 0.0
        because = (
            f"rank {rank} waits for data {percent(share)} of its time; its input costs {fixed(times)} × the others', "
            f"most of it {stage.name}"
        )
        remedy = "look at its disk and at what else runs on its machine; else as for a slow input: "
        return Bottleneck("STRAGGLER", stage.name, rank, share, because, remedy + _remedy(stage, own))
    stage = inputs.busiest
    part = stage.busy_s / inputs.busy_s if stage.busy_s else 0.0
    because = (
        f"by {stage.name}, {percent(part)} of the input's cost; a worker waits for data {percent(share)} of its time"
    )
    return Bottleneck("INPUT-BOUND", stage.name, None, share, because, _remedy(stage, own))


def _remedy(stage: InputStageStats, own: InputStats) -> str:
    """Returns what to try, by where the time goes and how the data is read already."""
    waits = stage.waiting_s > _WAITS * stage.busy_s
    if own.parallel == "inline" and stage.name != "batch":
        return 'read while the model computes: parallel="threads"; then cache what does not change'
    if stage.name == "source":
        if waits:
            return f'more readers than {own.readers}, since they wait; or .cache("memory"), .cache(folder)'
        return 'read less or what is cheaper to read: .cache("memory"), .cache(folder)'
    if stage.name == "batch":
        return "smaller tensors (uint8, made float by the model), or a transform that writes into the batch"
    if waits and own.parallel == "threads" and own.readers > 1:
        remedy = 'if it waits for something outside; if for Python\'s lock, batched=True or parallel="processes"'
        return f"more readers than {own.readers} {remedy}"
    if waits:
        return f"more readers than {own.readers}, since it waits more than it computes"
    return ".cache(...) behind it if it draws no random numbers, batched=True, fewer pixels, or more cores"
