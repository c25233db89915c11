"""What is another loss, or has other gradients, on shares of a batch than on all of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from api.probes.test_probes import CLASSES, found, linear, of, rows
from headrace.api.probes.finding import Scope


def flooded(output: Tensor, target: Tensor) -> Tensor:
    """Never less than 0.5 (Ishida et al., 2020): a mean over examples until it is as small."""
    return (F.cross_entropy(output, target) - 0.5).abs() + 0.5


def alike() -> nn.Module:
    """Has the same loss for all examples at first."""
    layer = linear()
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


@pytest.mark.parametrize(
    ("model", "loss"),
    [(linear, flooded), (alike, partial(F.cross_entropy, weight=torch.tensor([1.0, 1.0, 9.0, 1.0])))],
    ids=["a limit", "weights"],
)
def test_a_loss_that_is_another_one_later_is_found(model: Any, loss: Callable[..., Any]) -> None:
    assert "the loss" in of(found(model, loss=loss), Scope.SHARES)


def test_examples_are_taken_from_all_over_the_data() -> None:
    inputs, _ = rows(8, count=64)
    of_one_kind_at_first = torch.arange(64) // 16
    loss = partial(F.cross_entropy, weight=torch.tensor([1.0, 1.0, 9.0, 1.0]))
    assert of(found(linear, loss=loss, data=(inputs, of_one_kind_at_first)), Scope.SHARES) == ["the loss"]


class Backward(nn.Module):
    """Changes the gradients of values in the middle."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.change = nn.Linear(8, 8), nn.Linear(8, CLASSES), change

    def forward(self, x: Tensor) -> Tensor:
        values = self.first(x)
        if values.requires_grad:
            values.register_hook(self.change)
        out: Tensor = self.second(values.tanh())
        return out


@pytest.mark.parametrize(
    ("change", "scope"),
    [
        (lambda gradient: -0.3 * gradient, None),
        (lambda gradient: gradient / gradient.norm(), Scope.SHARES),
        (lambda gradient: gradient.clamp(-0.01, 0.01), Scope.OWN_MEANS),
    ],
    ids=["reversed", "normalised", "clamped"],
)
def test_a_backward_pass_that_is_another_one_on_shares_is_found(change: Any, scope: Scope | None) -> None:
    backward = [each.scope for each in found(partial(Backward, change)) if each.where.startswith("the backward pass")]
    assert backward == ([] if scope is None else [scope])


def test_what_looks_at_the_batch_in_train_mode_alone_is_found() -> None:
    class Centred(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - x.mean(0) if self.training else x)

    (finding,) = (each for each in found(lambda: Centred(8, CLASSES)) if each.scope is Scope.SHARES)
    assert "in train mode that of a batch, or its gradient, is not the weighted mean" in finding.what
