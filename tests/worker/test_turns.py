"""Sets of parameters that take turns: each strategy gives what a plain loop with several optimizers gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import headrace as hr
from headrace.errors import CheckpointMismatch
from headrace.export.quantize.measuring import metrics_of
from headrace.modules import names_of_sets, parts_of
from headrace.report.trackers.curves import EventCurves
from headrace.spec.events import Evaluated, RunStarted, Stepped, ValuesLogged
from headrace.strategies import Strategy

BATCH, EXAMPLES, STEPS = 6, 20, 9
"""The last batch of an epoch is short, and no cycle of turns ends with an epoch."""


class Pair(nn.Module):
    """A generator and a critic of points; called with noise it generates."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        self.critic = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
        self.double()

    def forward(self, noise: Tensor) -> Tensor:
        made: Tensor = self.generator(noise)
        return made


def critic_loss(model: Pair, batch: tuple[Tensor, Tensor]) -> Tensor:
    points, noise = batch
    real, made = model.critic(points), model.critic(model.generator(noise))
    return functional.softplus(-real).mean() + functional.softplus(made).mean()


def generator_loss(model: Pair, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.softplus(-model.critic(model.generator(batch[1]))).mean()


ADAM = partial(torch.optim.Adam, lr=0.01, betas=(0.5, 0.9))
HALVES = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
SETS = {
    "critic": hr.ParameterSet(ADAM, rounds=2, schedule=HALVES, clip_norm=0.2),
    "generator": hr.ParameterSet(partial(torch.optim.SGD, lr=0.1, momentum=0.9), warmup=3),
}
LOSSES = {"critic": critic_loss, "generator": generator_loss}


def points() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    return (
        torch.randn(EXAMPLES, 2, dtype=torch.float64, generator=draws) * 0.3 + 2,
        torch.randn(EXAMPLES, 3, dtype=torch.float64, generator=draws),
    )


def make_job(**changes: Any) -> hr.Job:
    given: dict[str, Any] = {
        "model": Pair,
        "optimizer": SETS,
        "loss": LOSSES,
        "data": points(),
        "global_batch_size": BATCH,
        "steps": STEPS,
        "seed": 3,
        "inputs": 1,
        **changes,
    }
    return hr.Job(**given)


def fit(job: hr.Job, strategy: Strategy | str = "one_device", **arguments: Any) -> hr.Run:
    return hr.fit(job, strategy, engine=hr.ThreadEngine(), device="cpu", **arguments)


def batches(job: hr.Job) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the batches of a run in order, as a run on one device gets them."""
    seen: list[tuple[Tensor, Tensor]] = []

    def collect(worker: hr.Worker) -> None:
        for batch in worker.batches():
            seen.append((batch[0].clone(), batch[1].clone()))
            worker.step(batch)

    hr.launch(collect, job, engine=hr.ThreadEngine(), device="cpu")
    yield from seen


def by_hand(job: hr.Job, losses: Mapping[str, Callable[..., Tensor]]) -> tuple[Pair, list[tuple[str, float]]]:
    """Trains as a user would: two optimizers, two schedules, the critic two rounds, the generator one."""
    torch.manual_seed(job.seed)
    model = Pair()
    critic, generator = ADAM(model.critic.parameters()), torch.optim.SGD(model.generator.parameters(), 0.1, 0.9)
    halves = HALVES(critic)
    curve = []
    for round_, batch in enumerate(batches(job)):
        turn = ("critic", "critic", "generator")[round_ % 3]
        model.zero_grad()
        loss = losses[turn](model, batch)
        loss.backward()
        curve.append((turn, loss.item()))
        if turn == "critic":
            nn.utils.clip_grad_norm_(model.critic.parameters(), 0.2)
            critic.step()
            halves.step()
        else:
            generator.param_groups[0]["lr"] = 0.1 * min(1.0, (round_ // 3 + 1) / 3)
            generator.step()
    return model, curve


def distance(one: nn.Module, other: nn.Module) -> float:
    theirs = other.state_dict()
    return max(float((each - theirs[name]).abs().max()) for name, each in one.state_dict().items())


WAYS = [hr.OneDevice(), hr.Mirrored(2), hr.Mirrored(3), hr.CentralStorage(2), hr.CentralStorage(3)]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", WAYS, ids=repr)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_run_is_what_a_plain_loop_gives(strategy: Strategy, accumulate: int) -> None:
    job = make_job(options=hr.Options(accumulate=accumulate))
    run = fit(job, strategy)
    model, curve = by_hand(make_job(), LOSSES)
    assert distance(run.model, model) < 1e-9
    steps = sorted((each for each in run.events if isinstance(each, Stepped)), key=lambda each: each.step)
    for round_, (turn, loss) in enumerate(curve):
        parts = [each for each in steps if each.step == round_]
        assert {each.turn for each in parts} == {turn}
        weight = sum(each.weight for each in parts)
        assert sum((each.loss or 0.0) * each.weight for each in parts) / weight == pytest.approx(loss, abs=1e-9)


def weighed(loss: Callable[..., Tensor]) -> Callable[..., hr.Mean]:
    def mean(model: Pair, batch: tuple[Tensor, Tensor]) -> hr.Mean:
        return hr.Mean(loss(model, batch) * len(batch[0]), 1.0 * len(batch[0]))

    return mean


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "accumulate"), [(hr.OneDevice(), 2), (hr.Mirrored(3), 1), (hr.CentralStorage(3), 2)], ids=repr
)
def test_losses_may_bring_their_weights(strategy: Strategy, accumulate: int) -> None:
    means = {name: weighed(loss) for name, loss in LOSSES.items()}
    run = fit(make_job(loss=means, options=hr.Options(accumulate=accumulate)), strategy)
    assert distance(run.model, by_hand(make_job(), LOSSES)[0]) < 1e-9


@pytest.mark.slow
def test_every_worker_has_a_part_of_every_set() -> None:
    plan = fit(make_job(steps=1), hr.CentralStorage(2)).plan
    owners = {(each.parameter.partition(".")[0], each.owner) for each in plan.segments}
    assert owners == {(name, rank) for name in SETS for rank in (0, 1)}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [hr.OneDevice(), hr.Mirrored(2), hr.CentralStorage(2)], ids=repr)
@pytest.mark.parametrize("steps", [4, 5], ids=["before-the-generator", "after-a-critic"])
def test_a_resumed_run_goes_on_bit_for_bit(strategy: Strategy, steps: int, tmp_path: Path) -> None:
    job = make_job(options=hr.Options(ema_decay=0.5))
    fit(replace(job, steps=steps), strategy, run_dir=tmp_path)
    resumed, whole = fit(job, strategy, run_dir=tmp_path, resume=True), fit(job, strategy)
    assert distance(resumed.model, whole.model) == 0.0


@pytest.mark.slow
def test_a_checkpoint_goes_on_under_another_strategy(tmp_path: Path) -> None:
    fit(make_job(steps=5), hr.CentralStorage(2), run_dir=tmp_path / "a")
    resumed = fit(make_job(), hr.Mirrored(3), run_dir=tmp_path / "b", resume=tmp_path / "a")
    assert distance(resumed.model, by_hand(make_job(), LOSSES)[0]) < 1e-9


@pytest.mark.slow
def test_a_checkpoint_of_other_turns_is_refused(tmp_path: Path) -> None:
    fit(make_job(steps=2), run_dir=tmp_path)
    others = make_job(optimizer={**SETS, "critic": replace(SETS["critic"], rounds=1)})
    with pytest.raises(CheckpointMismatch, match=r"were critic \(2\), generator \(1\), are critic \(1\), generator"):
        fit(others, run_dir=tmp_path, resume=True)
    slower = make_job(optimizer={**SETS, "generator": replace(SETS["generator"], optimizer=ADAM)})
    with pytest.raises(
        CheckpointMismatch, match=r"the optimizer was torch\.optim\.sgd\.SGD, is torch\.optim\.adam\.Adam"
    ):
        fit(slower, run_dir=tmp_path, resume=True)
    assert fit(others, run_dir=tmp_path, resume=True, reset_optimizer=True).status == "ok"
    one = make_job(optimizer=ADAM, loss=lambda output, target: output.square().mean())
    with pytest.raises(CheckpointMismatch, match=r"generator \(1\), are none"):
        fit(one, run_dir=tmp_path, resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [hr.OneDevice(), hr.Mirrored(2)], ids=repr)
def test_a_loop_of_ones_own_knows_whose_turn_it_is(strategy: Strategy) -> None:
    def train(worker: hr.Worker) -> None:
        for batch in worker.batches():
            share = len(batch[0])
            if share:
                worker.backward(LOSSES[worker.turn](worker.model, batch))  # type: ignore[arg-type]
                worker.update()
            else:
                worker.step(batch)

    run = hr.launch(train, make_job(), strategy, engine=hr.ThreadEngine(), device="cpu")
    assert distance(run.model, by_hand(make_job(), LOSSES)[0]) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [hr.OneDevice(), hr.Mirrored(2), hr.CentralStorage(2)], ids=repr)
def test_evaluations_have_every_loss(strategy: Strategy) -> None:
    size = {"size": lambda output, _: output.abs().mean()}
    run = fit(make_job(eval_data=points(), metrics=size), strategy)
    last = max((each for each in run.events if isinstance(each, Evaluated)), key=lambda each: each.step)
    assert list(last.metrics) == ["loss/critic", "loss/generator", "size"]
    model = run.model.eval()
    for name, loss in LOSSES.items():
        assert last.metrics[f"loss/{name}"] == pytest.approx(float(loss(model, points()).detach()), abs=1e-9)


def penalized(model: Pair, batch: tuple[Tensor, Tensor]) -> Tensor:
    """WGAN-GP's: the gradient of the critic by its input is a part of the loss."""
    at = (batch[0] + model.generator(batch[1]).detach()).requires_grad_()
    (slope,) = torch.autograd.grad(model.critic(at).sum(), at, create_graph=True)
    return critic_loss(model, batch) + (slope.norm(dim=1) - 1).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [hr.OneDevice(), hr.Mirrored(2), hr.CentralStorage(2)], ids=repr)
def test_a_loss_may_be_made_of_gradients(strategy: Strategy) -> None:
    losses = {**LOSSES, "critic": penalized}
    run = fit(make_job(loss=losses, eval_data=points()), strategy)
    assert distance(run.model, by_hand(make_job(), losses)[0]) < 1e-9


@pytest.mark.slow
def test_what_is_in_no_set_is_frozen_and_stays() -> None:
    job = make_job(model=hr.frozen(Pair, "critic.0.*"))
    run = fit(job, hr.CentralStorage(2))
    torch.manual_seed(3)
    before, after = Pair().state_dict(), run.model.state_dict()
    assert {name for name in before if torch.equal(before[name], after[name])} == {"critic.0.weight", "critic.0.bias"}
    assert distance(run.model, fit(job).model) < 1e-9


@pytest.mark.slow
def test_what_is_frozen_for_a_time_is_trained_in_later_turns() -> None:
    job = make_job(model=hr.frozen(Pair, "critic.0.*", until_epoch=1))
    early, late = (fit(replace(job, steps=steps), hr.Mirrored(2)).model for steps in (4, STEPS))
    torch.manual_seed(3)
    start = Pair().state_dict()["critic.0.weight"]
    assert torch.equal(early.state_dict()["critic.0.weight"], start)
    assert not torch.equal(late.state_dict()["critic.0.weight"], start)


@pytest.mark.slow
def test_a_callback_sees_whose_turn_it_was_and_changes_all_rates(tmp_path: Path) -> None:
    class Turns(hr.Callback):
        def on_step(self, moment: hr.Moment) -> None:
            moment.log({f"turns/{moment.turn}": moment.step})
            if moment.step == 1:
                moment.set_learning_rate_factor(1e-30)

    run = fit(make_job(), hr.Mirrored(2), callbacks=[Turns()], run_dir=tmp_path)
    values = [name for each in run.events if isinstance(each, ValuesLogged) for name in each.values]
    logged = [name for name in values if name.startswith("turns/")]
    assert logged == ["turns/critic", "turns/critic", "turns/generator"] * 3
    assert distance(run.model, fit(make_job(steps=2)).model) < 1e-9


@pytest.mark.slow
def test_a_report_has_a_curve_for_each_set(tmp_path: Path) -> None:
    run = fit(make_job(), run_dir=tmp_path / "run")
    losses = run.summary.curves.set_losses
    assert {name: len(points) for name, points in losses.items()} == {"critic": 6, "generator": 3}
    assert losses["critic"][1].examples == 2 * BATCH
    assert run.summary.curves.loss == ()
    page = run.report(tmp_path / "page.html").read_text()
    assert "How does the loss of critic go?" in page
    assert "How does the loss of generator go?" in page
    (started,) = (each for each in run.events if isinstance(each, RunStarted))
    curves = EventCurves(started)
    tags = {each.tag for event in run.events for each in curves.take(event)} | {each.tag for each in curves.rest()}
    assert {"loss/critic", "loss/generator"} <= tags
    assert "loss" not in tags


@pytest.mark.slow
def test_a_loss_that_is_not_finite_leaves_out_its_own_round() -> None:
    def sometimes(model: Pair, batch: tuple[Tensor, Tensor]) -> Tensor:
        return generator_loss(model, batch) * (math.nan if model.training else 1.0)

    options = hr.Options(on_nonfinite="skip", ema_decay=0.9)
    run = fit(make_job(loss={**LOSSES, "generator": sometimes}, options=options), hr.Mirrored(2))
    torch.manual_seed(3)
    start, trained = Pair().state_dict(), run.model.state_dict()
    assert {name.partition(".")[0] for name in start if torch.equal(start[name], trained[name])} == {"generator"}


def test_parts_of_a_module_that_is_shared_stay_in_their_places() -> None:
    module = Pair()
    module.critic[2].bias.requires_grad_(False)
    names = names_of_sets(module, SETS)
    parts = parts_of(module, names)
    assert [name for name, _ in parts["critic"].named_parameters()] == [
        *("critic.0.weight", "critic.0.bias", "critic.2.weight", "critic.2.bias")
    ]
    assert parts["generator"].generator is module.generator
    assert [name for name, _ in parts["generator"].named_parameters()] == list(names["generator"])


@pytest.mark.slow
def test_unconnected_workers_take_turns_each_by_itself() -> None:
    run = fit(make_job(), hr.Unconnected(2))
    for rank in (0, 1):
        steps = sorted((each.step, each.turn) for each in run.events if isinstance(each, Stepped) and each.rank == rank)
        assert [turn for _, turn in steps] == ["critic", "critic", "generator"] * 3
    assert distance(run.model, fit(make_job()).model) > 1e-6


@pytest.mark.slow
def test_the_trained_model_predicts_by_its_forward() -> None:
    run = fit(make_job(eval_data=points(), metrics={"size": lambda output, _: output.abs().mean()}))
    noise = points()[1]
    with torch.no_grad():
        made = run.model.eval()(noise)
    assert torch.equal(run.predict(points()), made)

    def program(named: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        with torch.no_grad():
            return {"output": run.model(*named.values())}

    # An exported program has no parts, so its metrics are without the losses of sets.
    found = metrics_of(run.job, run.model, {"exported": program})
    assert found == {"exported": {"size": pytest.approx(run.metrics["size"], abs=1e-9)}}
