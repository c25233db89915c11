"""Does the loss have the router's loss of a mixture of experts?

It is a product of means over the tokens of a batch, so no mean of its parts. It is small beside the rest of the loss:
a comparison of losses takes the difference for rounding.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from headrace.api.probes.finding import Finding, Scope
from headrace.api.probes.parts.sample import Sample
from headrace.metrics import weigh
from headrace.training.user_code.trial import drawn, loss_of, trial


class _Seen:
    """Notes that a router's loss was computed, and multiplies it."""

    def __init__(self, factor: float) -> None:
        self.used = False
        self._factor = factor

    def loss(self, original: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
        self.used = True
        return original(logits, *args, **kwargs) * self._factor


def probe_router_loss(sample: Sample) -> Sequence[Finding]:
    """Looks whether a router's loss of transformers is part of the loss."""
    # A model of transformers has imported it.
    if "transformers" not in sys.modules:
        return ()
    # Lazily: only mixtures of experts need it.
    from headrace.expert_parallel.balance import with_router_loss

    def value(router: _Seen) -> float:
        with with_router_loss(sample.module, router):
            total, _ = weigh(loss_of(sample.module, sample.batch, sample.objective), sample.count, "the loss")
        return float(total.detach())

    with trial(sample.module):
        before, once = drawn(), _Seen(1.0)
        loss = value(once)
        # Where forward draws numbers, two losses differ by these.
        if not once.used or (drawn() == before and value(_Seen(2.0)) == loss):
            return ()
    return (
        Finding(
            "the router's loss of transformers is a function of all tokens of a batch, and each share computes that of "
            "its own tokens, so shares train with another loss than one device",
            "the loss",
            "use hr.ExpertParallel, which computes it of all workers' tokens, or output_router_logits=False in the "
            "model's config",
            Scope.SHARES,
        ),
    )
