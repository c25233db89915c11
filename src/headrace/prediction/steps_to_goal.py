"""How many steps a job takes to a goal, by the size of its batch: what noise in its gradients says.

A batch of `critical_batch` examples takes twice the fewest steps, and twice the fewest examples: steps = fewest x
(1 + critical_batch / batch), with the best learning rate for each (McCandlish, Kaplan, Amodei and others, "An empirical
model of large-batch training", 2018, sections 2.2 and 2.3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.errors import UsageError
from headrace.spec.compute import StepsToGoal

RATE_RULES = ("noise", "linear", "sqrt", "same")
"""How the learning rate follows the batch: see `rate_factor`."""


@dataclass(frozen=True)
class MetricGoal:
    """A number that an evaluation is to reach: "accuracy 0.9", "loss 0.25".

    Whether more or less is better, the number before training says.
    """

    metric: str
    value: float

    @classmethod
    def of(cls, text: str) -> MetricGoal:
        """Reads a goal.

        Raises:
            UsageError: it is no name and a number.
        """
        metric, _, value = text.strip().rpartition(" ")
        try:
            goal = cls(metric.strip(), float(value))
        except ValueError:
            goal = cls("", math.nan)
        if not goal.metric or not math.isfinite(goal.value):
            raise UsageError(f'a goal is a metric of the evaluation and a number, such as "accuracy 0.9", got {text!r}')
        return goal

    def __str__(self) -> str:
        return f"{self.metric} {self.value:g}"


def of_run(goal: MetricGoal, batch: int, steps: int, measured: Sequence[tuple[float, float]]) -> StepsToGoal:
    """Returns what a run says that has reached its goal.

    Args:
        batch: its global batch.
        steps: that it took.
        measured: of equal parts of the run in their order, the squared norm of the gradient without noise, and
            the trace of the covariance of one example's, means of some steps (appendix A.1 of the paper).

    The noise rises while the loss falls. A part of n steps with noise scale b stands for n / (1 + b / batch) steps
    without noise, and the critical batch is the mean of b over these.
    """
    fewest = most = 0.0
    noise: list[float] = []
    for signal, spread in measured:
        scale = max(0.0, spread) / signal if signal > 0 else math.inf
        noise.append(scale)
        part = steps / len(measured)
        fewest += part / (1 + scale / batch)
        # Where noise is all that was seen, the limit of the other.
        most += part * batch if math.isinf(scale) else part * scale / (1 + scale / batch)
    if not fewest:
        raise UsageError(
            f"the gradients of {steps} steps of {batch} examples are noise alone, so that no batch can be chosen; "
            "measure with a larger global_batch_size"
        )
    return StepsToGoal(str(goal), batch, steps, most / fewest, tuple(noise))


def fewest_steps(known: StepsToGoal) -> float:
    """Steps with a batch without limit."""
    return known.steps / (1 + known.critical_batch / known.global_batch_size)


def steps_at(known: StepsToGoal, batch: int) -> int:
    """Returns the steps with another global batch."""
    return math.ceil(fewest_steps(known) * (1 + known.critical_batch / batch))


def rate_factor(known: StepsToGoal, batch: int, rule: str) -> float:
    """Returns by how much the learning rate is multiplied for another global batch.

    "noise" follows section 2.2 of the paper, 1 / (1 + critical_batch / batch), which is "linear" for small batches
    and "same" for large ones; "sqrt" is what Adam's users take.
    """
    if rule not in RATE_RULES:
        raise UsageError(f"a rule for the learning rate is one of {', '.join(RATE_RULES)}, got {rule!r}")
    larger = batch / known.global_batch_size
    if rule == "noise":
        return (1 + known.critical_batch / known.global_batch_size) / (1 + known.critical_batch / batch)
    return {"linear": larger, "sqrt": math.sqrt(larger), "same": 1.0}[rule]
