"""What holds a run up, from the mean steps of its workers and the cost of their inputs."""

from __future__ import annotations

import pytest

from headrace.report.model.inputs import Bottleneck, InputSummary, bottleneck_of
from headrace.report.model.training import StepTimes
from headrace.spec.events import InputStageStats, InputStats


def step(wait: float = 0.0, compute: float = 0.0, exchange: float = 0.0) -> StepTimes:
    return StepTimes(wait, compute, exchange, 0.01, 0.0)


def fed(
    source: float = 0.1, decode: float = 0.6, batch: float = 0.1, waiting: float = 0.0, parallel: str = "threads"
) -> InputStats:
    """Of 100 examples, by 2 readers."""
    stages = (
        InputStageStats("source", source, waiting),
        InputStageStats("map(decode)", decode, waiting),
        InputStageStats("batch", batch, 0),
    )
    readers = 1 if parallel == "inline" else 2
    return InputStats(0, 1.0, parallel, readers, 1.0, 0.5, 0, 10, 100, 1000, 0, stages)


def found(*workers: tuple[StepTimes, InputStats]) -> Bottleneck:
    bottleneck = bottleneck_of(
        {rank: times for rank, (times, _) in enumerate(workers)},
        InputSummary({rank: work for rank, (_, work) in enumerate(workers)}),
    )
    assert bottleneck is not None
    return bottleneck


def test_who_waits_for_data_is_bound_by_the_dearest_stage() -> None:
    bottleneck = found((step(wait=0.5, compute=0.49), fed()))
    assert bottleneck.kind == "INPUT-BOUND"
    assert bottleneck.stage == "map(decode)"
    assert bottleneck.rank is None
    assert bottleneck.share == pytest.approx(0.5)
    assert bottleneck.line == (
        "INPUT-BOUND: by map(decode), 75 % of the input's cost; a worker waits for data 50 % of its time"
    )


def test_little_waiting_is_no_bound() -> None:
    bottleneck = found((step(wait=0.05, compute=0.94), fed()))
    assert bottleneck.kind == "COMPUTE-BOUND"
    assert bottleneck.stage is None
    assert bottleneck.because == "95 % of a step computes, 5.0 % waits for data"


def test_of_equal_inputs_one_comes_last_and_the_others_wait_for_it_in_the_exchange() -> None:
    bottleneck = found((step(0.0, 0.1, 0.89), fed()), (step(0.8, 0.1, 0.09), fed()))
    assert (bottleneck.kind, bottleneck.stage, bottleneck.rank) == ("INPUT-BOUND", "map(decode)", None)


def test_a_worker_whose_input_is_dearer_is_a_straggler() -> None:
    bottleneck = found(
        (step(0.0, 0.1, 0.89), fed()), (step(0.8, 0.1, 0.09), fed(source=2.3)), (step(0, 0.1, 0.89), fed())
    )
    assert (bottleneck.kind, bottleneck.stage, bottleneck.rank) == ("STRAGGLER", "source", 1)
    assert "rank 1 waits for data 80 % of its time; its input costs 3.75 × the others', most of it source" in (
        bottleneck.because
    )


def test_a_worker_that_computes_longer_is_a_straggler() -> None:
    bottleneck = found(*((step(0.0, compute, 1 - compute), fed()) for compute in (0.3, 0.9, 0.3)))
    assert (bottleneck.kind, bottleneck.stage, bottleneck.rank) == ("STRAGGLER", None, 1)
    assert "rank 1 computes 3.00 × as long as the others" in bottleneck.because


def test_the_exchange() -> None:
    bottleneck = found((step(0.0, 0.3, 0.7), fed()), (step(0.0, 0.3, 0.7), fed()))
    assert bottleneck.kind == "EXCHANGE-BOUND"
    assert bottleneck.share == pytest.approx(0.7 / 1.01)


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (fed(parallel="inline"), 'parallel="threads"'),
        (fed(waiting=0.5), 'parallel="processes"'),
        (fed(), "draws no random numbers"),
        (fed(source=2.0, waiting=1.5), "more readers than 2"),
        (fed(source=2.0), '.cache("memory")'),
        (fed(batch=2.0), "smaller tensors"),
        (fed(batch=2.0, parallel="inline"), "smaller tensors"),
    ],
)
def test_what_to_try_next_follows_from_where_the_time_goes(work: InputStats, said: str) -> None:
    assert said in found((step(wait=0.5, compute=0.4), work)).remedy


def test_nobody_knows_before_a_step() -> None:
    assert bottleneck_of({}, InputSummary({0: fed()})) is None
