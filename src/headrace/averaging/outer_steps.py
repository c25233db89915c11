"""The outer step: how the averaged copies move the workers' parameters at a synchronization.

mean       local SGD: all workers go on from the mean
Nesterov   DiLoCo: how far the mean has moved is a gradient, for SGD with Nesterov momentum
Momentum   FedAvgM: the same with heavy-ball momentum
SlowMo     the same in units of the workers' learning rate: `slow_mo.py`
FedAdam    FedOpt: the same with an adaptive rate for each element; FedYogi and FedAdagrad likewise
Elastic    EASGD: each worker keeps its parameters, pulled towards a center, which is pulled towards the workers
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from headrace.errors import UnknownName, UsageError
from headrace.registry import Registry, is_place, placed
from headrace.spec.call import Call, parse_call


class OuterStep(ABC):
    """Moves the workers' copies of some elements, and what is kept beside them.

    Attributes:
        copies_kept: how many tensors of the model's size are kept between synchronizations; the first begins as the
            parameters, the others as 0.
        weighted: whether the mean is weighted by examples.
        agrees: whether all workers go on from the same parameters.

    Examples:
        >>> issubclass(hr.Nesterov, hr.OuterStep), hr.Nesterov.copies_kept
        (True, 2)
    """

    copies_kept: ClassVar[int] = 0
    weighted: ClassVar[bool] = True
    agrees: ClassVar[bool] = True

    @property
    def follows_rate(self) -> bool:
        """Whether the step depends on the learning rate of the workers' optimizers, see `at_rate`."""
        return False

    def at_rate(self, rate: float) -> OuterStep:
        """Returns the step for the learning rate of the workers' last round; itself where it does not follow that."""
        return self

    @abstractmethod
    def model(self, state: Sequence[Tensor], mean: Tensor) -> Tensor:
        """Returns the trained model's elements for a mean of the copies; `state` are `copies_kept` tensors like it."""

    @abstractmethod
    def step(self, state: Sequence[Tensor], mean: Tensor, copies: Sequence[Tensor], workers: int) -> None:
        """Changes what is kept, and the copies that are here: all, or this worker's. `mean` is of `workers` copies."""

    def sgd(self) -> Mapping[str, Any] | None:
        """Returns the options of a `torch.optim.SGD` that does the same, given the way of the mean as gradient.

        None if none does; servers then apply `step`, which is slower.
        """
        return None


@dataclass(frozen=True)
class MeanStep(OuterStep):
    """The mean itself (Stich, "Local SGD converges fast and communicates little", 2019, algorithm 1)."""

    def model(self, state: Sequence[Tensor], mean: Tensor) -> Tensor:
        return mean

    def step(self, state: Sequence[Tensor], mean: Tensor, copies: Sequence[Tensor], workers: int) -> None:
        for copy in copies:
            copy.copy_(mean)

    def sgd(self) -> Mapping[str, Any]:
        return {"lr": 1.0}


class AnchoredStep(OuterStep):
    """All workers go on from an anchor, the first tensor of the state, for which the mean's way is a gradient."""

    def model(self, state: Sequence[Tensor], mean: Tensor) -> Tensor:
        kept = [each.clone() for each in state]
        self.advance(kept, kept[0] - mean)
        return kept[0]

    def step(self, state: Sequence[Tensor], mean: Tensor, copies: Sequence[Tensor], workers: int) -> None:
        self.advance(state, state[0] - mean)
        for copy in copies:
            copy.copy_(state[0])

    @abstractmethod
    def advance(self, state: Sequence[Tensor], gradient: Tensor) -> None:
        """Moves the anchor, and changes the rest of the state; `gradient` is the anchor minus the mean, to be used."""


@dataclass(frozen=True)
class Nesterov(AnchoredStep):
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
        check_momentum(self.lr, self.momentum)

    def advance(self, state: Sequence[Tensor], gradient: Tensor) -> None:
        anchor, velocity = state
        velocity.mul_(self.momentum).add_(gradient)
        anchor.sub_(self.lr * gradient.add_(velocity, alpha=self.momentum))

    def sgd(self) -> Mapping[str, Any]:
        return {"lr": self.lr, "momentum": self.momentum, "nesterov": self.momentum > 0}


@dataclass(frozen=True)
class Momentum(AnchoredStep):
    """SGD with momentum (Hsu et al., "Measuring the effects of non-identical data distribution", 2019: FedAvgM).

    `SlowMo` is the same where the workers' learning rate is constant.

    Attributes:
        lr: outer learning rate.
        momentum: of the outer step.

    Raises:
        UsageError: a number is out of its range.

    Examples:
        >>> strategy = hr.ParameterAveraging(workers=2, period=2, outer=hr.Momentum(lr=1.0, momentum=0.5))
        >>> hr.fit(job, strategy).status
        'ok'
    """

    lr: float = 1.0
    momentum: float = 0.9

    copies_kept = 2

    def __post_init__(self) -> None:
        check_momentum(self.lr, self.momentum)

    def advance(self, state: Sequence[Tensor], gradient: Tensor) -> None:
        anchor, velocity = state
        velocity.mul_(self.momentum).add_(gradient)
        anchor.sub_(velocity, alpha=self.lr)

    def sgd(self) -> Mapping[str, Any]:
        return {"lr": self.lr, "momentum": self.momentum}


@dataclass(frozen=True)
class AdaptiveStep(AnchoredStep):
    """Divides the outer gradient's mean by the root of its squares (Reddi et al., "Adaptive federated optimization").

    Algorithm 2 of that paper (2021), with both moments 0 at first.

    Attributes:
        lr: outer learning rate.
        betas: how much of the first and of the second moment stays, from one synchronization to the next.
        tau: what is added to the root: the smaller, the more adaptive.

    Raises:
        UsageError: a number is out of its range.
    """

    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    tau: float = 1e-3

    copies_kept = 3

    def __post_init__(self) -> None:
        _check_number("lr", self.lr, lambda lr: 0 < lr < math.inf, "above 0")
        for place, beta in enumerate(self.betas):
            _check_number(f"betas[{place}]", beta, lambda beta: 0 <= beta < 1, "of at least 0 and below 1")
        _check_number("tau", self.tau, lambda tau: 0 < tau < math.inf, "above 0")

    def advance(self, state: Sequence[Tensor], gradient: Tensor) -> None:
        anchor, first, second = state
        first.mul_(self.betas[0]).add_(gradient, alpha=1 - self.betas[0])
        self.follow(second, gradient.square_())
        anchor.addcdiv_(first, second.sqrt().add_(self.tau), value=-self.lr)

    @abstractmethod
    def follow(self, second: Tensor, square: Tensor) -> None:
        """Brings the second moment up to date with the outer gradient's square."""


class FedAdam(AdaptiveStep):
    """The second moment is a moving average, as Adam's.

    Attributes:
        lr: outer learning rate.
        betas: how much of the first and of the second moment stays, from one synchronization to the next.
        tau: what is added to the root of the second moment: the smaller, the more adaptive.

    Raises:
        UsageError: a number is out of its range.

    Examples:
        >>> strategy = hr.ParameterAveraging(workers=2, period=2, outer=hr.FedAdam(lr=0.03))
        >>> hr.fit(job, strategy).status
        'ok'
    """

    def follow(self, second: Tensor, square: Tensor) -> None:
        second.lerp_(square, 1 - self.betas[1])


class FedYogi(AdaptiveStep):
    """The second moment moves by a share of the square, towards it: slower than Adam's where gradients shrink.

    Attributes:
        lr: outer learning rate.
        betas: how much of the first and of the second moment stays, from one synchronization to the next.
        tau: what is added to the root of the second moment: the smaller, the more adaptive.

    Raises:
        UsageError: a number is out of its range.

    Examples:
        >>> hr.FedYogi(lr=0.03).tau
        0.001
    """

    def follow(self, second: Tensor, square: Tensor) -> None:
        second.addcmul_(square, torch.sign(second - square), value=self.betas[1] - 1)


class FedAdagrad(AdaptiveStep):
    """The second moment is the sum of all squares.

    Attributes:
        lr: outer learning rate.
        betas: how much of the first and of the second moment stays; here of the first alone.
        tau: what is added to the root of the second moment: the smaller, the more adaptive.

    Raises:
        UsageError: a number is out of its range.

    Examples:
        >>> hr.FedAdagrad(lr=0.03).tau
        0.001
    """

    def follow(self, second: Tensor, square: Tensor) -> None:
        second.add_(square)


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


def check_momentum(lr: object, momentum: object) -> None:
    """Raises UsageError unless both are numbers in their ranges."""
    _check_number("lr", lr, lambda lr: 0 < lr < math.inf, "above 0")
    _check_number("momentum", momentum, lambda momentum: 0 <= momentum < 1, "of at least 0 and below 1")


def _check_number(name: str, value: object, holds: Callable[[float], bool], form: str) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not holds(value):
        raise UsageError(f"{name} of an outer step must be a number {form}, got {value!r}")


ELASTIC, MEAN, MOMENTUM, NESTEROV = Elastic(), MeanStep(), Momentum(), Nesterov()
FED_ADAGRAD, FED_ADAM, FED_YOGI = FedAdagrad(), FedAdam(), FedYogi()
OUTER_STEPS: Registry[OuterStep] = Registry(
    "headrace.outer_steps",
    {"slow_mo": "headrace.averaging.slow_mo:SLOW_MO"}
    | {
        name: f"{__name__}:{constant}"
        for name, constant in {
            "elastic": "ELASTIC",
            "fed_adagrad": "FED_ADAGRAD",
            "fed_adam": "FED_ADAM",
            "fed_yogi": "FED_YOGI",
            "mean": "MEAN",
            "momentum": "MOMENTUM",
            "nesterov": "NESTEROV",
        }.items()
    },
    base=f"{__name__}:OuterStep",
    made=True,
)
"""Outer steps by name, with their papers' numbers; other packages add theirs to the group `headrace.outer_steps`."""


def outer_step(outer: str | OuterStep | None) -> OuterStep:
    """Returns an outer step by its name or its place, with options if they are given; None is the mean.

    "nesterov", "nesterov(lr=0.5)", "mine.py:Mine(0.3)".

    Raises UnknownName if there is none of this name, and UsageError if it is something else.
    """
    if outer is None:
        return MEAN
    if isinstance(outer, OuterStep):
        return outer
    if not isinstance(outer, str):
        raise UsageError(f"outer is a name ('nesterov'), an outer step such as hr.Nesterov() or None, got {outer!r}")
    call = parse_call(outer)
    if call.values or call.options:
        return _made(outer, call)
    if call.name not in OUTER_STEPS:
        raise UnknownName("outer step", call.name, OUTER_STEPS)
    return OUTER_STEPS[call.name]


def _made(outer: str, call: Call) -> OuterStep:
    if not is_place(call.name) and call.name not in OUTER_STEPS:
        raise UnknownName("outer step", call.name, OUTER_STEPS)
    kind = placed(call.name) if is_place(call.name) else type(OUTER_STEPS[call.name])
    if not isinstance(kind, type) or not issubclass(kind, OuterStep):
        raise UsageError(f"outer={outer!r}: {call.name} is {kind!r:.100}, and must be a subclass of hr.OuterStep")
    try:
        return kind(*call.values, **call.options)
    except TypeError as error:
        raise UsageError(f"outer={outer!r} cannot be made: {error}") from error
