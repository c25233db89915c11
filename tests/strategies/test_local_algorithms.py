"""SlowMo, FedProx and adaptive outer steps where their contract does not look: schedules, servers, verify, refusals."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.averaging.outer_steps import OUTER_STEPS, outer_step
from headrace.errors import UsageError
from strategies import references
from strategies.contract_models import COUNTS, MODELS, Case, dense
from strategies.contract_options import SCHEDULES
from strategies.contract_runs import distance, train
from strategies.test_parameter_averaging import MOMENTUM, PLAIN

THREADS = hr.ThreadEngine()
MLP = Case(dense, optimizer=MOMENTUM)


def type_name(value: object) -> str:
    return type(value).__name__


@pytest.mark.parametrize("schedule", ["exponential", "step"])
@pytest.mark.parametrize(("workers", "period"), [(2, 3), (3, 2)])
def test_slow_momentum_is_in_units_of_the_learning_rate(schedule: str, workers: int, period: int) -> None:
    case = Case(dense, optimizer=MOMENTUM, options=hr.Options(schedule=SCHEDULES[schedule]))
    job = case.job(COUNTS["uneven"])
    outcome = train(job, hr.LocalSGD(workers, period=period, outer=hr.SlowMo(0.9, 0.6)))
    assert distance(outcome.tensors, references.slow_mo(job, workers, period).tensors) <= 1e-12
    # Heavy-ball momentum is another one where the rate changes.
    plain = train(job, hr.LocalSGD(workers, period=period, outer=hr.Momentum(0.9, 0.6)))
    assert distance(outcome.tensors, plain.tensors) > 1e-4


def test_an_outer_step_has_options_in_its_text() -> None:
    assert outer_step("slow_mo(momentum=0.6)") == hr.SlowMo(momentum=0.6)
    assert outer_step("fed_adam(0.05)") == hr.FedAdam(0.05)


def test_slow_momentum_with_a_constant_rate_is_heavy_ball_momentum() -> None:
    job = MLP.job(COUNTS["uneven"])
    slow, plain = (train(job, hr.LocalSGD(2, period=3, outer=o)) for o in (hr.SlowMo(0.9, 0.6), hr.Momentum(0.9, 0.6)))
    assert distance(slow.tensors, plain.tensors) <= 1e-12


def test_slow_momentum_resumes_in_the_middle_of_a_schedule(tmp_path: Path) -> None:
    case = Case(dense, optimizer=MOMENTUM, options=hr.Options(schedule=SCHEDULES["exponential"]))
    strategy = hr.LocalSGD(2, period=3, outer=hr.SlowMo())
    jobs = [dataclasses.replace(case.job(COUNTS["even"]), epochs=epochs) for epochs in (3, 6)]
    hr.fit(jobs[0], strategy, engine=THREADS, run_dir=tmp_path / "parts")
    resumed = hr.fit(jobs[1], strategy, engine=THREADS, run_dir=tmp_path / "parts", resume=True)
    whole = hr.fit(jobs[1], strategy, engine=THREADS, run_dir=tmp_path / "whole")
    assert distance(resumed.model.state_dict(), whole.model.state_dict()) == 0


@pytest.mark.parametrize("name", ["mlp", "idle", "partial", "tied", "lstm"])
def test_a_proximal_term_is_autograds(name: str) -> None:
    job = (MLP if name == "mlp" else MODELS[name]).job(COUNTS["uneven"])
    outcome = train(job, hr.ParameterAveraging(2, period=3, proximal=0.3))
    assert distance(outcome.tensors, references.local_sgd(job, 2, 3, proximal=0.3).tensors) <= 1e-12
    assert distance(outcome.tensors, references.local_sgd(job, 2, 3).tensors) > 1e-5


def test_a_proximal_term_is_clipped_with_the_loss() -> None:
    job = Case(dense, optimizer=MOMENTUM, options=hr.Options(clip_norm=0.05)).job(COUNTS["uneven"])
    assert hr.verify(job, hr.ParameterAveraging(2, period=3, proximal=2.0), engine=THREADS, double=True).equal


class Halfway(hr.OuterStep):
    """Workers go on from half of the way, and the center lags behind them: none of torch's optimizers."""

    copies_kept = 1

    def model(self, state: Any, mean: Tensor) -> Tensor:
        return (state[0] + mean) / 2

    def step(self, state: Any, mean: Tensor, copies: Any, workers: int) -> None:
        half = (state[0] + mean) / 2
        for copy in copies:
            copy.copy_(half)
        state[0].lerp_(mean, 0.1)


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("outer", [hr.FedAdam(0.05), hr.FedYogi(0.05), hr.FedAdagrad(0.05), Halfway()], ids=type_name)
def test_servers_make_outer_steps_that_are_no_sgd(outer: hr.OuterStep, servers: int) -> None:
    job = MLP.job(COUNTS["uneven"])
    one = train(job, hr.ParameterAveraging(2, period=3, outer=outer))
    other = train(job, hr.ParameterAveraging(2, period=3, outer=outer, via="server", servers=servers))
    assert distance(one.tensors, other.tensors) <= 1e-11


@pytest.mark.parametrize("ways", ["server server", "server all_reduce", "all_reduce server"])
@pytest.mark.parametrize("outer", [hr.FedAdam(0.05), Halfway()], ids=type_name)
def test_the_state_of_an_outer_step_goes_on_either_way(ways: str, outer: hr.OuterStep, tmp_path: Path) -> None:
    def fit(epochs: int, via: str, where: str, resume: bool = False) -> nn.Module:
        strategy = hr.ParameterAveraging(2, period=1, outer=outer, via=via)
        # Whose optimizer has no state, of which a checkpoint of servers has one worker's.
        job = dataclasses.replace(Case(dense, optimizer=PLAIN).job(COUNTS["even"]), epochs=epochs)
        return hr.fit(job, strategy, engine=THREADS, run_dir=tmp_path / where, resume=resume).model

    first, second = ways.split()
    fit(2, first, "parts")
    resumed, whole = fit(4, second, "parts", resume=True), fit(4, first, "whole")
    assert distance(resumed.state_dict(), whole.state_dict()) <= 1e-11


@pytest.mark.parametrize(
    "strategy",
    [
        hr.ParameterAveraging(2, period=2, outer=hr.SlowMo()),
        hr.ParameterAveraging(2, period=2, proximal=0.5),
        hr.ParameterAveraging(2, period=2, proximal=0.5, outer=hr.FedAdam(), reset_optimizer_state=True),
    ],
)
def test_verify_knows_them(strategy: hr.Strategy) -> None:
    job = Case(dense, optimizer=MOMENTUM, options=hr.Options(schedule=SCHEDULES["exponential"])).job(COUNTS["uneven"])
    assert hr.verify(job, strategy, engine=THREADS).equal


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"average_optimizer_state": True, "reset_optimizer_state": True}, "go on with the mean of their state, and"),
        ({"proximal": -1}, "proximal must be a number of at least 0, got -1"),
        ({"proximal": True}, "proximal must be a number of at least 0, got True"),
        ({"proximal": 0.1, "outer": "elastic"}, "each begins from its own parameters"),
        ({"proximal": 0.1, "via": "server"}, "proximal=0.1 is of workers that average by all-reduce"),
        ({"reset_optimizer_state": True, "via": "server"}, "reset_optimizer_state=True is of workers that average"),
        ({"outer": "slow_mo(speed=3)"}, r"outer='slow_mo\(speed=3\)' cannot be made: .*speed"),
        ({"outer": "slow_mo", "via": "server"}, "follows the workers' learning rate, and servers have none"),
    ],
)
def test_what_cannot_be_had_together_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hr.ParameterAveraging(2, **options)


def test_every_outer_step_is_made_by_its_name() -> None:
    assert [name for name in OUTER_STEPS if not isinstance(OUTER_STEPS[name], hr.OuterStep)] == []


def test_groups_of_several_rates_are_refused_by_slow_momentum() -> None:
    def groups(named: Any) -> torch.optim.Optimizer:
        (_, weight), *others = list(named)
        return torch.optim.SGD([{"params": [weight], "lr": 0.2}, {"params": [each for _, each in others]}], lr=0.1)

    job = MLP.job(COUNTS["uneven"], optimizer=groups)
    with pytest.raises(UsageError, match=r"their optimizer has 0.1, 0.2; give the step a rate of its own"):
        hr.fit(job, hr.LocalSGD(2, period=2, outer="slow_mo"), engine=THREADS)
    assert hr.fit(job, hr.LocalSGD(2, period=2, outer=hr.SlowMo(rate=0.1)), engine=THREADS).status == "ok"


def test_a_frozen_parameter_has_no_proximal_term() -> None:
    job = MLP.job(COUNTS["even"])
    model = hr.frozen(job.model, "0.*", until_epoch=1)
    with pytest.raises(UsageError, match=r"proximal=0.3 gives every parameter a gradient, and '0.weight' is frozen"):
        hr.fit(hr.Job(model=model, data=job.data, loss=job.loss, optimizer=partial(torch.optim.SGD, lr=0.1), epochs=1,
                      global_batch_size=4), hr.ParameterAveraging(2, proximal=0.3), engine=THREADS)  # fmt: skip
