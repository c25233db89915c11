"""What limits a run's speed, of mean steps that are made by hand: the largest part, and what is near it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from headrace.report.model.bottleneck import Bottleneck, bottleneck_of
from headrace.report.model.inputs import InputSummary
from headrace.report.model.pipeline import PipelineStep
from headrace.report.model.remedies import Remedy, fewer_workers, less_exchange, less_input
from headrace.report.model.training import StepTimes
from headrace.spec.events import InputStageStats, InputStats, RunStarted, StagePass


def started(workers: int = 2, servers: int = 0, cores: int = 8, command: str = "", strategy: str = "x") -> RunStarted:
    roles = [{"host": "mill", "kind": "server" if rank >= workers else "worker"} for rank in range(workers + servers)]
    plain: dict[str, Any] = {"roles": roles}
    return RunStarted(
        -1, 0.0, strategy, workers, "cpu", 1, 64, 640, "", plain, {}, cores=cores, command=command, rounds=10
    )  # fmt: skip


def fed(cost_s: float, parallel: str = "inline") -> InputStats:
    """Ten batches in 10 s, each of which costs so many seconds to read."""
    stages = (InputStageStats("source", 0.0, 0.0), InputStageStats("map(slow)", 10 * cost_s, 0.0))
    return InputStats(0, 10.0, parallel, 1, 10.0, 0.0, 0, 10, 100, 1000, 0, stages)


def verdict(wait: float, compute: float, exchange: float, cost_s: float = 0.0, **run: int) -> Bottleneck:
    """Of two equal workers whose step takes 1 s."""
    times = StepTimes(wait, compute, exchange, 0.0, 1.0 - wait - compute - exchange)
    # A worker that reads itself waits for nothing but reading.
    own = fed(cost_s, "threads" if wait > 2 * cost_s else "inline")
    found = bottleneck_of({0: times, 1: times}, InputSummary({0: own, 1: own}), started(**run))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("parts", "run", "kind", "said"),
    [
        # Two servers and two workers on two cores, as measured: the input needs 0.3 % of a step.
        ((0.13, 0.38, 0.46, 0.003), dict(servers=2, cores=2), "EXCHANGE- AND COMPUTE-BOUND", "13 % waits for its turn"),
        ((0.13, 0.38, 0.46, 0.003), {"servers": 2}, "EXCHANGE- AND COMPUTE-BOUND", "which a server gives"),
        ((0.01, 0.52, 0.42, 0.003), {}, "COMPUTE- AND EXCHANGE-BOUND", "42 % goes to the exchange"),
        ((0.01, 0.70, 0.20, 0.003), {}, "COMPUTE-BOUND", "79 % of a step computes"),
        ((0.01, 0.20, 0.75, 0.003), {}, "EXCHANGE-BOUND", "75 % of a step goes to the exchange"),
        ((0.60, 0.30, 0.05, 0.600), {}, "INPUT-BOUND", "by map(slow), 100 % of the input's cost"),
        ((0.60, 0.30, 0.05, 0.003), {"servers": 1}, "TURN-BOUND", "waits for its next share of the data"),
        ((0.60, 0.30, 0.05, 0.003), {}, "TURN-BOUND", "its readers wait for a core"),
        ((0.60, 0.30, 0.05, 0.003), {"workers": 4, "cores": 2}, "TURN-BOUND", "cores busy (4 processes share 2 cores)"),
        ((0.45, 0.50, 0.05, 0.450), {}, "COMPUTE- AND INPUT-BOUND", "45 % waits for data"),
        ((0.20, 0.75, 0.05, 0.200), {}, "COMPUTE-BOUND", "20 % waits for data (map(slow) is 100 % of its cost)"),
        ((0.01, 0.20, 0.75, 0.003), {"workers": 4, "cores": 2}, "EXCHANGE-BOUND", "4 processes share 2 cores"),
    ],
)  # fmt: skip
def test_the_largest_part_is_named(
    parts: tuple[float, float, float, float], run: dict[str, int], kind: str, said: str
) -> None:
    found = verdict(*parts, **run)
    assert found.kind == kind, found
    assert said in found.because
    assert "..." not in found.remedy


def test_an_input_that_is_worth_it_has_a_remedy_where_another_part_is_larger() -> None:
    assert 'read_by(data, parallel="processes")' in verdict(0.2, 0.75, 0.05, 0.2).remedy
    assert "processes" not in verdict(0.2, 0.75, 0.05, 0.001).remedy


COMMAND = "headrace train job.py --strategy 'mirrored(overlap=False)' --workers 3 --run-dir a --set lr=1"


@pytest.mark.parametrize(
    ("change", "given", "command"),
    [
        (Remedy("", workers=2), COMMAND, "job.py --set lr=1 --strategy 'mirrored(overlap=False)' --workers 2"),
        (
            Remedy("", own=(("overlap", True), ("balance", "speed"))),
            COMMAND,
            "job.py --set lr=1 --strategy 'mirrored(overlap=True, balance='\"'\"'speed'\"'\"')' --workers 3",
        ),
        (Remedy("", strategy="one_device"), f"{COMMAND} --servers 2", "job.py --set lr=1 --strategy one_device"),
        (
            Remedy("", settings=(("lr", 2), ("data.cache", "memory"))),
            f"{COMMAND} --servers=2 --resume",
            "job.py --set lr=2 --set data.cache=memory --servers 2 --strategy 'mirrored(overlap=False)' --workers 3",
        ),
        (
            Remedy("", own=(("micro_batches", 8),)),
            "headrace train job.py --strategy='pipeline(2, partition=[2, 3], micro_batches=2)'",
            "job.py --strategy 'pipeline(2, partition=[2, 3], micro_batches=8)'",
        ),
        (Remedy("", workers=2), "python train.py", ""),
        (Remedy("only words"), COMMAND, ""),
    ],
)
def test_a_remedy_is_the_command_with_a_change(change: Remedy, given: str, command: str) -> None:
    run = started(3, 0, 2, given, "mirrored")
    assert change.command(run) == (f"headrace train {command}" if command else "")


def test_a_program_is_told_the_argument() -> None:
    change = Remedy("a process a core", "workers=2", workers=2)
    assert change.told(started(3, 0, 2, "python train.py")) == "a process a core: workers=2"
    assert fewer_workers(started(3, 0, 2)) == change
    assert fewer_workers(started(2, 0, 2)) is fewer_workers(started(2, 0, 0)) is None


@pytest.mark.parametrize(
    ("stage", "parallel", "epochs", "setting"),
    [
        (InputStageStats("map(slow)", 1.0, 0.9), "inline", 5.0, ("data.parallel", 4)),
        (InputStageStats("map(slow)", 1.0, 0.9), "threads", 5.0, ("data.cache", "memory")),
        (InputStageStats("map(slow)", 1.0, 0.1), "inline", 5.0, ("data.cache", "memory")),
        (InputStageStats("map(slow)", 1.0, 0.1, draws=True), "inline", 5.0, ("data.parallel", "processes")),
        (InputStageStats("map(slow)", 1.0, 0.1), "inline", 1.0, ("data.parallel", "processes")),
        (InputStageStats("batch", 1.0, 0.1), "inline", 5.0, ("data.parallel", "processes")),
    ],
)
def test_the_input_is_made_cheaper_where_its_time_goes(
    stage: InputStageStats, parallel: str, epochs: float, setting: tuple[str, object]
) -> None:
    own = replace(fed(0.1, parallel), stages=(stage,), readers=1 if parallel == "inline" else 2)
    assert less_input(stage, own, epochs).settings == (setting,)


def test_who_caches_a_data_set_is_told_that_what_it_draws_is_kept() -> None:
    own = replace(fed(0.1), stages=(InputStageStats("source", 1.0, 0.1),))
    assert less_input(own.stages[0], own, 5.0).words.endswith("if the data set draws nothing at random")


def test_what_has_no_remedy_is_only_told() -> None:
    cached = (InputStageStats("cache(memory)", 0.1, 0.0), stage := InputStageStats("map(flip)", 1.0, 0.0))
    own = replace(fed(0.1, "threads"), stages=cached)
    assert not less_input(stage, own, 5.0).changes


def test_an_exchange_that_costs_more_than_a_worker_brings_is_left_out() -> None:
    run = started(2, strategy="mirrored")
    for compute, argument in ((0.45, 'strategy="one_device"'), (0.55, "global_batch_size=128")):
        assert (change := less_exchange(run, compute)) is not None
        assert change.argument == argument
    assert (often := less_exchange(started(2, strategy="parameter_averaging"), 0.3)) is not None
    assert often.own == (("period", "auto"),)


def stage_pass(stage: int, micro_batch: int, backward: bool, begin: float, end: float, waited: float) -> StagePass:
    return StagePass(stage, micro_batch, backward, begin, end, waited)


def stages(first_s: float, second_s: float, transfer_s: float, count: int) -> PipelineStep:
    """One step of GPipe on two ranks, forward alone as long as backward."""
    passes: dict[int, list[StagePass]] = {0: [], 1: []}
    free, ready = [0.0, 0.0], [0.0] * count
    for stage, own in ((0, first_s), (1, second_s)):
        for number in range(count):
            begin = max(free[stage], ready[number])
            passes[stage].append(stage_pass(stage, number, False, free[stage], begin + own, begin - free[stage]))
            free[stage] = begin + own
            ready[number] = begin + own + transfer_s
    ready = [0.0] * count
    for stage, own in ((1, second_s), (0, first_s)):
        for number in reversed(range(count)):
            begin = max(free[stage], ready[number])
            passes[stage].append(stage_pass(stage, number, True, free[stage], begin + own, begin - free[stage]))
            free[stage] = begin + own
            ready[number] = begin + own + transfer_s
    return PipelineStep(5, {rank: tuple(each) for rank, each in passes.items()}, {0: count, 1: count})


@pytest.mark.parametrize(
    ("step", "kind", "remedy"),
    [
        (stages(1.0, 1.0, 0.0, 2), "BUBBLE-BOUND", "micro_batches=4"),
        (stages(1.0, 4.0, 0.0, 16), "IMBALANCE-BOUND", 'new profile: partition="auto"'),
        (stages(1.0, 1.0, 6.0, 16), "TRANSFER-BOUND", 'strategy="mirrored"'),
        (stages(1.0, 1.0, 0.0, 32), "COMPUTE-BOUND", "more workers: workers=3"),
    ],
)
def test_a_pipeline_has_its_own(step: PipelineStep, kind: str, remedy: str) -> None:
    found = bottleneck_of({}, InputSummary({}), started(strategy="pipeline"), step)
    assert found is not None
    assert found.kind == kind, found
    assert remedy in found.remedy


def test_a_worker_that_reads_itself_waits_for_its_input() -> None:
    times = StepTimes(0.4, 0.5, 0.0, 0.0, 0.1)
    inputs = InputSummary({0: fed(0.001)})
    alone = bottleneck_of({0: times}, inputs, started(1))
    assert alone is not None
    assert alone.because.startswith("60 % of a step computes, 40 % waits for data")
    # From a server it gets its share of the data, too.
    served = bottleneck_of({0: times}, inputs, started(1, 1))
    assert served is not None
    assert "40 % waits for its next share of the data" in served.because


def test_inputs_that_cost_nearly_nothing_are_no_straggler_and_are_not_cached() -> None:
    times = {rank: StepTimes(0.12, 0.7, 0.18, 0.0, 0.0) for rank in (0, 1)}
    cheap = [replace(fed(cost, "inline"), examples=10**6) for cost in (0.01, 0.02)]
    found = bottleneck_of(times, InputSummary(dict(enumerate(cheap))), started())
    assert found is not None
    assert found.kind == "COMPUTE-BOUND"
    assert "a larger batch: what an example costs is little" in found.remedy


def test_an_exchange_that_waits_while_readers_are_busy_is_the_inputs() -> None:
    times = {rank: StepTimes(0.5, 0.05, 0.45, 0.0, 0.0) for rank in (0, 1)}
    for cost_s, kind in ((0.95, "INPUT-BOUND"), (0.5, "INPUT- AND EXCHANGE-BOUND")):
        busy = InputSummary({rank: fed(cost_s, "threads") for rank in (0, 1)})
        found = bottleneck_of(times, busy, started())
        assert found is not None
        assert found.kind == kind


def test_of_workers_that_are_late_in_turns_the_last_one_counts() -> None:
    times = {rank: StepTimes(0.3, 0.1, 0.6, 0.0, 0.0) for rank in (0, 1)}
    inputs = InputSummary({rank: fed(0.5, "threads") for rank in (0, 1)})
    last = StepTimes(0.85, 0.1, 0.05, 0.0, 0.0)
    found = bottleneck_of(times, inputs, started(), last=last)
    assert found is not None
    assert found.kind == "INPUT-BOUND"
    assert "a worker waits for data 85 % of its time" in found.because
