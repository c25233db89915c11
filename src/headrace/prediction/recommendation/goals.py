"""recommend_for_goal: the batch size, the devices and the strategy together that reach a goal first, or cheapest."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import InfeasiblePlan, UsageError
from headrace.prediction.recommendation.recommend import WORTH, Recommendation, recommend
from headrace.prediction.steps_to_goal import MetricGoal, rate_factor, steps_at
from headrace.spec.cluster import Cluster
from headrace.spec.compute import StepsToGoal
from headrace.spec.model import ModelSpec

_SMALLER, _LARGER = 3, 4
"""Halvings and doublings of the measured batch that are tried: further away the learning rate is a guess."""
_BEST = 3


@dataclass(frozen=True)
class BatchChoice:
    """A global batch, and what is to be taken with it.

    Attributes:
        batch: in examples.
        steps: to the goal.
        rate_factor: by which the job's learning rate is multiplied.
        advice: what trains so many examples first, or cheapest.
    """

    batch: int
    steps: int
    rate_factor: float
    advice: Recommendation

    @property
    def value(self) -> float:
        """What is ranked: money or seconds."""
        return self.advice.winner.money if self.advice.by_money else self.advice.winner.seconds


@dataclass(frozen=True)
class GoalRecommendation:
    """The batch sizes that were tried, by size, and the best of them.

    Attributes:
        to_goal: what was measured.
        best: no other is better by more than predictions are off; of these the one nearest to the measured batch.
        rule: by which the learning rate follows the batch.
        unfit: sizes for which nothing fits, and why.
    """

    to_goal: StepsToGoal
    choices: tuple[BatchChoice, ...]
    best: BatchChoice
    rule: str
    unfit: tuple[tuple[int, str], ...] = ()

    def ranked(self) -> list[BatchChoice]:
        """Returns the best three: the first is `best`."""
        others = sorted((each for each in self.choices if each is not self.best), key=lambda each: _rank(each))
        return [self.best, *others][:_BEST]


def recommend_for_goal(
    model: ModelSpec | Path | str,
    cluster: Cluster | Path | str,
    goal: str,
    *,
    rate_rule: str = "noise",
    global_batch_size: int | None = None,
    **asked: Any,
) -> GoalRecommendation:
    """Simulates every strategy at several batch sizes, and ranks what reaches a goal.

    Args:
        model, cluster: as for `recommend`; the model says `to_goal`, which `profile(job, goal=...)` measures.
        goal: of the model's file.
        rate_rule: see prediction/steps_to_goal.py.
        global_batch_size: the only one that is tried; None for halves and doubles of the measured one.
        asked: of `recommend`, without `examples`.

    Raises:
        UsageError: the model has no such goal, or what `recommend` raises.
        InfeasiblePlan: nothing fits at any batch size.

    Examples:
        >>> from dataclasses import replace
        >>> model = replace(hr.ModelSpec.load("model.toml"), to_goal=hr.StepsToGoal("accuracy 0.9", 256, 6000, 1000.0))
        >>> found = hr.recommend_for_goal(model, "cluster.toml", "accuracy 0.9")
        >>> found.best.steps < 6000
        True
    """
    model = model if isinstance(model, ModelSpec) else ModelSpec.load(model)
    known = _known(model, goal)
    rate_factor(known, known.global_batch_size, rate_rule)
    choices: list[BatchChoice] = []
    unfit: list[tuple[int, str]] = []
    for batch in [global_batch_size] if global_batch_size else _sizes(known):
        steps = steps_at(known, batch)
        try:
            advice = recommend(model, cluster, global_batch_size=batch, examples=batch * steps, **asked)
        except InfeasiblePlan as error:
            unfit.append((batch, str(error)))
        else:
            choices.append(BatchChoice(batch, steps, rate_factor(known, batch, rate_rule), advice))
    if not choices:
        raise InfeasiblePlan(f"nothing fits at any batch size; of {unfit[0][0]} examples: {unfit[0][1]}")
    return GoalRecommendation(known, tuple(choices), _best(choices, known), rate_rule, tuple(unfit))


def _known(model: ModelSpec, goal: str) -> StepsToGoal:
    wanted, known = str(MetricGoal.of(goal)), model.to_goal
    if known is None:
        raise UsageError(
            f"the model does not say how many steps it takes to {wanted}; measure it: "
            f'headrace profile JOB.py --goal "{wanted}"'
        )
    if known.goal != wanted:
        raise UsageError(f"the model's goal is {known.goal!r}, not {wanted!r}; profile the job again with that goal")
    return known


def _sizes(known: StepsToGoal) -> Iterator[int]:
    """Yields halves and doubles of the measured batch; halves as far as they are whole."""
    size = known.global_batch_size
    halves = [size >> times for times in range(1, _SMALLER + 1) if size % (1 << times) == 0 and size >> times]
    yield from reversed(halves)
    yield from (size << times for times in range(_LARGER + 1))


def _rank(choice: BatchChoice) -> tuple[bool, float]:
    deadline_s = choice.advice.deadline_s
    return deadline_s is not None and choice.advice.winner.seconds > deadline_s, choice.value


def _best(choices: list[BatchChoice], known: StepsToGoal) -> BatchChoice:
    first = min(choices, key=_rank)
    near = [each for each in choices if _rank(each)[0] == _rank(first)[0] and each.value <= WORTH * first.value]
    return min(
        near, key=lambda each: max(each.batch, known.global_batch_size) / min(each.batch, known.global_batch_size)
    )


def sentences(found: GoalRecommendation) -> Iterator[str]:
    """Yields what comes before the sentences of the best one's own recommendation."""
    best, known = found.best, found.to_goal
    yield f"Train to {known.goal} with batches of {best.batch:,}: about {best.steps:,} steps,"
    if best.batch == known.global_batch_size:
        yield "as measured, with the job's own learning rate."
    else:
        yield f"with {best.rate_factor:.3g} times the job's learning rate (rule: {found.rule});"
        yield f"measured were {known.steps:,} steps of {known.global_batch_size:,}."
    yield f"The critical batch is {round(known.critical_batch):,} examples:"
    yield "far below it twice the batch takes half the steps, far above as many."
