"""Callbacks: when they are called, what they may do, and that all workers do it together, under every strategy."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.image import imread
from torch import nn

import headrace as hr
from engine.victims import INPUTS, TARGETS, make_job, split_model
from headrace.errors import UsageError, WorkerFailed
from headrace.spec.events import Notice, PictureLogged, Stepped, TextLogged, ValuesLogged, WorkerEnded
from headrace.strategies import Strategy

ENGINE = hr.ThreadEngine()


class Witness(hr.Callback):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def on_step(self, moment: hr.Moment) -> None:
        self.told.append(("step", moment.step, moment.epoch, moment.loss))

    def on_evaluation(self, moment: hr.Moment, metrics: Mapping[str, float]) -> None:
        self.told.append(("evaluation", moment.step, metrics["loss"]))

    def on_checkpoint(self, moment: hr.Moment, path: Path) -> None:
        self.told.append(("checkpoint", path.name, path.is_dir()))

    def on_end(self, moment: hr.Moment) -> None:
        self.told.append(("end", moment.step, [each.detach().clone() for each in moment.model.parameters()]))


class Stopper(hr.Callback):
    """Ends the run in step `at`."""

    def __init__(self, at: int = 3) -> None:
        self.at = at

    def on_step(self, moment: hr.Moment) -> None:
        if moment.step >= self.at:
            moment.stop("enough")


class Slower(hr.Callback):
    """Sets the factor of the learning rate after a step, and the last one again and again."""

    def __init__(self, factors: Mapping[int, float]) -> None:
        self.factors = factors

    def on_step(self, moment: hr.Moment) -> None:
        if moment.step in self.factors:
            moment.set_learning_rate_factor(self.factors[moment.step])


class Doing(hr.Callback):
    """Does what a test wants, once."""

    def __init__(self, deed: Any) -> None:
        self.deed = deed

    def on_step(self, moment: hr.Moment) -> None:
        if moment.step == 1:
            self.deed(moment)


def fit(job: hr.Job, strategy: Strategy, *callbacks: hr.Callback, **more: Any) -> hr.Run:
    return hr.fit(job, strategy, engine=ENGINE, callbacks=callbacks, check=False, **more)


def steps_of(run: hr.Run) -> dict[int, int]:
    """Returns after how many rounds each worker has ended."""
    return {event.rank: event.steps for event in run.events if isinstance(event, WorkerEnded)}


@pytest.mark.slow
def test_each_moment_is_told_in_its_order(tmp_path: Path) -> None:
    seen = Witness()
    job = make_job(epochs=2, eval_data=(INPUTS, TARGETS))
    run = fit(job, hr.Mirrored(2), seen, run_dir=tmp_path / "run", checkpoints=hr.Checkpoints(every_steps=6))
    steps = [entry for entry in seen.told if entry[0] == "step"]
    assert [entry[1:3] for entry in steps] == [(done, done // 8) for done in range(1, 17)]
    own = [event.loss for event in run.events if isinstance(event, Stepped) and event.rank == 0]
    assert [entry[3] for entry in steps] == own
    evaluations = [entry for entry in seen.told if entry[0] == "evaluation"]
    assert [entry[1] for entry in evaluations] == [8, 16]
    assert evaluations[-1][2] == run.metrics["loss"]
    saved = [entry[1:] for entry in seen.told if entry[0] == "checkpoint"]
    assert saved == [(f"step-{step:08d}", True) for step in (6, 12, 16)]
    (*_, (last, done, parameters)) = seen.told
    assert (last, done) == ("end", 16)
    assert all(map(torch.equal, parameters, run.model.parameters()))


PAIR: dict[str, Strategy] = {
    "one_device": hr.OneDevice(threads=1),
    "mirrored": hr.Mirrored(2),
    "central_storage": hr.CentralStorage(2),
    "parameter_averaging": hr.ParameterAveraging(2, period=3),
    "gossip": hr.Gossip(2, period=3),
    "pipeline": hr.Pipeline(2, micro_batches=2),
    "tensor_parallel": hr.TensorParallel(2),
    "fully_sharded": hr.FullySharded(2),
}
SERVED: dict[str, Strategy] = {
    "parameter_server": hr.ParameterServer(2),
    "downpour": hr.Downpour(2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PAIR, *SERVED])
def test_a_callback_ends_the_run_and_all_workers_after_the_same_round(name: str) -> None:
    seen = Witness()
    run = fit(make_job(model=split_model, epochs=1000), {**PAIR, **SERVED}[name], seen, Stopper())
    assert run.status == "ok"
    done = steps_of(run)
    assert set(done) == set(range(run.plan.workers))
    if name in PAIR:
        # After the next synchronization.
        assert set(done.values()) == {6 if "period" in vars(PAIR[name]) else 4}
    else:
        assert len(set(done.values())) == 1
        assert done[0] < 1000
    assert seen.told[-1][0] == "end"
    (said,) = [event.text for event in run.events if isinstance(event, Notice) and "ends early" in event.text]
    assert said == "ends early: a callback asked for it: enough"


class Scaled(torch.optim.lr_scheduler.LambdaLR):
    """What the callback does, as a schedule."""

    def __init__(self, optimizer: torch.optim.Optimizer, factors: Mapping[int, float]) -> None:
        def factor(round_: int) -> float:
            return next((value for start, value in sorted(factors.items(), reverse=True) if round_ >= start), 1.0)

        super().__init__(optimizer, factor)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIR)
def test_the_learning_rate_changes_on_all_workers_at_the_same_round(name: str, tmp_path: Path) -> None:
    strategy = PAIR[name]
    # Told after step 3 and 7: in force from the next synchronization on.
    starts = (6, 9) if "period" in vars(strategy) else (4, 8)
    schedule = functools.partial(Scaled, factors=dict(zip(starts, (0.25, 2.0), strict=True)))
    job = make_job(
        model=split_model, optimizer=functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9), epochs=None, steps=12
    )
    asked = fit(job, strategy, Slower({3: 0.25, 7: 2.0}))
    planned = fit(replace(job, options=hr.Options(schedule=schedule)), strategy)
    plain = fit(job, strategy)
    for own, theirs, other in zip(*(run.model.parameters() for run in (asked, planned, plain)), strict=True):
        assert torch.allclose(own, theirs, rtol=1e-5, atol=1e-7)
        assert not torch.allclose(own, other, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
def test_the_factor_is_part_of_a_checkpoint(tmp_path: Path) -> None:
    job = make_job(epochs=2)
    whole = fit(job, hr.Mirrored(2), Slower({3: 0.1}), run_dir=tmp_path / "whole")
    fit(replace(job, epochs=None, steps=8), hr.Mirrored(2), Slower({3: 0.1}), run_dir=tmp_path / "half")
    resumed = fit(job, hr.Mirrored(2), run_dir=tmp_path / "rest", resume=tmp_path / "half")
    assert all(map(torch.equal, resumed.model.parameters(), whole.model.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "deed", "said"),
    [
        (
            hr.ParameterServer(1),  # of two the other one may take all portions
            lambda moment: moment.set_learning_rate_factor(0.1),
            "under parameter_server a callback",
        ),
        (hr.Unconnected(2), lambda moment: moment.set_learning_rate_factor(0.1), "under unconnected a callback"),
        (hr.Unconnected(2), lambda moment: moment.stop("x"), "unconnected trains several models"),
        (hr.OneDevice(), lambda moment: moment.set_learning_rate_factor(0), "must be a number above 0, got 0"),
        (hr.OneDevice(), lambda moment: moment.log({"loss": "low"}), "log takes numbers by name, got 'low'"),
        (hr.OneDevice(), lambda moment: moment.log({"<script>": 1.0}), "a name has letters, digits"),
        (hr.OneDevice(), lambda moment: moment.log_picture("a", np.zeros(3)), r"got ndarray of shape \(3,\)"),
        (hr.OneDevice(), lambda moment: moment.log_picture("a", "a.png"), "got str"),
        (hr.OneDevice(), lambda moment: moment.log_text("a", 3), "log_text takes a text, got 3 for 'a'"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(strategy: Strategy, deed: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        fit(make_job(), strategy, Doing(deed))


@pytest.mark.parametrize(
    "strategy",
    [
        hr.FullySharded(2),
        hr.TensorParallel(2),
        hr.Pipeline(2),
        hr.Hybrid(hr.Mirrored(2), hr.FullySharded(2)),
    ],
    ids=lambda strategy: strategy.name,
)
def test_a_part_of_the_model_is_not_called(strategy: Strategy) -> None:
    job = replace(make_job(), model=split_model)
    with pytest.raises(UsageError, match=f"calls the model, of which rank 0 has a part under {strategy.name}"):
        fit(job, strategy, Doing(lambda moment: moment.model(torch.as_tensor(INPUTS[:2]))))


def test_a_whole_model_is_called() -> None:
    found = []
    fit(make_job(), hr.Mirrored(2), Doing(lambda moment: found.append(moment.model(torch.as_tensor(INPUTS[:2])))))
    assert len(found) == 1


def test_what_is_no_callback_is_refused() -> None:
    with pytest.raises(UsageError, match=r"callbacks are objects of subclasses of hr.Callback, got <class"):
        hr.fit(make_job(), callbacks=[Stopper])  # type: ignore[list-item]
    with pytest.raises(UsageError, match=r"callbacks must be a list of hr.Callback objects, got <"):
        hr.fit(make_job(), callbacks=hr.Callback())  # type: ignore[arg-type]


@pytest.mark.slow
def test_an_error_in_a_callback_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    def deed(moment: hr.Moment) -> None:
        raise KeyError("mine")

    with pytest.raises(WorkerFailed, match="KeyError: 'mine'"):
        fit(make_job(), hr.Mirrored(2), Doing(deed))


@pytest.mark.slow
def test_values_and_pictures_become_events_and_files(tmp_path: Path) -> None:
    grey, colour = torch.eye(4), np.full((2, 3, 3), 255, dtype=np.uint8)
    figure = Figure(figsize=(1, 1))

    def deed(moment: hr.Moment) -> None:
        moment.log({"norm/weights": sum(each.norm() for each in moment.model.parameters()), "count": 3})
        content = moment.log_picture("grey", grey).read_bytes()
        moment.log_picture("a/colour 2", colour)
        moment.log_picture("figure", figure)
        moment.log_picture("again", content)
        moment.log_text("sample", "two\nlines")

    run = fit(make_job(), hr.Mirrored(2), Doing(deed), run_dir=tmp_path / "run")
    (values,) = [event for event in run.events if isinstance(event, ValuesLogged)]
    assert (values.rank, values.step, values.values["count"]) == (0, 1, 3.0)
    assert values.values["norm/weights"] > 0
    (text,) = [event for event in run.events if isinstance(event, TextLogged)]
    assert (text.rank, text.step, text.name, text.text) == (0, 1, "sample", "two\nlines")
    pictures = {event.name: event.path for event in run.events if isinstance(event, PictureLogged)}
    assert {name: Path(path).relative_to(tmp_path / "run").as_posix() for name, path in pictures.items()} == {
        "grey": "pictures/grey-1.png",
        "a/colour 2": "pictures/a-colour-2-1.png",
        "figure": "pictures/figure-1.png",
        "again": "pictures/again-1.png",
    }
    assert np.array_equal(imread(pictures["grey"]), grey.numpy())
    assert np.array_equal(imread(pictures["again"]), imread(pictures["grey"]))
    assert imread(pictures["a/colour 2"]).shape[:2] == (2, 3)
    assert imread(pictures["figure"]).shape[:2] == (100, 100)


class Kept(hr.Callback):
    """Logs in the end, in whatever process it is."""

    def on_end(self, moment: hr.Moment) -> None:
        moment.log({"steps": moment.step})


@pytest.mark.slow
def test_it_runs_in_rank_0s_process(tmp_path: Path) -> None:
    run = hr.fit(make_job(), hr.Mirrored(2), callbacks=[Kept(), Stopper(5)], run_dir=tmp_path / "run")
    lines = (tmp_path / "run" / "events" / "rank-0.jsonl").read_text().splitlines()
    (logged,) = [json.loads(line) for line in lines if '"values_logged"' in line]
    assert (logged["values"], steps_of(run)) == ({"steps": 6.0}, {0: 6, 1: 6})


@pytest.mark.slow
def test_a_loop_of_ones_own_has_the_same_moments() -> None:
    seen = Witness()

    def train(worker: hr.Worker) -> None:
        for batch in worker.batches():
            worker.step(batch)
        worker.evaluate()

    job = make_job(eval_data=(INPUTS, TARGETS), model=functools.partial(nn.Linear, 4, 1))
    hr.launch(train, job, hr.Mirrored(2), engine=ENGINE, callbacks=[seen])
    assert [entry[0] for entry in seen.told] == ["step"] * 8 + ["evaluation", "end"]


@pytest.mark.slow
def test_where_workers_may_come_and_go_the_learning_rate_stays_and_a_stop_counts_for_all() -> None:
    strategy = hr.Mirrored(2, min_workers=1)
    with pytest.raises(WorkerFailed, match="a callback cannot change the learning rate where workers may come and go"):
        hr.fit(make_job(), strategy, callbacks=[Slower({2: 0.5})], check=False)
    assert steps_of(hr.fit(make_job(epochs=1000), strategy, callbacks=[Stopper()], check=False)) == {0: 4, 1: 4}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [hr.OneDevice(), hr.Mirrored(2), hr.ParameterAveraging(2, period=1)], ids=repr)
def test_learning_rates_that_change_are_events(strategy: hr.Strategy) -> None:
    options = hr.Options(warmup=2, schedule=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=4, gamma=0.5))
    run = hr.fit(make_job(options=options), strategy, engine=ENGINE)
    told = [(event.step, event.values) for event in run.events if event.kind == "values_logged"]
    rate = make_job().optimizer(nn.Linear(1, 1).parameters()).param_groups[0]["lr"]
    assert told == [(step, {"learning_rate": rate * share}) for step, share in ((1, 0.5), (2, 1.0), (5, 0.5))]


@pytest.mark.slow
def test_a_job_has_callbacks_and_those_of_the_call_come_after() -> None:
    order: list[str] = []
    first, second = Doing(lambda moment: order.append("job")), Doing(lambda moment: order.append("call"))
    hr.fit(make_job(callbacks=[first]), engine=ENGINE, callbacks=[second])
    assert order == ["job", "call"]
    with pytest.raises(UsageError, match=r"callbacks are objects of subclasses of hr\.Callback, got 3"):
        hr.fit(make_job(callbacks=[3]))
