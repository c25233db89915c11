"""What cannot be meant, or cannot be had, when parameters are averaged: a clear error before the first exchange."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.averaging.outer_steps import outer_step
from headrace.errors import NonFiniteLoss, UnknownName, UsageError
from headrace.strategies import resolve
from strategies.contract_models import COUNTS, Case, dense
from strategies.test_parameter_averaging import PLAIN, THREADS, fit


def test_a_codec_without_a_wire_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="codec='int8' saves bytes on a wire"):
        fit(Case(dense).job(8), hr.LocalSGD(2, codec="int8"), run_dir=tmp_path)


def test_a_loss_that_is_none_ends_the_run_with_its_rank(tmp_path: Path) -> None:
    case = Case(dense, lambda count: (torch.full((count, 4), float("nan")), torch.arange(count) % 3))
    with pytest.raises(NonFiniteLoss, match=r"rank [01]"):
        fit(case.job(COUNTS["even"]), hr.LocalSGD(2), run_dir=tmp_path)


def leave_out_a_step(worker: hr.Worker) -> None:
    for batch in worker.batches():
        if worker.round != 1:
            worker.step(batch)


def test_every_worker_steps_every_batch(tmp_path: Path) -> None:
    job = Case(dense).job(COUNTS["uneven"])
    with pytest.raises(UsageError, match="every worker steps every batch"):
        hr.launch(leave_out_a_step, job, hr.LocalSGD(2), device="cpu", run_dir=tmp_path, engine=THREADS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"period": 0}, "period must be a whole number of rounds of at least 1, 'auto' or hr.AutoPeriod"),
        ({"period": "often"}, "got 'often'"),
        ({"workers": 0}, "workers must be a whole number of at least 1"),
        ({"outer": "nestrov"}, "did you mean 'nesterov'"),
        ({"outer": 3}, "outer is a name"),
        ({"outer": "nestrov(lr=1)"}, "did you mean 'nesterov'"),
        ({"outer": "nesterov(rate=1)"}, "cannot be made: .* unexpected keyword argument 'rate'"),
        ({"outer": "nesterov(lr=0)"}, "lr of an outer step must be a number"),
        ({"outer": "torch.nn:Linear(2, 2)"}, "must be a subclass of hr.OuterStep"),
        ({"post_local": -1}, "post_local must be a whole number of rounds of at least 0"),
        ({"average_optimizer_state": 1}, "must be True or False"),
        ({"codec": "int"}, "did you mean 'int8'"),
        ({"pull_codec": "int"}, "did you mean 'int8'"),
        ({"pull_codec": "int8"}, "via='all_reduce' has none; use codec, or via='server'"),
        ({"via": "all-reduce"}, "did you mean 'all_reduce'"),
        ({"wait": 3}, "via='all_reduce' needs every worker"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hr.ParameterAveraging(**options)


@pytest.mark.parametrize("place", ["nesterov", "headrace.averaging.outer_steps:Nesterov"])
def test_an_outer_step_has_options_where_it_is_a_text(place: str) -> None:
    assert outer_step(f"{place}(0.5, momentum=0.3)") == hr.Nesterov(0.5, momentum=0.3)


@pytest.mark.parametrize("wrong", [{"lr": 0}, {"lr": "much"}, {"momentum": 1.0}])
def test_an_outer_step_that_cannot_be_meant_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="of an outer step must be a number"):
        hr.Nesterov(**wrong)


@pytest.mark.parametrize("wrong", [{"lr": 0}, {"betas": (0.9, 1.0)}, {"tau": 0}])
def test_adaptive_outer_steps_that_cannot_be_meant_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(wrong))}.* of an outer step must be a number"):
        hr.FedAdam(**wrong)


@pytest.mark.parametrize("beta", [0, 1.5, True])
def test_an_elastic_force_that_does_not_come_to_rest_is_refused(beta: float) -> None:
    with pytest.raises(UsageError, match="beta of an outer step must be a number above 0 and of at most 1"):
        hr.Elastic(beta)


@pytest.mark.parametrize("options", [{"on_nonfinite": "rollback"}, {"batch_norm": "sync"}, {"ema_decay": 0.9}])
def test_options_that_need_all_workers_in_every_round_are_refused(options: dict[str, Any], tmp_path: Path) -> None:
    job = Case(dense, options=hr.Options(**options)).job(8)
    with pytest.raises(UsageError, match=next(iter(options))):
        fit(job, hr.LocalSGD(2), run_dir=tmp_path)


class Remembering(torch.optim.SGD):
    """Keeps what it was asked to do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("history", []).append(0.0)
        return super().step(closure)


@pytest.mark.parametrize("via", ["all_reduce", "server"])
def test_state_without_a_mean_is_refused_before_the_first_step(via: str, tmp_path: Path) -> None:
    job = Case(dense, optimizer=partial(Remembering, lr=0.1)).job(8)
    with pytest.raises(UsageError, match=r"Remembering keeps a list as 'history' of '0\.weight', which has no mean"):
        fit(job, hr.ParameterAveraging(2, average_optimizer_state=True, via=via), run_dir=tmp_path)


class Growing(nn.Module):
    """Every one that is built is larger than the one before."""

    built = 0

    def __init__(self) -> None:
        super().__init__()
        Growing.built += 1
        self.body = nn.Linear(4, 3)
        self.rest = nn.Parameter(torch.zeros(Growing.built))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.body(x) + self.rest.sum()
        return output


@pytest.mark.parametrize("via", ["all_reduce", "server"])
def test_workers_whose_models_differ_are_refused(via: str, tmp_path: Path) -> None:
    x, y = torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64)
    job = hr.Job(model=Growing, loss=nn.functional.cross_entropy, optimizer=PLAIN, data=(x, y), global_batch_size=4,
                 epochs=1)  # fmt: skip
    with pytest.raises(UsageError, match=r"rank \d has rest of shape"):
        fit(job, hr.LocalSGD(2, via=via), run_dir=tmp_path)


def test_short_names_are_the_strategy_with_other_numbers() -> None:
    assert resolve("diloco", 4) == hr.DiLoCo(4) == hr.ParameterAveraging(4, 100, hr.Nesterov(0.7, 0.9))
    assert resolve("easgd(period=4)") == hr.ParameterAveraging(period=4, outer=hr.Elastic(0.9))
    assert resolve("local_sgd") == hr.LocalSGD() == hr.ParameterAveraging()
    assert resolve("parameter_averaging(period='auto')", 2) == hr.ParameterAveraging(2, "auto")
    with pytest.raises(UnknownName, match="did you mean 'diloco'"):
        resolve("dilco")
