"""rehearse_goal: trains what is recommended for a goal in one process, and says when each choice reaches it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.optim.optimizer import Optimizer

from headrace.api.rehearsal.rehearse import rehearse
from headrace.errors import NonFiniteGradient, NonFiniteLoss
from headrace.prediction.assumptions import Assumptions
from headrace.prediction.recommendation.goals import BatchChoice, GoalRecommendation
from headrace.prediction.steps_to_goal import MetricGoal
from headrace.spec.cluster import Cluster
from headrace.spec.events import Evaluated
from headrace.spec.job import Job
from headrace.spec.model import ModelSpec
from headrace.spec.parameter_sets import one_optimizer
from headrace.strategies import OneDevice, resolve

LONGER = 1.5
"""Of the predicted steps, that are trained."""
_EVALUATIONS = 60
"""Of such a training, where the job does not say when it evaluates."""


@dataclass(frozen=True)
class RehearsedChoice:
    """What a rehearsal says of a batch and a strategy.

    Attributes:
        choice: what was recommended, with the predicted steps and seconds.
        steps: after which the goal was met first; None if it was not within 1.5 times the predicted steps.
        seconds: until then, from the command on, in the predicted time; None as `steps`.
        curve: of each evaluation the steps before it, and the goal's metric.
        as_one_device: the strategy computes what one device computes, so that one device was trained.
        why_ended: of a training that had to end; else "".
    """

    choice: BatchChoice
    steps: int | None
    seconds: float | None
    curve: tuple[tuple[int, float], ...]
    as_one_device: bool = False
    why_ended: str = ""


def rehearse_goal(
    job: Job,
    found: GoalRecommendation,
    cluster: Cluster | Path | str,
    *,
    model: ModelSpec | Path | str,
    assumptions: Assumptions | None = None,
    force: bool = False,
    say: Callable[[str], object] = lambda line: None,
) -> list[RehearsedChoice]:
    """Trains the best three choices for a goal as their workers would, in this process and in virtual time.

    The prediction says how many steps a batch takes if noise alone decides; here real gradients say it, with the
    learning rate of the rule, and with the staleness and the local steps of strategies whose updates are not those
    of one device.

    Args:
        job: that was profiled for the goal.
        found: of `recommend_for_goal`.
        cluster, model, assumptions, force: as of `recommend_for_goal`.
        say: is told what is trained.

    Returns:
        In the order of `found.ranked()`.

    Raises:
        UsageError, InfeasiblePlan, DataError: as of `rehearse`; a loss that is not finite ends one choice alone.

    Examples:
        >>> from dataclasses import replace
        >>> from headrace.spec.cluster import Host
        >>> model = replace(profile, to_goal=hr.StepsToGoal("loss 0.69", 16, 4, 10.0))
        >>> here = hr.Cluster((Host("here", 1, 10**9),))
        >>> found = hr.recommend_for_goal(model, here, "loss 0.69", global_batch_size=16)
        >>> [each.choice.batch for each in hr.rehearse_goal(job, found, here, model=model)]
        [16]
    """
    goal = MetricGoal.of(found.to_goal.goal)
    return [
        _rehearsed(job, choice, goal, {"cluster": cluster, "model": model, "force": force}, assumptions, say)
        for choice in found.ranked()
    ]


@dataclass(frozen=True)
class _AtRate:
    """A job's optimizer with its learning rates times a factor."""

    optimizer: Callable[..., Optimizer]
    factor: float

    def __call__(self, parameters: Any) -> Optimizer:
        made = self.optimizer(parameters)
        for group in made.param_groups:
            group["lr"] = group["lr"] * self.factor
        return made


def _rehearsed(
    job: Job,
    choice: BatchChoice,
    goal: MetricGoal,
    given: Mapping[str, Any],
    assumptions: Assumptions | None,
    say: Callable[[str], object],
) -> RehearsedChoice:
    winner = choice.advice.winner
    strategy = resolve(winner.text)
    alone = bool(strategy.behave(1).not_rehearsed) and strategy.equals_one_device
    steps = math.ceil(LONGER * choice.steps)
    options = replace(
        job.options,
        early_stopping=None,
        accumulate=1 if alone else winner.accumulate,
        eval_every=job.options.eval_every or max(1, steps // _EVALUATIONS),
    )
    optimizer = _AtRate(one_optimizer(job.optimizer, "a goal"), choice.rate_factor)
    tried = replace(job, global_batch_size=choice.batch, epochs=None, steps=steps, options=options, optimizer=optimizer)
    say(f"rehearsing batches of {choice.batch:,}, {winner.text}: {steps:,} steps")
    try:
        rehearsal = rehearse(tried, OneDevice() if alone else strategy, assumptions=assumptions, **given)
    except (NonFiniteLoss, NonFiniteGradient) as error:
        return RehearsedChoice(choice, None, None, (), alone, str(error))
    curve = tuple(
        (event.step, event.metrics[goal.metric])
        for event in rehearsal.run.events
        if isinstance(event, Evaluated) and goal.metric in event.metrics
    )
    met = _first(curve, goal)
    if met is None:
        return RehearsedChoice(choice, None, None, curve, alone)
    each_s = (winner.seconds - winner.start_s) / choice.steps
    return RehearsedChoice(choice, met, winner.start_s + met * each_s, curve, alone)


def _first(curve: Sequence[tuple[int, float]], goal: MetricGoal) -> int | None:
    """Returns the steps of the first evaluation that meets a goal; more is better if the later values are more."""
    later = [value for _, value in curve[len(curve) // 2 :]]
    rises = goal.metric != "loss" and sum(later) / max(1, len(later)) > (curve[0][1] if curve else 0.0)
    return next((step for step, value in curve if (value >= goal.value if rises else value <= goal.value)), None)
