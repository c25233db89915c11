"""Parameter groups and frozen parameters by patterns of names."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

import headrace as hr
from engine.victims import make_job, split_model
from headrace.errors import UnknownName, UsageError
from headrace.strategies import Strategy

GROUPS = {"*.bias": {"lr": 0.01}, "0.*": {"momentum": 0.0}}
OPTIMIZER = hr.grouped(torch.optim.SGD, GROUPS, lr=0.1, momentum=0.9)


def by_hand(named):  # type: ignore[no-untyped-def]
    parameters = dict(named)
    groups = [
        {"params": [parameters[name] for name in names if name in parameters], **options}
        for names, options in (
            (["1.weight"], {}),
            (["0.bias", "1.bias"], GROUPS["*.bias"]),
            (["0.weight"], GROUPS["0.*"]),
        )
    ]
    return torch.optim.SGD([group for group in groups if group["params"]], lr=0.1, momentum=0.9)


def test_the_first_pattern_that_fits_counts() -> None:
    made = OPTIMIZER(split_model().named_parameters())
    assert [(group["param_names"], group["lr"], group["momentum"]) for group in made.param_groups] == [
        (["1.weight"], 0.1, 0.9),
        (["0.bias", "1.bias"], 0.01, 0.9),
        (["0.weight"], 0.1, 0.0),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [hr.OneDevice(), hr.Mirrored(2), hr.CentralStorage(2), hr.ParameterServer(1), hr.Pipeline(2, micro_batches=2)],
    ids=lambda strategy: strategy.name,
)
def test_they_are_those_made_by_hand_and_frozen_ones_stay(strategy: Strategy) -> None:
    job = make_job(model=hr.frozen(split_model, "0.weight"), optimizer=OPTIMIZER)
    runs = [
        hr.fit(each, strategy, engine=hr.ThreadEngine(), check=False) for each in (job, replace(job, optimizer=by_hand))
    ]
    ours, theirs = (run.model.state_dict() for run in runs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    before = runs[0].template.state_dict()
    assert [name for name in ours if torch.equal(ours[name], before[name])] == ["0.weight"]


def test_a_model_is_copied_before_it_is_frozen() -> None:
    model = nn.Linear(2, 1)
    made = hr.frozen(model, "bias")()
    assert [each.requires_grad for each in (*made.parameters(), *model.parameters())] == [True, False, True, True]


def test_a_pattern_that_fits_nothing_is_refused_before_the_start() -> None:
    with pytest.raises(UnknownName, match=r"no parameter that fits 'weigth' of the model; did you mean 'weight'\?"):
        hr.fit(make_job(optimizer=hr.grouped(torch.optim.SGD, {"weigth": {"lr": 1.0}}, lr=0.1)))
    with pytest.raises(UnknownName, match=r"no parameter that fits 'conv\.\*' of the model; known: bias, weight"):
        hr.fit(make_job(model=hr.frozen(functools.partial(nn.Linear, 4, 1), "conv.*")))
    with pytest.raises(UsageError, match=r"the group 'bias' needs options by name, as .* got 0.01"):
        hr.grouped(torch.optim.SGD, {"bias": 0.01})  # type: ignore[dict-item]
