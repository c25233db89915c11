"""What limits a run's speed: the largest parts of its step, and what to try next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median

from headrace.report.format import fixed, percent
from headrace.report.model.inputs import InputSummary, busy_s, cost_s
from headrace.report.model.pipeline import PipelineStep
from headrace.report.model.remedies import (
    Remedy,
    even_shares,
    fewer_workers,
    has_servers,
    less_exchange,
    less_input,
    less_transfer,
    less_turn,
    more_micro_batches,
    processes,
    shared_cores,
)
from headrace.report.model.training import StepTimes
from headrace.spec.events import InputStats, RunStarted

WORTH = 0.1
"""The part of a step that a worker must lose to something for it to be worth a remedy."""

_NEAR = 0.7
"""A part that is above so much of the largest is named beside it."""

_EXPLAINS = 0.4
"""The input explains a wait where reading alone takes above this part of it."""

_UNEVEN = 1.5
"""A worker whose input costs above so many times the others' is on its own the cause."""


_COMPILED = ("one_device", "mirrored", "multi_worker_mirrored", "central_storage")
"""Strategies under which a model may be compiled as a whole."""


@dataclass(frozen=True)
class Bottleneck:
    """What limits a run's speed, and what to try next.

    `kind` is "STRAGGLER", or names the largest part of a step, and those near it: "INPUT-BOUND", "EXCHANGE- AND
    COMPUTE-BOUND", "TURN-BOUND"; of pipelines also "BUBBLE", "IMBALANCE" and "TRANSFER". `stage` is of the input,
    `rank` the straggler's; `share` is the part of the mean step that is spent on what is named first. `command` is the
    first of the remedy; "" where it is no command.
    """

    kind: str
    stage: str | None
    rank: int | None
    share: float
    because: str
    remedy: str
    command: str = ""

    @property
    def line(self) -> str:
        return f"{self.kind}: {self.because}"


@dataclass(frozen=True)
class _Part:
    """A part of a step: its share, what is said of it, and what makes it smaller."""

    name: str
    share: float
    words: str
    change: Remedy | None


def bottleneck_of(
    times: Mapping[int, StepTimes],
    inputs: InputSummary,
    started: RunStarted | None = None,
    passed: PipelineStep | None = None,
    last: StepTimes | None = None,
) -> Bottleneck | None:
    """Returns what limits a run's speed, from each worker's mean step and its input; None without a measured step.

    Where workers go in step, the last one is waited for in the exchange by all others. So the worker with the longest
    wait for data counts, not the mean. Whether it alone is the cause follows from the cost of its input, since one of
    several equal workers is the last, too. Where they take turns in that, `last` is the mean step of the last one.
    """
    if passed is not None:
        return _of_stages(passed, started)
    times = {rank: each for rank, each in times.items() if each.total_s > 0}
    if not times:
        return None
    waits = {rank: each.wait_s / each.total_s for rank, each in times.items()}
    served = has_servers(started)
    read = {rank: _explained(waits[rank], inputs.by_rank[rank], served) for rank in times if rank in inputs.by_rank}
    starved = max(read, key=read.__getitem__, default=min(times))
    slow, lag = _slowest(times)
    is_starved = read.get(starved, 0.0) >= WORTH
    if is_starved and read[starved] >= lag and (found := _dear_input(starved, waits[starved], inputs, started)):
        return found
    if lag >= WORTH and lag > read.get(starved, 0.0):
        return _straggler(times, slow, lag, started)
    # The last process to come waits for no other.
    counted = [times[starved]] if is_starved else list(times.values())
    if is_starved and last is not None and last.total_s > 0 and not served:
        counted = [last]
        read[starved] = _explained(last.wait_s / last.total_s, inputs.by_rank[starved], served)
    total = sum(each.total_s for each in counted)
    wait, exchange = sum(each.wait_s for each in counted) / total, sum(each.exchange_s for each in counted) / total
    data = read[starved] if is_starved else min(wait, max(read.values(), default=0.0))
    if is_starved and not served and (fed := inputs.by_rank[starved]).seconds > 0:
        # While readers are busy, what is not computing is theirs: they have the cores, or the others' data is late.
        left = max(0.0, 1.0 - busy_s(fed) / fed.readers / fed.seconds)
        data, exchange = data + max(0.0, exchange - left), min(exchange, left)
        wait = max(wait, data)
    return _largest(data, wait - data, exchange, inputs, starved, started)


def _largest(
    data: float, turn: float, exchange: float, inputs: InputSummary, starved: int, started: RunStarted | None
) -> Bottleneck:
    stage, shared = inputs.busiest, shared_cores(started)
    part = stage.busy_s / inputs.busy_s if stage.busy_s else 0.0
    by = f"by {stage.name}, {percent(part)} of the input's cost; a worker waits for data {percent(data)} of its time"
    # On a GPU, the time between two steps is a wait for the computation.
    compute = 1.0 - data - turn - exchange
    alone = data >= WORTH and data * _NEAR > max(turn, exchange, compute)
    costs = f" ({stage.name} is {percent(part)} of its cost)" if data >= WORTH else ""
    busy = f"its turn: cores busy ({shared})" if shared else "its next share of the data, which a server gives"
    if not shared and not has_servers(started):
        busy = "batches, though reading takes little: its readers wait for a core, or for Python's lock"
    fed = inputs.by_rank.get(starved)
    fewer = fewer_workers(started) if shared else None
    parts = [
        _Part("COMPUTE", compute, f"{percent(compute)} of a step computes", fewer or _less_compute(started)),
        _Part(
            "EXCHANGE", exchange, f"{percent(exchange)} goes to the exchange", fewer or less_exchange(started, compute)
        ),
        _Part(
            "INPUT",
            data,
            f"{percent(data)} waits for data{costs}",
            less_input(stage, fed, _epochs(started)) if fed else None,
        ),
        _Part("TURN", turn, f"{percent(turn)} waits for {busy}", fewer_workers(started) or less_turn(started)),
    ]
    parts.sort(key=lambda each: -each.share)
    named = [each for each in parts if each.share >= _NEAR * parts[0].share]
    shown = [each for each in parts if each in named or each.share >= WORTH or each.name == "INPUT"]
    words = by if alone else ", ".join(each.words for each in shown)
    if not alone and "of a step" not in shown[0].words:
        words = shown[0].words.replace(" %", " % of a step", 1) + ", " * (len(shown) > 1)
        words += ", ".join(each.words.replace(" of a step", "") for each in shown[1:])
    if shared and named[0].name in ("COMPUTE", "EXCHANGE"):
        words += f"; {shared}, so that each also waits there for its turn"
    also = [each for each in parts if each.name in ("INPUT", "TURN") and each.share >= WORTH and each not in named]
    changes = [each.change for each in (*named, *also)]
    kind = f"{'- AND '.join(each.name for each in named)}-BOUND"
    of = stage.name if any(each.name == "INPUT" for each in named) else None
    return _found(kind, of, None, parts[0].share, words, changes, started)


def _found(
    kind: str,
    stage: str | None,
    rank: int | None,
    share: float,
    because: str,
    changes: Sequence[Remedy | None],
    started: RunStarted | None,
) -> Bottleneck:
    """Returns a bottleneck with what its remedies say, each once."""
    told = list(dict.fromkeys(each.told(started) for each in changes if each is not None))
    command = next(filter(None, (each.command(started) for each in changes if each is not None)), "")
    return Bottleneck(kind, stage, rank, share, because, "; ".join(told), command)


def _epochs(started: RunStarted | None) -> float:
    """Returns how many epochs a run has; without end where it is not known."""
    if started is None or not started.examples_per_epoch or not started.rounds:
        return inf
    return started.rounds * started.global_batch_size / started.examples_per_epoch


def _explained(wait: float, fed: InputStats, served: bool) -> float:
    """Returns which part of a worker's step its input's own time explains, of the part that it waits for data.

    A worker that reads itself, and asks no server for its share, waits for nothing else.
    """
    if fed.parallel == "inline" and not served:
        return wait
    reading = busy_s(fed) / fed.readers / fed.seconds if fed.readers and fed.seconds > 0 else 0.0
    return wait if reading >= _EXPLAINS * wait else reading


def _slowest(times: Mapping[int, StepTimes]) -> tuple[int, float]:
    """Returns the rank that computes longest, and which part of its step is beyond the others' median."""
    slow = max(times, key=lambda rank: times[rank].compute_s)
    others = [each.compute_s for rank, each in times.items() if rank != slow]
    return slow, (times[slow].compute_s - median(others)) / times[slow].total_s if others else 0.0


def _straggler(times: Mapping[int, StepTimes], slow: int, lag: float, started: RunStarted | None) -> Bottleneck:
    others_s = median(each.compute_s for rank, each in times.items() if rank != slow)
    longer = f"{fixed(times[slow].compute_s / others_s)} × as long as the others" if others_s > 0 else "for all others"
    because = f"rank {slow} computes {longer}, who wait for it"
    change: Remedy | None = even_shares(started)
    if shared := shared_cores(started):
        because, change = f"{because}; {shared}", fewer_workers(started)
    return _found("STRAGGLER", None, slow, lag, because, [change], started)


def _dear_input(rank: int, share: float, inputs: InputSummary, started: RunStarted | None) -> Bottleneck | None:
    """Returns the worker whose input alone is dear; None where the others' costs as much."""
    own = inputs.by_rank[rank]
    costs = {other: cost_s(each) for other, each in inputs.by_rank.items() if each.examples}
    others = [cost for other, cost in costs.items() if other != rank]
    if not (others and own.examples and cost_s(own) > _UNEVEN * median(others)):
        return None
    if (1.0 - median(others) / cost_s(own)) * busy_s(own) / own.readers < WORTH * own.seconds:
        return None  # what is more than the others' takes too little time to matter
    stage = max(own.stages, key=lambda each: each.busy_s)
    times = cost_s(own) / median(others) if median(others) > 0 else 0.0
    because = (
        f"rank {rank} waits for data {percent(share)} of its time; its input costs {fixed(times)} × the others', "
        f"most of it {stage.name}"
    )
    change = less_input(stage, own, _epochs(started))
    words = f"look at its disk and at what else runs on its machine; else {change.words}"
    return _found("STRAGGLER", stage.name, rank, share, because, [replace(change, words=words)], started)


def _less_compute(started: RunStarted | None) -> Remedy:
    if started is not None and started.workers and processes(started) * started.threads < started.cores:
        more = started.workers + 1
        if started.workers > 1:
            return Remedy("nothing of the input; more workers", f"workers={more}", workers=more)
        two = "nothing of the input; two workers"
        return Remedy(two, "strategy=hr.Mirrored(workers=2)", strategy="mirrored", workers=2)
    if started is not None and started.strategy not in _COMPILED:
        return Remedy("nothing of the input; a smaller model")
    words = "nothing of the input; a smaller model, or what torch compiles, where it is measured to be faster"
    return Remedy(words, 'options=hr.Options(compile="auto")', settings=(("options.compile", "auto"),))


def _of_stages(step: PipelineStep, started: RunStarted | None) -> Bottleneck:
    """Returns what the ranks of a pipeline lose most time to: the schedule, unlike stages, or transfers.

    Where processes share cores, fewer of them come before all else: more micro-batches are more turns.
    """
    own, uneven = step.scheduled_bubble, max(0.0, step.uneven_bubble - step.scheduled_bubble)
    rest = max(0.0, step.bubble - own - uneven)
    shared = shared_cores(started)
    fewer = fewer_workers(started) if shared else None
    slow = max(step.stage_s, key=lambda stage: step.stage_s[stage])
    others = f"waits for its turn: cores busy ({shared})" if shared else "goes to transfers between stages"
    parts = [
        _Part(
            "BUBBLE",
            own,
            f"{percent(own)} is the schedule's own with {step.micro_batches} micro-batches",
            fewer or more_micro_batches(started, step.micro_batches),
        ),
        _Part(
            "IMBALANCE",
            uneven,
            f"{percent(uneven)} waits for stage {slow}, which takes longest",
            fewer or Remedy("cut it by a new profile", 'partition="auto"', own=(("partition", "auto"),)),
        ),
        _Part("TRANSFER", rest, f"{percent(rest)} {others}", fewer or less_transfer(started)),
    ]
    parts.sort(key=lambda each: -each.share)
    if parts[0].share < WORTH:
        because = f"stages compute {percent(1 - step.bubble)} of a step"
        return _found("COMPUTE-BOUND", None, None, 1 - step.bubble, because, [fewer or _less_compute(started)], started)
    named = [each for each in parts if each.share >= _NEAR * parts[0].share]
    words = ", ".join(each.words for each in parts if each in named or each.share >= WORTH / 2)
    because = f"stages work on nothing for {percent(step.bubble)} of a step: {words}"
    if shared and shared not in because:
        because += f"; {shared}"
    kind = f"{'- AND '.join(each.name for each in named)}-BOUND"
    return _found(kind, None, None, parts[0].share, because, [each.change for each in named], started)
