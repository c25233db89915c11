"""An optimizer that there is, made again for other parameters of the same names."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from headrace.api.adapters.optimizer import optimizer_like
from headrace.errors import UsageError


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def grouped(net: nn.Module) -> torch.optim.Optimizer:
    plain = [each for each in net.parameters() if each.ndim < 2]
    rest = [each for each in net.parameters() if each.ndim > 1]
    return torch.optim.AdamW([{"params": rest, "weight_decay": 0.1}, {"params": plain, "lr": 0.5}], lr=0.01)


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[torch.Tensor]:
    for step in range(steps):
        optimizer.zero_grad()
        net(torch.full((2, 4), 0.1 * step + 0.2).double()).square().sum().backward()
        optimizer.step()
    return [each.detach().clone() for each in net.parameters()]


def test_it_trains_as_the_one_that_there_is() -> None:
    net, other = model(), model()
    made = optimizer_like(grouped(net), net)(list(other.named_parameters()))
    assert [len(group["params"]) for group in made.param_groups] == [2, 2]
    for one, two in zip(trained(net, grouped(net)), trained(other, made), strict=True):
        assert torch.equal(one, two)


def test_the_order_of_what_is_given_counts_for_nothing() -> None:
    net = model()
    like = optimizer_like(grouped(net), net)
    made = like(list(reversed(list(net.named_parameters()))))
    assert [tuple(each.shape) for each in made.param_groups[0]["params"]] == [(3, 4), (2, 3)]


def test_a_part_of_the_model_gets_its_groups_alone() -> None:
    net = model()
    made = optimizer_like(grouped(net), net)([("2.bias", net[2].bias)])
    assert [(group["lr"], len(group["params"])) for group in made.param_groups] == [(0.5, 1)]


def test_state_attributes_and_hooks_come_along() -> None:
    class Counting(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1, momentum=0.9)
            self.limit = [7]

    net = model()
    first = Counting(net.parameters())
    steps: list[int] = []
    first.register_step_pre_hook(lambda *_: steps.append(1))
    trained(net, first, 2)
    other = copy.deepcopy(net)
    made = optimizer_like(first, net)(list(other.named_parameters()))
    assert isinstance(made, Counting)
    assert made.limit == [7]
    assert made.limit is not first.limit
    assert len(made.state) == 4
    for one, two in zip(trained(net, first), trained(other, made), strict=True):
        assert torch.equal(one, two)
    assert len(steps) == 8


def test_the_optimizer_stays_as_it_is() -> None:
    net = model()
    optimizer = grouped(net)
    optimizer_like(optimizer, net)(list(model().named_parameters()))
    assert [id(each) for group in optimizer.param_groups for each in group["params"]] == [
        *(id(each) for each in net.parameters() if each.ndim > 1),
        *(id(each) for each in net.parameters() if each.ndim < 2),
    ]


def test_parameters_of_another_model_are_refused() -> None:
    with pytest.raises(UsageError, match=r"parameter 0 of the AdamW, of shape \(3, 4\), is none of the Sequential"):
        optimizer_like(grouped(model()), model())
    net = model()
    with pytest.raises(UsageError, match=r"was given other\.weight"):
        optimizer_like(grouped(net), net)([("other.weight", net[0].weight)])
