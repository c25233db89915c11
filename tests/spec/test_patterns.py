"""Parameter groups and frozen parameters by patterns of names."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

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


def rounds(epochs: int, **changes: object) -> hr.Job:
    model = hr.frozen(split_model, "0.*", until_epoch=1)
    optimizer = functools.partial(torch.optim.SGD, lr=0.003, momentum=0.9, weight_decay=0.1)
    return replace(make_job(model=model, optimizer=optimizer, **changes), epochs=epochs, steps=None)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        hr.OneDevice(),
        hr.Pipeline(2, micro_batches=2, schedule="zb_h1"),
        hr.Hybrid(hr.Mirrored(2), hr.Pipeline(2, micro_batches=1)),
        hr.ParameterServer(2),
        hr.Downpour(2),
        hr.ParameterAveraging(2, period=2),
        hr.Gossip(2),
    ],
    ids=lambda strategy: strategy.name,
)
def test_what_is_frozen_for_a_time_stays_as_it_is_until_then(strategy: Strategy) -> None:
    first, second = [hr.fit(rounds(epochs), strategy, engine=hr.ThreadEngine()) for epochs in (1, 2)]
    start, frozen, trained = (model.state_dict() for model in (first.template, first.model, second.model))
    assert {name for name in start if torch.equal(start[name], frozen[name])} == {"0.weight", "0.bias"}
    assert not any(torch.equal(start[name], trained[name]) for name in start)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy", [hr.Pipeline(2, micro_batches=2), hr.ParameterServer(1)], ids=lambda strategy: strategy.name
)
def test_then_it_is_trained_as_on_one_device(strategy: Strategy) -> None:
    ours, theirs = (
        hr.fit(rounds(3), each, engine=hr.ThreadEngine()).model.state_dict() for each in (strategy, hr.OneDevice())
    )
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_resumed_run_unfreezes_when_the_whole_one_does(tmp_path: Path) -> None:
    fit = functools.partial(hr.fit, engine=hr.ThreadEngine())
    fit(rounds(1), run_dir=tmp_path)
    resumed, whole = fit(rounds(3), run_dir=tmp_path, resume=True), fit(rounds(3))
    assert all(
        torch.equal(tensor, whole.model.state_dict()[name]) for name, tensor in resumed.model.state_dict().items()
    )


def test_epochs_that_cannot_be_are_refused_before_the_start() -> None:
    with pytest.raises(UsageError, match="until_epoch must be a whole number of at least 1, got 0"):
        hr.frozen(split_model, "0.*", until_epoch=0)
    with pytest.raises(UsageError, match="all parameters are frozen until epoch 2, so nothing would be trained before"):
        hr.fit(make_job(model=hr.frozen(split_model, "*", until_epoch=2)))
    with pytest.raises(
        UsageError, match=r"'0\.\w+' is frozen until epoch 2, and is no dense parameter that is trained"
    ):
        hr.fit(make_job(model=hr.frozen(hr.frozen(split_model, "0.*"), "0.*", until_epoch=2)))
    lbfgs = functools.partial(torch.optim.LBFGS, line_search_fn="strong_wolfe")
    with pytest.raises(UsageError, match=r"'0\.\w+' is frozen until epoch 1, and L-BFGS compares gradients"):
        hr.fit(replace(rounds(2), optimizer=lbfgs), hr.Sandblaster(2), engine=hr.ThreadEngine())
