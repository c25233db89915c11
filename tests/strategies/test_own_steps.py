"""Downpour whose local steps are those of the job's optimizer: no step is lost, and none is counted twice."""

from __future__ import annotations

import dataclasses
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as hr
from cover import in_turn
from headrace.errors import UsageError
from headrace.parameter_server.client.own_steps import OwnSteps
from strategies.contract_models import COUNTS, MODELS, VARIANTS, verb_by_verb
from strategies.contract_options import OPTIONS
from strategies.contract_runs import distance, train
from strategies.test_contract import DOUBLE, on_one_device

MOVING = partial(hr.Downpour, local="optimizer")
CASES = {
    name: dataclasses.replace(case, options=dataclasses.replace(case.options, batch_norm="local"))
    for name, case in {**MODELS, **VARIANTS, **OPTIONS}.items()
}
"""Of the contract; with one worker, BatchNorm is the same either way."""
INTERVALS = ((1, 1), (3, 3), (2, 5), (5, 2), (99, 3))
ADAM = partial(torch.optim.Adam, lr=0.01)


@pytest.mark.parametrize(("name", "size"), in_turn(sorted(CASES), ["uneven", "tiny"], third=1))
def test_one_worker_is_one_device(name: str, size: str) -> None:
    if CASES[name].options.ema_decay is not None:
        return  # which is made after each push, not after each step
    outcome = train(CASES[name].job(COUNTS[size]), MOVING(1, fetch_every=2, push_every=3))
    assert distance(outcome.tensors, on_one_device(CASES[name], size, torch.float64, None).tensors) <= DOUBLE


@pytest.mark.parametrize(("intervals", "overlap"), [*product(INTERVALS, (False, True))])
def test_one_worker_keeps_its_steps_whatever_the_intervals(intervals: tuple[int, int], overlap: bool) -> None:
    job = CASES["mlp"].job(COUNTS["uneven"], optimizer=ADAM)
    fetch_every, push_every = intervals
    strategy = MOVING(1, servers=2, fetch_every=fetch_every, push_every=push_every, overlap=overlap)
    assert distance(train(job, strategy).tensors, train(job, hr.OneDevice()).tensors) <= DOUBLE


def test_a_loop_of_ones_own() -> None:
    outcome = train(CASES["mlp"].job(COUNTS["tiny"]), MOVING(1), loop=partial(verb_by_verb, CASES["mlp"].loss))
    assert distance(outcome.tensors, on_one_device(CASES["mlp"], "tiny", torch.float64, None).tensors) <= DOUBLE


def test_a_resumed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    job = CASES["mlp"].job(COUNTS["uneven"], optimizer=ADAM)
    half = dataclasses.replace(job, steps=7, epochs=None)
    whole = dataclasses.replace(job, steps=14, epochs=None)
    fit = partial(hr.fit, strategy=MOVING(1), engine=hr.ThreadEngine(), check=False)
    fit(half, run_dir=tmp_path / "a")
    resumed = fit(whole, run_dir=tmp_path / "b", resume=tmp_path / "a")
    assert distance(resumed.model.state_dict(), train(whole, hr.OneDevice()).tensors) <= DOUBLE


class Steady(torch.optim.Optimizer):
    """Moves every parameter by as much, whatever the gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(group["lr"])


@pytest.mark.parametrize(("scale", "each"), [("share", 1.0), ("full", 3.0)])
def test_workers_together_move_as_far_as_one_device(scale: str, each: float) -> None:
    """48 examples in 4 rounds of 12, of which each of three workers takes a third."""
    data = torch.ones(48, 1), torch.ones(48, 1)
    job = hr.Job(
        torch.nn.Linear(1, 1).double(), loss=torch.nn.functional.mse_loss, optimizer=Steady, global_batch_size=12,
        data=tuple(tensor.double() for tensor in data), epochs=1,
    )  # fmt: skip
    assert isinstance(job.model, torch.nn.Linear)
    begin = job.model.weight.item()
    run = hr.fit(job, MOVING(3, fetch_every=1, push_every=2, scale=scale), engine=hr.ThreadEngine(), check=False)
    (weight,) = (value for name, value in run.model.state_dict().items() if name == "weight")
    assert weight.item() - begin == pytest.approx(4 * each)


def test_a_fetch_leaves_what_it_lacks() -> None:
    """The server's value is 10 when it is fetched, with the first push in it, and 1.5 more was pushed meanwhile."""
    place = torch.zeros(1)
    steps = OwnSteps([[place]], [[(1,)]])
    place += 1
    assert steps.push() == [[torch.tensor([-1.0])]]
    steps.begin_fetch()
    place += 1.5
    assert steps.push() == [[torch.tensor([-1.5])]]
    place += 0.25
    steps.take_over([torch.tensor([10.0])])
    assert place.item() == 11.75
    assert steps.push() == [[torch.tensor([-0.25])]]
    steps.pull(partial(_fill, place, 20.0))
    assert place.item() == 20.0
    place += 0.5
    steps.pull(partial(_fill, place, 30.0))
    assert place.item() == 30.5


def _fill(place: torch.Tensor, value: float) -> None:
    place.fill_(value)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UsageError, match="local must be 'sgd' or 'optimizer', got 'adam'"):
        hr.Downpour(local="adam")
    with pytest.raises(UsageError, match=r"local='optimizer' .* use local='sgd'"):
        hr.Hybrid(MOVING(2, servers=2), hr.Pipeline(stages=2))
