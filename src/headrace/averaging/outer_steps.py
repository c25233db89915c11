"""The outer step: how the averaged copies move the workers' parameters at a synchronization.

mean       local SGD: all workers go on from the mean
Nesterov   DiLoCo: how far the mean has moved is a gradient, for SGD with Nesterov momentum
Elastic    EASGD: each worker keeps its parameters, pulled towards a center, which is pulled towards the workers
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from headrace.errors import UnknownName, UsageError


class OuterStep(ABC):
    """Moves the workers' copies of some elements, and what is kept beside them.

    Attributes:
        copies_kept: how many tensors of the model's size are kept between synchronizations; the first begins as the
            parameters, the others as 0.
        weighted: whether the mean is weighted by examples.
        agrees: whether all workers go on from the same parameters.
    """

    copies_kept: ClassVar[int] = 0
    weighted: ClassVar[bool] = True
    agrees: ClassVar[bool] = True

    @abstractmethod
    def model(self, state: Sequence[Tensor], mean: Tensor) -> Tensor:
        """Returns the trained model's elements for a mean of the copies; `state` are `copies_kept` tensors like it."""

    @abstractmethod
    def step(self, state: Sequence[Tensor], mean: Tensor, copies: Sequence[Tensor], workers: int) -> None:
        """Changes what is kept, and the copies that are here: all, or this worker's. `mean` is of `workers` copies."""

    def sgd(self) -> Mapping[str, float | bool]:
        """Returns the options of a `torch.optim.SGD` that does the same, given the way of the mean as gradient.

        Raises UsageError if none does.
        """
        raise UsageError(f"the outer step {self!r} is no optimizer's; use outer=None or hr.Nesterov()")


@dataclass(frozen=True)
class MeanStep(OuterStep):
    """The mean itself (Stich, "Local SGD converges fast and communicates little", 2019, algorithm 1)."""

    def model(self, state: Sequence[Tensor], mean: Tensor) -> Tensor:
        return mean

    def step(self, state: Sequence[Tensor], mean: Tensor, copies: Sequence[Tensor], workers: int) -> None:
        for copy in copies:
            copy.copy_(mean)

    def sgd(self) -> Mapping[str, float | bool]:
        return {"lr": 1.0}


@dataclass(frozen=True)
class Nesterov(OuterStep):
    """SGD with Nesterov momentum (Douillard et al., "DiLoCo", 2023, section 2; as `torch.optim.SGD` does it).

    Attributes:
        lr: outer learning rate.
        momentum: of the outer step.

    Raises:
        UsageError: a number is out of its range.

    Examples:
        >>> strategy = hr.ParameterAveraging(workers=2, period=2, outer=hr.Nesterov(lr=0.7, momentum=0.9))
        >>> hr.fit(job, strategy).status
        'ok'
    """

    lr: float = 0.7
    momentum: float = 0.9

    copies_kept = 2

    def __post_init__(self) -> None:
        _check_number("lr", self.lr, lambda lr: 0 < lr < math.inf, "above 0")
        _check_number("momentum", self.momentum, lambda momentum: 0 <= momentum < 1, "of at least 0 and below 1")

    def model(self, state: Sequence[Tensor], mean: Tensor) -> Tensor:
        anchor, velocity = state
        gradient = anchor - mean
        velocity = velocity * self.momentum + gradient
        return anchor - self.lr * gradient.add_(velocity, alpha=self.momentum)

    def step(self, state: Sequence[Tensor], mean: Tensor, copies: Sequence[Tensor], workers: int) -> None:
        anchor, velocity = state
        gradient = anchor - mean
        velocity.mul_(self.momentum).add_(gradient)
        anchor.sub_(self.lr * gradient.add_(velocity, alpha=self.momentum))
        for copy in copies:
            copy.copy_(anchor)

    def sgd(self) -> Mapping[str, float | bool]:
        return {"lr": self.lr, "momentum": self.momentum, "nesterov": self.momentum > 0}


@dataclass(frozen=True)
class Elastic(OuterStep):
    """The elastic force (Zhang, Choromanska, LeCun, "Deep learning with elastic averaging SGD", 2015, section 3.1).

    `x_i -= alpha (x_i - center)` for every worker, and `center += alpha sum (x_i - center)`. The center is the trained
    model.

    Attributes:
        beta: alpha times the number of workers; the paper's 0.9, above 1 it does not converge.

    Raises:
        UsageError: a number is out of its range.

    Examples:
        >>> strategy = hr.ParameterAveraging(workers=2, period=2, outer=hr.Elastic(beta=0.9))
        >>> hr.fit(job, strategy).status
        'ok'
    """

    beta: float = 0.9

    copies_kept = 1
    weighted = False
    agrees = False

    def __post_init__(self) -> None:
        _check_number("beta", self.beta, lambda beta: 0 < beta <= 1, "above 0 and of at most 1")

    def model(self, state: Sequence[Tensor], mean: Tensor) -> Tensor:
        (center,) = state
        return center

    def step(self, state: Sequence[Tensor], mean: Tensor, copies: Sequence[Tensor], workers: int) -> None:
        (center,) = state
        for copy in copies:
            copy.lerp_(center, self.beta / workers)
        # alpha times the sum is beta times the mean.
        center.lerp_(mean, self.beta)


def _check_number(name: str, value: object, holds: Callable[[float], bool], form: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not holds(value):
        raise UsageError(f"{name} of an outer step must be a number {form}, got {value!r}")


OUTER_STEPS: Mapping[str, OuterStep] = {"elastic": Elastic(), "mean": MeanStep(), "nesterov": Nesterov()}
"""Outer steps by name, with their papers' numbers."""


def outer_step(outer: str | OuterStep | None) -> OuterStep:
    """Returns an outer step by its name, if it is none already; None is the mean.

    Raises UnknownName if there is none of this name, and UsageError if it is something else.
    """
    if outer is None:
        return OUTER_STEPS["mean"]
    if isinstance(outer, OuterStep):
        return outer
    if not isinstance(outer, str):
        raise UsageError(f"outer is a name ('nesterov'), an outer step such as hr.Nesterov() or None, got {outer!r}")
    if outer not in OUTER_STEPS:
        raise UnknownName("outer step", outer, OUTER_STEPS)
    return OUTER_STEPS[outer]
