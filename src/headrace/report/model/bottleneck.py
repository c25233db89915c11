"""What limits a run's speed: the largest parts of its step, and what to try next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from headrace.report.format import fixed, percent, plural
from headrace.report.model.inputs import InputSummary, busy_s, cost_s
from headrace.report.model.pipeline import PipelineStep
from headrace.report.model.training import StepTimes
from headrace.spec.events import InputStageStats, InputStats, RunStarted

WORTH = 0.1
"""The part of a step that a worker must lose to something for it to be worth a remedy."""

_NEAR = 0.7
"""A part that is above so much of the largest is named beside it."""

_EXPLAINS = 0.4
"""The input explains a wait where reading alone takes above this part of it."""

_UNEVEN = 1.5
"""A worker whose input costs above so many times the others' is on its own the cause."""

_WAITS = 0.5
"""A stage that does not compute for more than this part of its time waits."""


@dataclass(frozen=True)
class Bottleneck:
    """What limits a run's speed, and what to try next.

    `kind` is "STRAGGLER", or names the largest part of a step, and those near it: "INPUT-BOUND", "EXCHANGE- AND
    COMPUTE-BOUND", "TURN-BOUND"; of pipelines also "BUBBLE", "IMBALANCE" and "TRANSFER". `stage` is of the input,
    `rank` the straggler's; `share` is the part of the mean step that is spent on what is named first.
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


@dataclass(frozen=True)
class _Part:
    """A part of a step: its share, what is said of it, and what makes it smaller."""

    name: str
    share: float
    words: str
    remedy: str


def bottleneck_of(
    times: Mapping[int, StepTimes],
    inputs: InputSummary,
    started: RunStarted | None = None,
    passed: PipelineStep | None = None,
) -> Bottleneck | None:
    """Returns what limits a run's speed, from each worker's mean step and its input; None without a measured step.

    Where workers go in step, the last one is waited for in the exchange by all others. So the worker with the longest
    wait for data counts, not the mean. Whether it alone is the cause follows from the cost of its input, since one of
    several equal workers is the last, too.
    """
    if passed is not None:
        return _of_stages(passed, started)
    times = {rank: each for rank, each in times.items() if each.total_s > 0}
    if not times:
        return None
    waits = {rank: each.wait_s / each.total_s for rank, each in times.items()}
    read = {rank: _explained(waits[rank], inputs.by_rank[rank]) for rank in times if rank in inputs.by_rank}
    starved = max(read, key=read.__getitem__, default=min(times))
    slow, lag = _slowest(times)
    is_starved = read.get(starved, 0.0) >= WORTH
    if is_starved and read[starved] >= lag and (found := _dear_input(starved, waits[starved], inputs)):
        return found
    if lag >= WORTH and lag > read.get(starved, 0.0):
        return _straggler(times, slow, lag, started)
    # The last process to come waits for no other.
    counted = [times[starved]] if is_starved else list(times.values())
    total = sum(each.total_s for each in counted)
    wait, exchange = sum(each.wait_s for each in counted) / total, sum(each.exchange_s for each in counted) / total
    data = read[starved] if is_starved else min(wait, max(read.values(), default=0.0))
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
    remedy = _remedy(stage, inputs.by_rank[starved]) if starved in inputs.by_rank else ""
    parts = [
        _Part("COMPUTE", compute, f"{percent(compute)} of a step computes", _less_compute(started, shared)),
        _Part("EXCHANGE", exchange, f"{percent(exchange)} goes to the exchange", _less_exchange(started, shared)),
        _Part("INPUT", data, f"{percent(data)} waits for data{costs}", remedy),
        _Part("TURN", turn, f"{percent(turn)} waits for {busy}", fewer_workers(started) or "fewer workers"),
    ]
    parts.sort(key=lambda each: -each.share)
    named = [each for each in parts if each.share >= _NEAR * parts[0].share]
    shown = [each for each in parts if each in named or each.share >= WORTH or each.name == "INPUT"]
    words = by if alone else ", ".join(each.words for each in shown)
    if not alone and "of a step" not in shown[0].words:
        words = shown[0].words.replace(" %", " % of a step", 1) + ", " * (len(shown) > 1)
        words += ", ".join(each.words.replace(" of a step", "") for each in shown[1:])
    if shared and named[0].name == "EXCHANGE":
        words += f"; {shared}, so that each also waits there for its turn"
    also = [each for each in parts if each.name in ("INPUT", "TURN") and each.share >= WORTH and each not in named]
    remedies = dict.fromkeys(each.remedy for each in (*named, *also) if each.remedy)
    kind = f"{'- AND '.join(each.name for each in named)}-BOUND"
    of = stage.name if any(each.name == "INPUT" for each in named) else None
    return Bottleneck(kind, of, None, parts[0].share, words, "; ".join(remedies))


def _explained(wait: float, fed: InputStats) -> float:
    """Returns which part of a worker's step its input's own time explains, of the part that it waits for data."""
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
    if shared := shared_cores(started):
        return Bottleneck("STRAGGLER", None, slow, lag, f"{because}; {shared}", fewer_workers(started))
    remedy = 'look at what else runs on its machine, or give it smaller shares of batches: mirrored(balance="speed")'
    return Bottleneck("STRAGGLER", None, slow, lag, because, remedy)


def _dear_input(rank: int, share: float, inputs: InputSummary) -> Bottleneck | None:
    """Returns the worker whose input alone is dear; None where the others' costs as much."""
    own = inputs.by_rank[rank]
    costs = {other: cost_s(each) for other, each in inputs.by_rank.items() if each.examples}
    others = [cost for other, cost in costs.items() if other != rank]
    if not (others and own.examples and cost_s(own) > _UNEVEN * median(others)):
        return None
    stage = max(own.stages, key=lambda each: each.busy_s)
    times = cost_s(own) / median(others) if median(others) > 0 else 0.0
    because = (
        f"rank {rank} waits for data {percent(share)} of its time; its input costs {fixed(times)} × the others', "
        f"most of it {stage.name}"
    )
    remedy = "look at its disk and at what else runs on its machine; else as for a slow input: "
    return Bottleneck("STRAGGLER", stage.name, rank, share, because, remedy + _remedy(stage, own))


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


def _processes(started: RunStarted) -> int:
    """Returns how many processes, workers and servers, compute on the cores of the launcher's host."""
    roles = started.plan.get("roles")
    if not isinstance(roles, list | tuple) or not roles or started.device != "cpu":
        return 0
    return sum(each["host"] == roles[0]["host"] for each in roles)


def shared_cores(started: RunStarted | None) -> str:
    """Returns that more processes than cores compute; "" where they do not, or it is not known."""
    if started is None or not 0 < started.cores < _processes(started):
        return ""
    return f"{plural(_processes(started), 'process', 'es')} share {plural(started.cores, 'core')}"


def _less_compute(started: RunStarted | None, shared: str) -> str:
    if shared:
        return fewer_workers(started)
    more = started is not None and _processes(started) * started.threads < started.cores and started.workers > 1
    workers = f", or more workers: {changed_command(started, workers=started.workers + 1)}" if started and more else ""
    compiled = 'options=hr.Options(compile="auto"), which measures first'
    return f"nothing of the input; a smaller model, or {compiled}{workers}"


def _less_exchange(started: RunStarted | None, shared: str) -> str:
    size = 2 * started.global_batch_size if started else 0
    batch = f"a larger batch, so that an exchange is of more examples: global_batch_size={size}" if size else ""
    return "; ".join(filter(None, (fewer_workers(started) if shared else "", batch)))


def fewer_workers(started: RunStarted | None) -> str:
    """Returns the command with as many workers as cores are left by the servers; "" where there are no fewer."""
    if started is None or not started.cores:
        return ""
    workers = max(1, started.cores - (_processes(started) - started.workers))
    return f"a process a core: {changed_command(started, workers=workers)}" if workers < started.workers else ""


def changed_command(started: RunStarted, **changes: int) -> str:
    """Returns the command that started a run, with changes; where it was a program's call, the changes alone.

    `workers` is an option of the command, others are of the strategy. It has no --run-dir: that holds this run.
    """
    if not started.command.startswith("headrace train "):
        return ", ".join(f"{name}={value}" for name, value in changes.items())
    words, kept = shlex.split(started.command), list[str]()
    options = {"--strategy": started.strategy}
    while words:
        name, sign, value = words.pop(0).partition("=")
        if name in ("--run-dir", "--strategy", "--workers", "-w", "--resume", "--watch"):
            value = value if sign or name in ("--resume", "--watch") or not words else words.pop(0)
            options[name] = value
        else:
            kept.append(f"{name}{sign}{value}")
    strategy = options["--strategy"]
    own = {name: value for name, value in changes.items() if name != "workers"}
    if own:
        before = strategy.removesuffix(")") + (", " if strategy.endswith(")") else "(")
        strategy = before + ", ".join(f"{name}={value}" for name, value in own.items()) + ")"
    workers = str(changes["workers"]) if "workers" in changes else options.get("--workers")
    kept += ["--strategy", strategy, *(("--workers", workers) if workers else ())]
    return shlex.join(kept)


def _of_stages(step: PipelineStep, started: RunStarted | None) -> Bottleneck:
    """Returns what the ranks of a pipeline lose most time to: the schedule, unlike stages, or transfers."""
    own, uneven = step.scheduled_bubble, max(0.0, step.uneven_bubble - step.scheduled_bubble)
    rest = max(0.0, step.bubble - own - uneven)
    shared = shared_cores(started)
    slow = max(step.stage_s, key=lambda stage: step.stage_s[stage])
    count = 2 * step.micro_batches
    more = changed_command(started, micro_batches=count) if started else f"micro_batches={count}"
    others = f"waits for its turn: cores busy ({shared})" if shared else "goes to transfers between stages"
    parts = [
        _Part("BUBBLE", own, f"{percent(own)} is the schedule's own with {step.micro_batches} micro-batches", more),
        _Part(
            "IMBALANCE",
            uneven,
            f"{percent(uneven)} waits for stage {slow}, which takes longest",
            "cut it by a new profile: leave partition= out, or move layers from that stage to the others",
        ),
        _Part(
            "TRANSFER",
            rest,
            f"{percent(rest)} {others}",
            (fewer_workers(started) if shared else "") or "fewer stages, or a cut where activations are smaller",
        ),
    ]
    parts.sort(key=lambda each: -each.share)
    if step.bubble < WORTH:
        because = f"stages compute {percent(1 - step.bubble)} of a step"
        return Bottleneck("COMPUTE-BOUND", None, None, 1 - step.bubble, because, _less_compute(started, shared))
    named = [each for each in parts if each.share >= _NEAR * parts[0].share]
    words = ", ".join(each.words for each in parts if each in named or each.share >= WORTH / 2)
    because = f"stages work on nothing for {percent(step.bubble)} of a step: {words}"
    kind = f"{'- AND '.join(each.name for each in named)}-BOUND"
    return Bottleneck(kind, None, None, parts[0].share, because, "; ".join(each.remedy for each in named))
