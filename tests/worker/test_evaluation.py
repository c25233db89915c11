"""Evaluations: every example once, on averaged weights and statistics, and when they end a run."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headrace as hr
from engine.lasting import DATA, lasting_job
from engine.victims import INPUTS, TARGETS, make_job
from headrace.errors import UsageError
from headrace.spec.events import Evaluated, Notice
from headrace.worker.evaluations.early_stopping import EarlyStopper

STRATEGIES = (hr.OneDevice(), hr.Mirrored(2), hr.Mirrored(3), hr.CentralStorage(3))
LOSS = hr.EarlyStopping(patience=2)


def seen(stopper: EarlyStopper, *losses: float, first: int = 1) -> list[str | None]:
    return [stopper.see({"loss": loss}, step) for step, loss in enumerate(losses, first)]


def test_patience_counts_what_is_no_better() -> None:
    stopper = EarlyStopper(LOSS)
    assert seen(stopper, 3.0, 2.0, 2.0) == [None] * 3
    assert not stopper.over
    assert seen(stopper, 2.5, first=4) == [
        "ends early: loss has got no better for 2 evaluations; best 2 after 2 steps",
    ]
    assert stopper.over


def test_patience_begins_anew_with_every_improvement() -> None:
    stopper = EarlyStopper(LOSS)
    assert seen(stopper, 3, 4, 2, 4, 1, 4, 0.5) == [None] * 7
    assert not stopper.over


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_whatever_is_no_number_is_no_improvement(value: float) -> None:
    stopper = EarlyStopper(LOSS)
    seen(stopper, value, value)
    assert stopper.over
    assert stopper.state() == {"best": None, "best_step": 0, "waited": 2, "follows": "min loss"}


def test_more_is_better_where_it_says_so() -> None:
    stopper = EarlyStopper(hr.EarlyStopping("accuracy", patience=1, mode="max", min_delta=0.1))
    assert stopper.see({"accuracy": 0.5}, 1) is None
    assert stopper.see({"accuracy": 0.7}, 2) is None
    assert stopper.see({"accuracy": 0.79}, 3) == (
        "ends early: accuracy has got no better for 1 evaluation; best 0.7 after 2 steps"
    )


def test_a_metric_that_there_is_not() -> None:
    with pytest.raises(
        UsageError, match="early stopping follows 'recall', and the evaluation has loss, accuracy alone"
    ):
        EarlyStopper(hr.EarlyStopping("recall")).see({"loss": 1.0, "accuracy": 0.5}, 1)


def test_without_a_wish_it_never_ends() -> None:
    stopper = EarlyStopper(None)
    assert seen(stopper, *[1.0] * 100) == [None] * 100
    assert not stopper.over


@pytest.mark.parametrize("losses", [[], [3.0], [3.0, 4.0], [math.nan], [1.0, 2.0, 3.0]])
def test_a_state_is_taken_up_whole(losses: list[float]) -> None:
    one, other = EarlyStopper(LOSS), EarlyStopper(LOSS)
    seen(one, *losses)
    other.load(one.state())
    for stopper in (one, other):
        seen(stopper, 2.0, 2.0, 2.0, first=9)
    assert one.state() == other.state()
    assert one.over is other.over


def evaluated(run: hr.Run) -> list[Evaluated]:
    return [event for event in run.events if isinstance(event, Evaluated)]


def fit(strategy: hr.Strategy, run_dir: Path, options: dict[str, Any], **changes: Any) -> hr.Run:
    job = lasting_job("plain", options=options, **changes)
    return hr.fit(job, strategy, run_dir=run_dir, engine=hr.ThreadEngine())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda s: f"{s.name} {getattr(s, 'workers', 1)}")
@pytest.mark.parametrize("size", [None, 1, 7, 1000])
def test_on_the_averaged_weights_over_every_example_once(
    tmp_path: Path, strategy: hr.Strategy, size: int | None
) -> None:
    run = fit(strategy, tmp_path, {"eval_batch_size": size, "ema_decay": 0.5})
    inputs, classes = DATA["plain"]
    # The trained model is the averaged one.
    output = run.model(inputs).detach()
    last = evaluated(run)[-1]
    assert last.examples == len(inputs)
    assert last.metrics["loss"] == pytest.approx(float(F.cross_entropy(output, classes)), abs=1e-9)
    assert last.metrics["accuracy"] == pytest.approx(float((output.argmax(1) == classes).double().mean()), abs=1e-9)


@pytest.mark.parametrize(
    ("every", "at"), [(None, [5, 10, 15]), (4, [4, 8, 12, 15]), (5, [5, 10, 15]), (100, [15]), (1, list(range(1, 16)))]
)
def test_when(tmp_path: Path, every: int | None, at: list[int]) -> None:
    run = fit(hr.Mirrored(2), tmp_path, {"eval_every": every})
    assert [event.step for event in evaluated(run)] == at


@pytest.mark.slow
def test_it_changes_nothing(tmp_path: Path) -> None:
    """Neither weights nor statistics, averaged or not, nor what dropout draws next: one run evaluates, one does not."""
    left = []
    for name, data in (("a", DATA["cnn"]), ("b", None)):
        job = lasting_job("cnn", options={"eval_every": 1}, eval_data=data)
        run = hr.fit(job, hr.OneDevice(), run_dir=tmp_path / name, engine=hr.ThreadEngine())
        left.append((run.run_dir / "model.safetensors").read_bytes())
    assert left[0] == left[1]


class Counting(nn.Module):
    """Statistics that differ between workers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double()

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.layers(inputs)
        return output


@pytest.mark.parametrize("strategy", [hr.Mirrored(2), hr.CentralStorage(3)], ids=lambda s: s.name)
def test_on_averaged_statistics_and_own_ones_come_back(tmp_path: Path, strategy: hr.Strategy) -> None:
    runs = []
    for name, every in (("a", 1), ("b", None)):
        job = lasting_job("plain", model=Counting, global_batch_size=10,
                          options={"eval_every": every, "ema_decay": None})  # fmt: skip
        runs.append(hr.fit(job, strategy, run_dir=tmp_path / name, engine=hr.ThreadEngine()))
    often, seldom = (run.model.state_dict() for run in runs)
    assert all(torch.equal(often[name], tensor) for name, tensor in seldom.items())
    inputs, classes = DATA["plain"]
    expected = float(F.cross_entropy(runs[0].model(inputs).detach(), classes))
    assert evaluated(runs[0])[-1].metrics["loss"] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("strategy", STRATEGIES[:2], ids=lambda s: s.name)
def test_early_stopping_ends_all_in_the_same_round(tmp_path: Path, strategy: hr.Strategy) -> None:
    options = {"eval_every": 2, "early_stopping": hr.EarlyStopping("accuracy", 2, "max", min_delta=2.0)}
    run = fit(strategy, tmp_path, options, epochs=100)
    assert run.status == "ok"
    assert [event.step for event in evaluated(run)] == [2, 4, 6]
    assert {event.steps for event in run.events if event.kind == "worker_ended"} == {6}  # type: ignore[attr-defined]
    (line,) = [event.text for event in run.events if isinstance(event, Notice) and "ends early" in event.text]
    assert line.startswith("ends early: accuracy has got no better for 2 evaluations; best 0.")
    assert line.endswith(" after 2 steps")


def test_early_stopping_by_a_metric_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no metric for early stopping 'recall'; known: accuracy, loss"):
        fit(hr.OneDevice(), tmp_path, {"early_stopping": hr.EarlyStopping("recall", mode="max")})


def test_early_stopping_without_evaluations() -> None:
    job = lasting_job("plain", {"early_stopping": hr.EarlyStopping()}, eval_data=None)
    with pytest.raises(UsageError, match="early_stopping follows evaluations, and the job has no eval_data"):
        hr.fit(job, engine=hr.ThreadEngine())


def test_a_metric_of_ones_own_is_followed(tmp_path: Path) -> None:
    def worse(output: Tensor, _: Tensor) -> Tensor:
        return output.new_tensor(1.0)

    options = {"eval_every": 1, "early_stopping": hr.EarlyStopping("worse", patience=3)}
    job = functools.partial(fit, hr.OneDevice(), tmp_path, options)
    assert [event.step for event in evaluated(job(metrics={"worse": worse}))] == [1, 2, 3, 4]


SETS = {"val": (INPUTS, TARGETS), "test": (INPUTS[:5], TARGETS[:5])}


def test_a_set_has_a_name_that_a_curve_can_have_and_no_metric_has_begun() -> None:
    assert [*make_job(eval_data=SETS).eval_sets] == ["", "test/"]
    assert [*make_job(eval_data={"x": INPUTS, "y": TARGETS}).eval_sets] == [""]
    with pytest.raises(UsageError, match="a name has letters"):
        make_job(eval_data={"val": SETS["val"], "a?": SETS["test"]})
    with pytest.raises(UsageError, match="metrics of an evaluation set begin with 'test/'; call 'test/loss' otherwise"):
        make_job(eval_data=SETS, metrics={"test/loss": F.mse_loss})


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_each_set_has_metrics_of_its_own(strategy: hr.Strategy) -> None:
    both = hr.fit(make_job(eval_data=SETS, epochs=1), strategy, engine=hr.ThreadEngine()).metrics
    for name, data in SETS.items():
        alone = hr.fit(make_job(eval_data=data, epochs=1), strategy, engine=hr.ThreadEngine()).metrics
        begin = "" if name == "val" else f"{name}/"
        assert {key: both[f"{begin}{key}"] for key in alone} == alone


@pytest.mark.slow
def test_early_stopping_follows_a_metric_of_any_set() -> None:
    stopping = hr.EarlyStopping("test/loss", patience=1, min_delta=1e9)
    job = make_job(eval_data=SETS, epochs=9, options=hr.Options(early_stopping=stopping))
    run = hr.fit(job, engine=hr.ThreadEngine())
    assert sum(isinstance(event, Evaluated) for event in run.events) == 2
