"""hr.steps_to_goal: the noise that it measures is that of the data, and it trains as a plain run does."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.api.trials.goals import _Measuring, _pieces_of
from headrace.errors import JobError, UsageError
from headrace.modules import copy_module
from headrace.prediction.steps_to_goal import MetricGoal, fewest_steps, of_run, rate_factor, steps_at
from headrace.spec.compute import StepsToGoal
from strategies.contract_runs import train


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1)).double()


def job(**changes: Any) -> hr.Job:
    """Fits a plane; dropout and running statistics would show what measuring changes."""
    draws = torch.Generator().manual_seed(3)
    inputs = torch.randn(96, 4, generator=draws, dtype=torch.float64)
    targets = inputs @ torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=torch.float64)
    fields: dict[str, Any] = {
        "model": model,
        "optimizer": functools.partial(torch.optim.SGD, lr=0.02),
        "loss": squared_error,
        "data": (inputs[:70], targets[:70]),
        "eval_data": (inputs[70:], targets[70:]),
        "global_batch_size": 12,
        "epochs": 20,
    }
    return hr.Job(**{**fields, **changes})


def test_noise_is_that_of_the_data() -> None:
    """The gradient of the mean of w x is the mean of x: its square and its covariance are known."""
    draws = torch.Generator().manual_seed(5)
    spread = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    offset = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64)
    weighed = hr.Job(
        model=model,
        loss=lambda outputs, targets: outputs.mean(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.0),
        data=(torch.zeros(16, 3, dtype=torch.float64), torch.zeros(16)),
        eval_data=(torch.zeros(16, 3, dtype=torch.float64), torch.zeros(16)),
        global_batch_size=16,
        epochs=1,
    )
    measuring = _Measuring(weighed, MetricGoal.of("loss 1"), copy_module(model), False, lambda line: None)
    batches = [offset + spread * torch.randn(16, 3, generator=draws, dtype=torch.float64) for _ in range(4000)]
    found = [measuring._compare(model, (batch, torch.zeros(16))) for batch in batches]
    signal, noise = (torch.tensor(each).mean() for each in zip(*found, strict=True))
    # Means of 4000 draws; their standard errors are 1 % of the noise and 4 % of the signal.
    assert abs(float(noise / spread.square().sum()) - 1) < 0.03
    assert abs(float(signal / offset.square().sum()) - 1) < 0.15


def test_it_trains_as_a_plain_run(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[str, Tensor] = {}
    trained = _Measuring.train

    def keep(self: _Measuring, worker: hr.Worker) -> None:
        trained(self, worker)
        kept.update({name: value.clone() for name, value in worker.model.state_dict().items()})

    monkeypatch.setattr(_Measuring, "train", keep)
    found = hr.steps_to_goal(job(), "loss 7", device="cpu")
    assert found.steps > 5
    assert found.global_batch_size == 12
    plain = train(job(epochs=None, steps=found.steps), hr.OneDevice())
    assert all(torch.equal(kept[name], value) for name, value in plain.tensors.items())
    # The last batch of an epoch has 10 examples, and is left out.
    assert 0 < found.critical_batch < 100


@pytest.mark.parametrize(
    ("changes", "goal", "said"),
    [
        ({}, "loss", 'such as "accuracy 0.9", got'),
        ({}, "loss nan", "such as"),
        ({}, "accuracy 0.9", "evaluations have loss; name one of these"),
        ({}, "loss 1e-9", r"is not reached: the job's 120 steps end with loss "),
        ({"eval_data": None}, "loss 1", "has no eval_data"),
        ({"global_batch_size": 1}, "loss 1", "global_batch_size is 1; take 2 or more"),
    ],
)
def test_what_is_no_goal_is_refused(changes: dict[str, Any], goal: str, said: str) -> None:
    with pytest.raises((UsageError, JobError), match=said):
        hr.steps_to_goal(job(**changes), goal, device="cpu")


def test_a_batch_is_cut_into_equal_pieces() -> None:
    assert [_pieces_of(size) for size in (2, 8, 12, 13, 32, 100)] == [2, 8, 6, 13, 8, 5]


def test_steps_by_batch_size() -> None:
    known = StepsToGoal("accuracy 0.9", 32, 180, 64.0)
    assert fewest_steps(known) == 60
    assert [steps_at(known, batch) for batch in (16, 32, 64, 128)] == [300, 180, 120, 90]
    assert rate_factor(known, 64, "noise") == 1.5
    assert rate_factor(known, 64, "linear") == 2
    assert rate_factor(known, 128, "sqrt") == 2
    assert rate_factor(known, 128, "same") == 1
    with pytest.raises(UsageError, match="one of noise, linear, sqrt, same"):
        rate_factor(known, 64, "square")


def test_the_critical_batch_is_the_mean_over_steps_without_noise() -> None:
    goal = MetricGoal.of("loss 0.5")
    same = of_run(goal, 10, 100, [(1.0, 20.0)] * 4)
    assert same.critical_batch == pytest.approx(20)
    # 50 steps at noise 10 are 25 without noise, 50 at 40 are 10: (25 x 10 + 10 x 40) / 35.
    risen = of_run(goal, 10, 100, [(1.0, 10.0), (0.5, 20.0)])
    assert risen.critical_batch == pytest.approx(650 / 35)
    assert steps_at(risen, 10) == 100
    with pytest.raises(UsageError, match="noise alone"):
        of_run(goal, 10, 100, [(-1.0, 10.0)])
