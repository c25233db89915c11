"""The sentences above the pictures: computed from the data, and honest about runs that are odd."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec import structs

from headrace.report.model.summary import NonFiniteRounds, brief_of, summarize
from headrace.report.model.training import (
    AveragingSummary,
    BalanceSummary,
    EvaluationPoint,
    LossPoint,
    StepTimes,
    smoothed,
)
from headrace.report.model.verdict import References
from headrace.report.views import answers
from headrace.report.views.pictures import pictures
from headrace.report.views.server_pictures import server_pictures
from headrace.report.views.table import run_rows
from headrace.spec.events import ParametersAveraged

NONE = References()


@pytest.fixture
def run(tmp_path, make_run):
    """`run(name, losses, seconds)`: a run with so many losses, whose points are `seconds` and 10 examples apart."""

    def make(name, losses=(2.0, 1.0), seconds=1.0, workers=2, status="ok", rate=100.0):
        summary = summarize(make_run(tmp_path / name, name, workers=workers, status=status))
        points = tuple(LossPoint(10 * at, seconds * at, loss) for at, loss in enumerate(losses, 1))
        curves = dataclasses.replace(summary.curves, loss=points, first_loss=losses[0] if losses else None)
        training = dataclasses.replace(summary.training, examples_per_s=rate)
        return dataclasses.replace(summary, curves=curves, training=training)

    return make


def metric_of(summary, *values):
    points = tuple(EvaluationPoint(0, float(at), 0.0, {"accuracy": value}, 0.1) for at, value in enumerate(values, 1))
    return dataclasses.replace(summary, curves=dataclasses.replace(summary.curves, evaluations=points))


def test_the_mean_around_a_point_is_over_a_twentieth():
    points = [(float(at), float(at)) for at in range(40)]
    assert smoothed(points)[:3] == [(0.0, 0.0), (1.0, 1.0), (2.0, 2.0)]
    assert smoothed([(float(at), float(at % 2)) for at in range(80)])[10] == (10.0, pytest.approx(0.4))


@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ((2.0, 1.0, 0.5), "The loss fell: from 2.00 to 0.500 in 30 examples."),
        ((2.0, 2.01), "The loss hardly changed: from 2.00 to 2.01 in 20 examples."),
        ((2.0, 9.0), "The loss rose: from 2.00 to 9.00 in 20 examples."),
        ((2.0, 0.5, 1.5), "The loss fell: from 2.00 to 1.50 in 30 examples. It was lowest after 20 examples: 0.500."),
        ((2.0,), "One loss is known: 2.00."),
        ((), ""),
        ((-1.0, -2.0), "The loss fell: from -1.00 to -2.00 in 20 examples."),
    ],
)
def test_how_one_loss_went(run, losses, said):
    assert answers.loss_answer([run("mirrored", losses)], NONE, by_time=False) == said


def test_a_loss_of_a_run_that_was_stopped_says_so_and_what_was_left_out(run):
    stopped = run("mirrored", (2.0, 1.0), status="interrupted")
    stopped = dataclasses.replace(stopped, non_finite=NonFiniteRounds(1, 2))
    assert answers.loss_answer([stopped], NONE, by_time=True) == (
        "The loss fell: from 2.00 to 1.00 in 2.0 s. The run was interrupted. 3 rounds left out: a loss or gradient was "
        "not finite."
    )


def test_which_loss_fell_first_and_which_did_not_get_there(run):
    slow, quick = run("one_device", (2.0, 1.0, 0.1), 4.0, workers=1), run("mirrored", (2.0, 1.0, 0.1), 1.0)
    stuck, broken = run("gossip", (2.0, 1.9, 1.8)), run("downpour", (2.0, 0.0), 0.1, status="failed")
    runs = [slow, quick, stuck, broken]
    doubtful = References(doubts={"mirrored": ("its rate varied",)})
    assert answers.loss_answer(runs, doubtful, by_time=True) == (
        "mirrored came first to a loss of 0.290: after 3.0 s; then one_device after 12.0 s. gossip did not get there. "
        "Disturbed, so not to be believed: mirrored. Not compared, because not finished: downpour."
    )
    assert answers.loss_answer(runs[:2], doubtful, by_time=False) == (
        "All that came to a loss of 0.290 took about as long: 30 examples."
    )
    assert answers.loss_answer([run("a", (2.0, 2.0)), run("b", (2.0, 3.0))], NONE, True) == (
        "No loss fell below where it began, 2.00."
    )
    assert answers.loss_answer([run("e", (-2.0, -1.99)), run("f", (-2.0, -1.98))], NONE, True) == (
        "No loss fell below where it began, -2.00."
    )
    assert answers.loss_answer([run("c", ()), run("d", ())], NONE, True) == ""


def test_which_run_is_the_fastest(run):
    one, two = run("one_device", workers=1, rate=100.0), run("mirrored", rate=150.0)
    known = References(100.0)
    assert answers.throughput_answer([one, two], known) == (
        "mirrored is the fastest: 150 examples a second, 1.50 × one process with all threads."
    )
    assert answers.throughput_answer([one, run("gossip", rate=60.0)], NONE) == (
        "one_device, on one worker, is the fastest: 100 examples a second."
    )
    slow = run("downpour", rate=50.0)
    assert answers.throughput_answer([slow, run("gossip", rate=60.0)], known) == (
        "gossip is the fastest: 60.0 examples a second, 0.60 × one process with all threads. So one process with all "
        "threads is faster than any of them."
    )
    assert answers.throughput_answer([one, run("gossip", rate=102.0)], References(doubts={"gossip": ("x",)})) == (
        "All are about as fast: 102 examples a second. Disturbed, so not to be believed: gossip."
    )
    assert answers.throughput_answer([two], NONE) == "150 examples a second."
    assert answers.throughput_answer([run("a", rate=None), run("b", rate=None)], known) == ""


def test_what_takes_the_most_of_a_step(run):
    computing = dataclasses.replace(run("mirrored"), times=StepTimes(0.0, 0.06, 0.03, 0.01, 0.0))
    waiting = dataclasses.replace(run("gossip"), times=StepTimes(0.9, 0.05, 0.05, 0.0, 0.0))
    alone = dataclasses.replace(run("one_device"), times=StepTimes(0.0, 0.1, 0.0, 0.0, 0.0))
    nothing = dataclasses.replace(run("a"), times=StepTimes(0.0, 0.0, 0.0, 0.0, 0.0))
    assert answers.steps_answer([computing]) == "Compute takes 60 % of a mean step of 100 ms, exchange 30 %."
    assert answers.steps_answer([alone]) == "Compute takes 100 % of a mean step of 100 ms."
    assert answers.steps_answer([nothing]) == ""
    assert answers.steps_answer([computing, waiting, alone, nothing]) == (
        "What takes the most of a step: compute in mirrored (60 %) and one_device (100 %); waiting for data in "
        "gossip (90 %)."
    )


def test_workers_that_compute_for_longer_are_named(run):
    even = run("mirrored")
    assert answers.workers_answer([even]) == "No worker computes for 1.25 × as long as another of its run."
    times = {0: StepTimes(0.0, 0.02, 0.0, 0.0, 0.0), 1: StepTimes(0.0, 0.05, 0.0, 0.0, 0.0)}
    uneven = dataclasses.replace(even, times_by_rank=times)
    said = "Workers differ: rank 1 computes for 50.0 ms a step, rank 0 20.0 ms"
    assert answers.workers_answer([uneven]) == f"{said}."
    assert answers.workers_answer([uneven, run("gossip")]) == f"{said} in mirrored."
    assert answers.workers_answer([run("one_device", workers=1)]) == ""


def test_how_a_metric_ended(run):
    one, two, lost = metric_of(run("a"), 0.5, 0.9, 0.8), metric_of(run("b"), 0.7), metric_of(run("c"), float("nan"))
    assert answers.metric_answer([one], "accuracy") == (
        "accuracy went from 0.500 after 1 epoch to 0.800 after 3 epochs. Between: highest 0.900."
    )
    assert answers.metric_answer([two], "accuracy") == "accuracy is 0.700 after 1 epoch, in the only evaluation."
    assert answers.metric_answer([one, two, lost], "accuracy") == (
        "accuracy ends highest in a (0.800), lowest in b (0.700). Not finite: c."
    )
    assert answers.metric_answer([two, two], "accuracy") == "accuracy ends at about 0.700 in all of them."
    assert answers.metric_answer([lost], "accuracy") == "accuracy is nan after 1 epoch, in the only evaluation."
    assert answers.metric_answer([lost, lost], "accuracy") == "Not finite: c and c."


def test_memory_averages_shares_and_stages(run):
    assert answers.bytes_answer("Held", [("a", 10**6)]) == "Held: 1.00 MB."
    assert answers.bytes_answer("Held", [("a", 100), ("b", 101)]) == "Held: about 101 B in all of them."
    assert (
        answers.bytes_answer("Held", [("a", 10), ("b", 30)])
        == "Held: the most in b, 30 B, 3.00 × that of a, the smallest."
    )
    met = [
        ParametersAveraged(0, 1.0, step, rounds, 4, "", drift, 0.1)
        for step, rounds, drift in ((4, 4, 0.2), (10, 6, 0.1))
    ]
    averaged = dataclasses.replace(run("a"), averaging=AveragingSummary(tuple(met)))
    assert answers.drift_answer([averaged]) == (
        "The worker that is furthest from the mean: at most 0.200 of the parameters' norm, after 4 rounds, and 0.100 "
        "at the end."
    )
    assert answers.period_answer([averaged]) == "Rounds from one average to the next: 5.00 on average, 6 at the end."
    assert answers.balance_answer(BalanceSummary(((0, (4, 4)), (5, (2, 6))), 9)) == (
        "In the end rank 1 computes 6 of 8 examples of a batch, rank 0 2."
    )
    assert answers.balance_answer(BalanceSummary(((0, (2, 6)), (5, (4, 4))), 9)).startswith("In the end every worker")
    told = [
        answers.pipeline_answer(SimpleNamespace(bubble=bubble, scheduled_bubble=0.3))  # type: ignore[arg-type]
        for bubble in (0.31, 0.5, 0.1)
    ]
    assert told == [
        "Ranks work on nothing for 31 % of the time, about what the schedule costs (30 %).",
        "Ranks work on nothing for 50 % of the time; the schedule alone costs 30 %, the rest comes from unequal "
        "stages, transfers or busy cores.",
        "Ranks work on nothing for 10 % of the time, less than if all stages were alike (30 %).",
    ]


def test_what_is_said_of_servers(tmp_path, make_served_run):
    said = {each.title: each.answer for each in server_pictures([summarize(make_served_run(tmp_path / "a", 4, 2))])}
    assert list(said.values()) == [
        "Gradients were 4.00 updates behind on average, at most 6.",
        "The mean staleness went from 3.90 to 4.20.",
        "Of their steps' time, workers spent on the exchange: each about 50 %.",
        "Servers were all busy for about 25 % of the time.",
        "Server 5 moved 3.86 MB, 1.33 × the servers' mean.",
        "Shard weight on server 5 moved 3.84 MB, 2.65 × the shards' mean.",
        "Shard weight on server 5 took 192 ms, 2.65 × the shards' mean.",
    ]
    both = [summarize(make_served_run(tmp_path / name, 2, 1)) for name in ("b", "c")]
    told = server_pictures(both)[0].answer
    assert told.endswith("behind on average, at most 2 in c (parameter_server).")


def test_a_run_of_one_worker_without_evaluation_has_an_answer_to_each_of_its_pictures(run):
    one = run("one_device", workers=1)
    bare = dataclasses.replace(one, curves=dataclasses.replace(one.curves, evaluations=()))
    drawn = pictures([bare], NONE)
    assert [each.title for each in drawn if not each.group] == ["Does the loss fall?", "Where does a step's time go?"]
    assert all(each.answer.endswith(".") for each in drawn)


@pytest.mark.parametrize(
    ("names", "said"),
    [(("a",), "a"), (("a", "b"), "a and b"), (tuple("abcd"), "a, b, c and d"), (tuple("abcdef"), "a, b, c and 3 more")],
)
def test_names_in_a_sentence(names, said):
    assert answers.listed(names) == said


def test_a_run_that_diverged_or_shares_cores_has_a_remark(tmp_path: Path, make_run: Callable[..., Path]) -> None:
    run = summarize(make_run(tmp_path / "mirrored"))
    assert brief_of(run).remarks == ""
    curves = dataclasses.replace(
        run.curves, loss=(*run.curves.loss, dataclasses.replace(run.curves.loss[-1], loss=516.0))
    )
    diverged = dataclasses.replace(run, curves=curves)
    assert "the training loss ended at 516, " in brief_of(diverged).remarks
    assert "it has diverged" in brief_of(diverged).headline
    assert "it has diverged" in dict(run_rows(diverged))["remark"]
    roles = {"roles": [{"host": "mill"}] * 3}
    shared = dataclasses.replace(run, started=structs.replace(run.started, workers=3, cores=2, plan=roles))
    assert (
        brief_of(shared).remarks
        == "3 processes share 2 cores, and each waits for its turn; a process a core: workers=2"
    )
