"""hr.find_learning_rate: its losses are those of a plain loop, and its limits those of a parabola."""

from __future__ import annotations

import functools
import math
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.api.trials.learning_rate import _judged
from headrace.errors import JobError, UsageError
from headrace.report.format import short

find = functools.partial(hr.find_learning_rate, device="cpu", engine=hr.ThreadEngine())
SGD = functools.partial(torch.optim.SGD, lr=0.3)


def job(**changes: Any) -> hr.Job:
    """Fits a plane, in full batches: 16 points whose mean of squares is 1 along each of 4 axes."""
    inputs = 2 * torch.eye(4, dtype=torch.float64).repeat(4, 1)
    fields: dict[str, Any] = {
        "model": plane(),
        "optimizer": SGD,
        "loss": squared_error,
        "data": (inputs, inputs @ torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=torch.float64)),
        "global_batch_size": 16,
        "epochs": 1,
    }
    return hr.Job(**{**fields, **changes})


def plane() -> nn.Module:
    model = nn.Linear(4, 1, dtype=torch.float64)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean() / 2


class WithoutRate(torch.optim.Optimizer):
    """Steps of the size 1."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"power": 1.0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for tensor in group["params"]:
                tensor.sub_(tensor.grad)


def test_the_losses_are_those_of_a_plain_loop_at_rising_rates() -> None:
    def slow_bias(named: Any) -> torch.optim.Optimizer:
        weight, bias = (tensor for _, tensor in named)
        return torch.optim.SGD([{"params": [weight]}, {"params": [bias], "lr": 0.1}], lr=0.2, momentum=0.5)

    options = hr.Options(
        warmup=3, clip_norm=0.5, schedule=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2)
    )
    tried = job(optimizer=slow_bias, options=options)
    found = find(tried, least=1e-3, most=0.1, steps=20)
    assert found.rates == pytest.approx([1e-3 * 100 ** (step / 19) for step in range(20)])

    model, (inputs, target), losses = plane(), tried.data, []
    optimizer = slow_bias(model.named_parameters())
    for rate in found.rates:
        optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = rate, rate / 2
        optimizer.zero_grad()
        loss = squared_error(model(inputs), target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    assert found.losses == pytest.approx(losses, rel=1e-12)
    assert not any(parameter.any() for parameter in tried.model.parameters())  # type: ignore[union-attr]


def test_the_suggestion_is_below_the_rate_at_which_a_parabola_diverges() -> None:
    found = find(job(), least=1e-4, most=100.0)
    # The largest curvature is 2, along all weights and the bias together, and a step may be 2 over it.
    assert found.diverged is not None
    assert found.suggested is not None
    assert 1e-3 < found.suggested < 1 < found.diverged < 20
    assert found.suggested < found.lowest < found.diverged
    assert found.rates[-1] <= found.diverged
    at = found.rates.index(found.suggested)
    slopes = [slope for slope in found.slopes if slope is not None]
    assert found.slopes[at] == min(slopes) < 0
    assert f"where the loss falls fastest, by {short(-min(slopes))} a tenfold rate" in found.why


def test_rates_that_change_nothing_give_no_suggestion() -> None:
    found = find(job(), least=1e-12, most=1e-11, steps=20)
    assert (found.suggested, found.diverged, len(found.losses)) == (None, None, 20)
    assert "there is no suggestion: from 1e-12 to 1e-11 the loss never falls" in found.why
    assert "suggested" not in str(found).replace(found.why, "")


def test_rates_that_are_all_too_large_give_no_suggestion() -> None:
    found = find(job(), least=1e3, most=1e6, steps=20)
    assert found.suggested is None
    assert found.diverged is not None
    assert "on it diverges; try smaller" in found.why


@pytest.mark.slow
def test_it_is_shown_as_a_table_and_a_picture() -> None:
    found = find(job(), least=1e-4, most=100.0)
    text = str(found)
    assert max(map(len, text.splitlines()[:-1])) <= 100
    assert [line.split()[-1] for line in text.splitlines() if line.split()[-1] in ("suggested", "lowest")] == [
        "suggested",
        "lowest",
    ]
    element = ElementTree.fromstring(found._repr_html_())
    assert len(list(element.iter("{http://www.w3.org/2000/svg}svg"))) == 1
    assert "losses that are larger than all before are left out" in found._repr_html_()
    assert len(list(element.iter("tr"))) == len(text.splitlines()) - 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": WithoutRate}, r"WithoutRate has no learning rate: its groups have .*'power'"),
        ({"optimizer": functools.partial(SGD, lr=0.0)}, r"the learning rate of SGD's first group is 0.0"),
    ],
)
def test_an_optimizer_without_a_rate_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        find(job(**changes))


def test_a_loss_that_is_nan_from_the_start_is_an_error() -> None:
    with pytest.raises(JobError, match=r"the loss of the first step is NaN or infinite, before any update"):
        find(job(data=(torch.full((16, 4), math.nan, dtype=torch.float64), torch.zeros(16, 1, dtype=torch.float64))))


@pytest.mark.parametrize("limits", [{"least": 0.0}, {"least": 1.0, "most": 0.1}, {"most": math.inf}, {"least": "1"}])
def test_limits_that_are_no_range_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="least and most must be learning rates, 0 < least < most"):
        find(job(), **limits)


def test_few_steps_are_refused() -> None:
    with pytest.raises(UsageError, match="steps must be a whole number of at least 20, got 10"):
        find(job(), steps=10)


def test_what_comes_after_a_divergence_does_not_count() -> None:
    falls = [(0.001 * 2**step, 1.0 - 0.1 * step) for step in range(8)]
    found = _judged([*falls, (0.256, 50.0), *((0.512 * 2**step, 0.0) for step in range(30))])
    assert (found.diverged, len(found.rates), found.lowest < 0.256) == (0.256, 9, True)
