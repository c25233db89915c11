"""Hooks of parameters and modules: copied with a model, sent to workers, called with whole gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.engine.shipping import pack, unpack
from headrace.hooks import called, hooked_parameters, hooks_of, silenced
from headrace.modules import copy_module


class Model(nn.Module):
    """Has one hook of each sort, all of which refer to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.gain = nn.Parameter(torch.ones(2))
        self.factor = 2.0
        weight = self.layer.weight
        weight.register_hook(lambda gradient: gradient * self.factor)
        weight.register_hook(lambda gradient, own=weight: gradient + own.detach())
        weight.register_post_accumulate_grad_hook(self.halve)
        self.layer.register_forward_hook(lambda module, inputs, output: output * self.gain)

    def halve(self, parameter: Tensor) -> None:
        assert parameter is self.layer.weight
        assert parameter.grad is not None
        parameter.grad.div_(self.factor)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    model.zero_grad()
    torch.manual_seed(0)
    model(torch.randn(4, 3)).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def sent(model: nn.Module) -> nn.Module:
    received: nn.Module = unpack(*pack(model))
    return received


@pytest.mark.parametrize(
    "carry", [copy_module, sent, lambda model: copy_module(sent(model))], ids=["copied", "sent", "sent and copied"]
)
def test_a_copy_has_the_hooks_and_they_are_its_own(carry: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    model = Model()
    copied: Any = carry(model)
    torch.testing.assert_close(gradients(copied), gradients(model), rtol=0, atol=0)
    before = gradients(model)
    with torch.no_grad():
        copied.layer.weight.zero_()
        copied.gain.mul_(3)
    copied.factor = 5.0
    torch.testing.assert_close(gradients(model), before, rtol=0, atol=0)
    assert not torch.equal(gradients(copied)["gain"], before["gain"])  # type: ignore[arg-type]
    gradient, weight = torch.ones(2, 3), copied.layer.weight
    for hook in hooks_of(weight)[0]:
        gradient = hook(gradient)
    assert torch.equal(gradient, torch.full((2, 3), 5.0)), "the hooks look at the copy's factor and weight"


def test_what_hooks_share_they_share_in_a_copy() -> None:
    model = nn.Linear(1, 1)
    calls = 0

    def count(gradient: Tensor, _own: nn.Module = model) -> None:
        nonlocal calls
        calls += 1

    def read(gradient: Tensor, _own: nn.Module = model) -> Tensor:
        return gradient * calls

    model.weight.register_hook(count)
    model.weight.register_hook(read)
    copied = copy_module(model)
    for times in (1, 2):
        assert torch.autograd.grad(copied.weight.sum(), copied.weight)[0] == times


def test_a_frozen_parameter_keeps_hooks_and_attributes() -> None:
    model = nn.Linear(1, 1)
    model.weight.register_hook(lambda gradient: gradient * 3)
    model.weight.no_decay = True  # type: ignore[attr-defined]
    model.weight.requires_grad_(False)
    copied = copy_module(model)
    assert hooked_parameters(dict(copied.named_parameters())) == ["weight"]
    assert copied.weight.no_decay
    assert not copied.weight.requires_grad
    assert not hasattr(copied.bias, "no_decay")


def test_hooks_are_silent_and_then_called_with_the_whole() -> None:
    model = Model()
    parameters = list(model.parameters())
    expected = gradients(model)
    model.zero_grad()
    with silenced(parameters):
        assert not hooked_parameters(dict(model.named_parameters()))
        for _ in range(2):
            torch.manual_seed(0)
            (model(torch.randn(4, 3)).square().mean() / 4).backward()
    called(parameters, 0.5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name] * 0.5)  # type: ignore[operator]


def test_a_hook_may_take_a_gradient_away() -> None:
    model = nn.Linear(1, 1)

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    model.weight.register_post_accumulate_grad_hook(drop)
    model(torch.ones(1, 1)).sum().backward()
    model.weight.grad = torch.ones(1, 1)
    called(list(model.parameters()), 1.0)
    assert model.weight.grad is None
    assert model.bias.grad is not None


def test_a_partial_and_a_method_of_another_object_stay_as_they_are() -> None:
    seen: list[Tensor] = []
    model = nn.Linear(1, 1)
    model.weight.register_hook(seen.append)
    model.weight.register_hook(functools.partial(torch.mul, 2.0))
    copied = copy_module(model)
    assert torch.autograd.grad(copied.weight.sum(), copied.weight)[0] == 2
    assert len(seen) == 1
