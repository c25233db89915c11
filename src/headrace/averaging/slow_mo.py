"""SlowMo: an outer step with momentum in units of the workers' learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from headrace.averaging.outer_steps import AnchoredStep, OuterStep, check_momentum
from headrace.errors import UsageError


@dataclass(frozen=True)
class SlowMo(AnchoredStep):
    """Momentum over synchronizations (Wang et al., "SlowMo", 2020, algorithm 1).

    With the workers' learning rate g: u = momentum u + (anchor - mean) / g, and the anchor moves by lr g u. Where g is
    constant, it is `Momentum`; under a schedule, what was learned at a larger rate moves the model less at a smaller
    one. The paper's base optimizer that keeps its state is the usual one here, the one that averages it is
    `average_optimizer_state=True`, and the one that begins anew `reset_optimizer_state=True`.

    Attributes:
        lr: slow learning rate, alpha in the paper.
        momentum: slow momentum, beta.
        rate: g; None for that of the workers' last round.

    Raises:
        UsageError: a number is out of its range.

    Examples:
        >>> strategy = hr.ParameterAveraging(workers=2, period=2, outer=hr.SlowMo(momentum=0.5))
        >>> hr.fit(job, strategy).status
        'ok'
    """

    lr: float = 1.0
    momentum: float = 0.5
    rate: float | None = None

    copies_kept = 2

    def __post_init__(self) -> None:
        check_momentum(self.lr, self.momentum)
        if self.rate is not None and not self.rate > 0:
            raise UsageError(f"rate must be a number above 0, or None for that of the workers, got {self.rate!r}")

    @property
    def follows_rate(self) -> bool:
        return self.rate is None

    def at_rate(self, rate: float) -> OuterStep:
        # At a rate of 0 nothing has moved, and only the momentum would: by 0.
        return replace(self, rate=rate) if rate else self

    def advance(self, state: Sequence[Tensor], gradient: Tensor) -> None:
        anchor, velocity = state
        rate = self.rate or 0.0
        velocity.mul_(self.momentum)
        if rate:
            velocity.add_(gradient, alpha=1 / rate)
            anchor.sub_(velocity, alpha=self.lr * rate)


SLOW_MO = SlowMo()
