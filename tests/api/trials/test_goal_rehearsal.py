"""rehearse_goal: the steps to a goal are those of a plain run with the batch and the rate that were recommended."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import headrace as hr
from headrace.api.trials.goal_rehearsal import rehearse_goal
from headrace.engine.threads import ThreadEngine
from headrace.prediction.recommendation.goals import GoalRecommendation, recommend_for_goal
from headrace.spec.cluster import Host
from headrace.spec.compute import BatchProfile, ComputeProfile, StepsToGoal
from headrace.spec.events import Evaluated
from headrace.spec.model import ModelSpec, ParameterSpec

GOAL = "loss 0.8"
CLUSTER = hr.Cluster(tuple(Host(f"h{index}", 1, 10**9) for index in range(2)))
PARAMETERS = tuple(ParameterSpec(name, shape) for name, shape in (("weight", (3, 8)), ("bias", (3,))))
# An example takes so long that two devices are worth their start.
COMPUTE = ComputeProfile((BatchProfile(8, 0.4, 0.8), BatchProfile(64, 3.2, 6.4)), 0.0005, 0.0001, 0.0)


def job(rate: float = 0.05, **changes: Any) -> hr.Job:
    draws = torch.Generator().manual_seed(0)
    inputs = torch.randn(192, 8, generator=draws)
    fields: dict[str, Any] = {
        "model": functools.partial(nn.Linear, 8, 3),
        "task": hr.tasks.multiclass(3),
        "optimizer": functools.partial(torch.optim.SGD, lr=rate),
        "data": (inputs, inputs[:, :3].argmax(dim=1)),
        "eval_data": (inputs[:48], inputs[:48, :3].argmax(dim=1)),
        "global_batch_size": 16,
        "epochs": 20,
        "seed": 1,
    }
    return hr.Job(**{**fields, **changes})


def found(steps: int) -> tuple[ModelSpec, GoalRecommendation]:
    model = ModelSpec(PARAMETERS, compute=COMPUTE, to_goal=StepsToGoal(GOAL, 16, steps, 16.0))
    return model, recommend_for_goal(model, CLUSTER, GOAL)


def plain_steps(batch: int, factor: float, steps: int, every: int) -> int | None:
    tried = job(0.05 * factor, global_batch_size=batch, epochs=None, steps=steps, options=hr.Options(eval_every=every))
    run = hr.fit(tried, hr.OneDevice(), device="cpu", engine=ThreadEngine(), checkpoints=False)
    seen = [event for event in run.events if isinstance(event, Evaluated)]
    return next((event.step for event in seen if event.metrics["loss"] <= 0.8), None)


@pytest.mark.slow
def test_steps_are_those_of_a_plain_run() -> None:
    model, advice = found(60)
    every = 2
    rehearsed = rehearse_goal(job(options=hr.Options(eval_every=every)), advice, CLUSTER, model=model)
    assert [each.choice for each in rehearsed] == advice.ranked()
    assert any(each.choice.rate_factor != 1 for each in rehearsed)
    assert {each.choice.advice.winner.text for each in rehearsed} != {"one_device"}
    for each in rehearsed:
        trained = -(-3 * each.choice.steps // 2)
        assert each.steps == plain_steps(each.choice.batch, each.choice.rate_factor, trained, every) is not None
        assert each.seconds is not None
        assert 0 < each.seconds < 1.5 * each.choice.advice.winner.seconds


def test_a_goal_that_is_not_met_is_said() -> None:
    model, advice = found(8)
    for each in rehearse_goal(job(0.0001), advice, CLUSTER, model=model):
        assert each.steps is None
        assert each.seconds is None
        assert not each.why_ended
        assert all(value > 0.8 for _, value in each.curve)


def test_a_loss_that_is_not_finite_ends_one_choice() -> None:
    model, advice = found(20)
    one = replace(advice, choices=advice.choices[:1], best=advice.choices[0])
    (each,) = rehearse_goal(job(1e38), one, CLUSTER, model=model)
    assert each.steps is None
    assert "loss is nan" in each.why_ended
