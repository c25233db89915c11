"""What averaging through servers promises beside the contract: the numbers of the papers, and no long waits."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from belongings import belongings, left_since
from headrace.averaging.outer_steps import Elastic, MeanStep, Nesterov, OuterStep
from headrace.data import Loader, as_pipeline
from headrace.errors import InfeasiblePlan, UsageError
from headrace.report.model.events import attempts
from headrace.report.model.training import averaging_of
from headrace.spec.events import ServerStats, Stepped
from strategies.contract_models import ADAM, BATCH, COUNTS, MODELS, SGD, VARIANTS, Case, dense, verb_by_verb
from strategies.contract_options import OPTIONS
from strategies.contract_runs import CLUSTER, MODEL, carried, distance, train
from strategies.test_contract import DOUBLE, on_one_device

THROUGH = partial(hr.ParameterAveraging, via="server")
CASES = {**MODELS, **VARIANTS, **OPTIONS}
DESCENT = partial(torch.optim.SGD, lr=0.1)
ROUNDS = 9
"""Of 11 examples in batches of 4, three epochs."""


def job_of(optimizer: Any = DESCENT, count: int = COUNTS["uneven"], **options: Any) -> hr.Job:
    """Returns a job whose workers meet at its end alone."""
    job = Case(dense, options=hr.Options(**options)).job(count, optimizer=optimizer)
    return dataclasses.replace(job, eval_data=None, epochs=3)


@pytest.mark.parametrize("size", ["even", "tiny"])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_round_the_mean_of_plain_sgd_is_one_device(workers: int, size: str) -> None:
    case = Case(dense)
    outcome = train(case.job(COUNTS[size], optimizer=DESCENT), THROUGH(workers, period=1))
    assert distance(outcome.tensors, on_one_device(case, size, torch.float64, DESCENT).tensors) <= DOUBLE


@pytest.mark.parametrize(
    "name", ["lstm", "tied", "idle", "buffers", "partial", "tokens", "average-partial", "groups-cyclic", "clipped"]
)
def test_one_worker_that_is_averaged_every_round_is_one_device(name: str) -> None:
    outcome = train(CASES[name].job(COUNTS["uneven"]), THROUGH(1, period=1))
    assert distance(outcome.tensors, on_one_device(CASES[name], "uneven", torch.float64, None).tensors) <= DOUBLE


class ByHand:
    """Workers that average, in a loop of plain PyTorch.

    Args:
        job: theirs.
        workers: how many.
        outer: step.
    """

    def __init__(self, job: hr.Job, workers: int, outer: OuterStep) -> None:
        assert isinstance(job.model, nn.Module)
        self.job, self.outer, self.alpha = job, outer, 0.0
        self.modules = [copy.deepcopy(job.model) for _ in range(workers)]
        self.optimizers = [job.optimizer(list(module.named_parameters())) for module in self.modules]
        pipeline, shares = as_pipeline(job.data)[0], (1,) * workers
        self.loaders = [Loader(pipeline, job.seed, BATCH, shares, rank).rounds() for rank in range(workers)]
        self.centre = {name: nn.Parameter(each.detach().clone()) for name, each in job.model.named_parameters()}
        given: dict[str, Any] = {"lr": outer.beta} if isinstance(outer, Elastic) else dict(outer.sgd())
        self.step_out = torch.optim.SGD(self.centre.values(), **given)
        self.weights = [0.0] * workers

    def round(self) -> None:
        """Every worker makes a step."""
        assert self.job.loss is not None
        for rank, (module, optimizer) in enumerate(zip(self.modules, self.optimizers, strict=True)):
            share = next(self.loaders[rank])
            if share.examples:
                optimizer.zero_grad()
                self.job.loss(module(share.batch[0]), share.batch[1]).backward()
                optimizer.step()
                self.weights[rank] += share.examples

    @torch.no_grad()
    def meet(self, spoilt: int = -1) -> None:
        """All are brought together, but for one that is spoilt."""
        weights = [0.0 if rank == spoilt else weight for rank, weight in enumerate(self.weights)]
        if not self.outer.weighted:
            weights = [float(weight > 0) for weight in weights]
        for name, centre in self.centre.items():
            own = [module.get_parameter(name) for module in self.modules]
            ways = [centre - each for each in own]
            told = torch.stack([weight * way for weight, way in zip(weights, ways, strict=True) if weight])
            centre.grad = told.sum(0) / sum(weights)
            for each, way in zip(own, ways, strict=True):
                each += way * (self.outer.beta / len(own) if isinstance(self.outer, Elastic) else 0.0)
        self.step_out.step()
        self.weights = [0.0] * len(self.modules)
        for module in self.modules if self.outer.agrees else ():
            for name, centre in self.centre.items():
                module.get_parameter(name).copy_(centre)


OUTERS = {"mean": MeanStep(), "nesterov": Nesterov(0.5, 0.8), "elastic": Elastic(0.6)}


@pytest.mark.each_value
@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adam"])
@pytest.mark.parametrize("outer", sorted(OUTERS))
@pytest.mark.parametrize(
    ("workers", "period", "layout"), [(1, 2, {}), (1, 2, {"servers": 2, "wait": 1}), (3, 4, {"servers": 2})]
)
def test_steps_between_are_the_workers_own(
    outer: str, workers: int, period: int, layout: dict[str, Any], optimizer: Any
) -> None:
    job = job_of(optimizer)
    expected = ByHand(job, workers, OUTERS[outer])
    for done in range(1, ROUNDS + 1):
        expected.round()
        if done % period == 0 or done == ROUNDS:
            expected.meet()
    outcome = train(job, THROUGH(workers, period=period, outer=OUTERS[outer], **layout))
    assert distance(outcome.tensors, {name: each.detach() for name, each in expected.centre.items()}) <= DOUBLE


@pytest.mark.parametrize("outer", sorted(OUTERS))
def test_servers_and_all_reduce_give_the_same(outer: str) -> None:
    served, reduced = (
        train(job_of(SGD), hr.ParameterAveraging(3, period=3, outer=OUTERS[outer], via=via))
        for via in ("server", "all_reduce")
    )
    assert distance(served.tensors, reduced.tensors) <= DOUBLE


@pytest.mark.parametrize("outer", sorted(OUTERS))
@pytest.mark.parametrize(
    "given", [{"average_optimizer_state": True}, {"post_local": 6}], ids=lambda given: next(iter(given))
)
def test_what_all_reduce_can_do_servers_can(given: dict[str, Any], outer: str) -> None:
    served, reduced = (
        train(job_of(ADAM), hr.ParameterAveraging(3, period=3, outer=OUTERS[outer], via=via, **given))
        for via in ("server", "all_reduce")
    )
    assert distance(served.tensors, reduced.tensors) <= DOUBLE


@pytest.mark.parametrize("state", [False, True], ids=["own-state", "mean-state"])
@pytest.mark.parametrize("outer", ["mean", "nesterov"])
def test_the_drift_is_that_of_all_reduce(outer: str, state: bool) -> None:
    drifts = []
    for way in ({"via": "server", "servers": 2}, {"via": "all_reduce"}):
        run = hr.fit(job_of(SGD), hr.ParameterAveraging(3, 3, OUTERS[outer], state, **way), engine=hr.ThreadEngine())
        averaging = averaging_of(attempts(run.events))
        assert averaging is not None
        drifts.append([(each.step, each.rounds, each.drift) for each in averaging.meetings])
    # Over the norm of the mean, or of what the outer step makes of it.
    near = pytest.approx if outer == "mean" else functools.partial(pytest.approx, rel=0.05)
    for told, expected in zip(*drifts, strict=True):
        assert told == (*expected[:2], near(expected[2]))


def test_over_tcp_it_is_the_same() -> None:
    near, far = (train(job_of(SGD), THROUGH(2, period=2, transport=way)) for way in ("shared_memory", "tcp"))
    assert distance(far.tensors, near.tensors) <= DOUBLE


def test_a_loop_of_ones_own() -> None:
    case = Case(dense)
    outcome = train(case.job(COUNTS["tiny"]), THROUGH(1, period=1), loop=partial(verb_by_verb, case.loss))
    assert distance(outcome.tensors, on_one_device(case, "tiny", torch.float64, None).tensors) <= DOUBLE


def test_an_automatic_period_is_found_at_fences() -> None:
    wish = hr.AutoPeriod(exchange_share=0.9, drift=1e3, longest=8)
    short, long = (dataclasses.replace(wish, **each) for each in ({"drift": 1e-9}, {"exchange_share": 1e-9}))
    periods = []
    for each in (short, long):
        run = hr.fit(job_of(count=100), THROUGH(2, period=each, post_local=2), engine=hr.ThreadEngine())
        averaging = averaging_of(attempts(run.events))
        assert averaging is not None
        periods.append([(meeting.step, meeting.rounds) for meeting in averaging.meetings])
        last = averaging.meetings[-1]
    assert periods[0] == [(round_, 1) for round_ in range(1, 76)]
    # It doubles where the rounds of the run do.
    assert periods[1][:7] == [(1, 1), (2, 1), (4, 2), (8, 4), (16, 8), (24, 8), (32, 8)]
    assert re.fullmatch(r"the exchange takes .*% of the time, at most 0% is allowed", last.why)


def test_a_worker_that_does_not_wait_pulls_and_is_pulled() -> None:
    expected = ByHand(job_of(), 1, Elastic(0.6))
    for done in range(1, ROUNDS + 1):
        expected.round()
        if done % 2 == 0 or done == ROUNDS:
            expected.meet()
    outcome = train(job_of(), THROUGH(1, period=2, outer=Elastic(0.6), wait="none"))
    assert distance(outcome.tensors, {name: each.detach() for name, each in expected.centre.items()}) <= DOUBLE


@pytest.mark.parametrize("outer", [Elastic(0.6), None], ids=["elastic", "mean"])
def test_to_look_at_the_centre_moves_no_worker(outer: OuterStep | None) -> None:
    job = job_of(count=COUNTS["even"])
    looked_at = dataclasses.replace(job, eval_data=job.data)
    outcomes = [train(each, THROUGH(2, period=2, outer=outer)) for each in (job, looked_at)]
    assert distance(outcomes[0].tensors, outcomes[1].tensors) <= DOUBLE


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("wait", [2, 0.1], ids=["two", "seconds"])
def test_no_worker_waits_for_one_that_does_not_come(wait: float, servers: int) -> None:
    under_way, ahead = threading.Event(), threading.Event()

    def loop(worker: hr.Worker) -> None:
        for steps, batch in enumerate(worker.batches(), 1):
            assert worker.rank == 1 or under_way.wait(60)
            worker.step(batch)
            if worker.rank == 1 and steps == 1:
                under_way.set()
                # In the middle of its first lease, until others have come two leases further.
                assert ahead.wait(60)
            elif worker.rank == 0 and steps == 7:
                ahead.set()

    run = hr.launch(loop, job_of(count=96), THROUGH(3, period=3, wait=wait, servers=servers), engine=hr.ThreadEngine())
    assert run.status == "ok"
    late = [event.refused.get("late", 0) for event in run.events if isinstance(event, ServerStats)]
    assert max(late) >= 1, "what the last one made for the first average is of no use"
    begun, then = [event.lease for event in run.events if isinstance(event, Stepped) and event.rank == 1][:2]
    assert begun >= 0 > then, "so it does not go on with that"
    assert all(bool(each.isfinite().all()) for each in run.model.parameters())


def served(run: hr.Run) -> ServerStats:
    return [event for event in run.events if isinstance(event, ServerStats)][-1]


def test_a_deadline_that_no_step_keeps() -> None:
    with pytest.raises(UsageError, match=r"wait=1e-09 s is shorter than one step, which takes .* s: .* use wait='all'"):
        hr.fit(job_of(), THROUGH(2, period=2, wait=1e-9), engine=hr.ThreadEngine())


def spoil(worker: hr.Worker) -> None:
    """The usual loop, but that the parameters of worker 1 are no numbers at the end of its first lease."""
    for batch in worker.batches():
        if worker.rank == 1 and worker.round == 1:
            with torch.no_grad():
                next(iter(worker.model.parameters()))[0] = float("nan")
            # Of which no gradient tells.
            worker.step((batch[0] * 0, batch[1]))
        else:
            worker.step(batch)


class Blind(nn.Module):
    """Its output does not depend on one parameter, whatever that is."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.body = nn.Linear(4, 3, dtype=torch.float64)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.body(inputs)
        return output


def test_who_has_parameters_that_are_no_numbers_is_left_out_and_gets_the_average() -> None:
    job = dataclasses.replace(job_of(SGD, count=COUNTS["even"]), model=Blind())
    run = hr.launch(spoil, job, THROUGH(2, period=2), engine=hr.ThreadEngine())
    assert served(run).refused == {"not_finite": len(served(run).shards)}
    assert torch.equal(run.model.unused, torch.ones(3, dtype=torch.float64))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "codec", "share", "off"),
    [
        *[("codec", "bf16", 0.5, 2e-3), ("codec", "int8", 0.3, 2e-2)],
        *[("pull_codec", "bf16", 0.5, 1e-2), ("pull_codec", "int8", 0.3, 5e-2)],
    ],
)
def test_what_travels_may_take_fewer_bytes(option: str, codec: str, share: float, off: float) -> None:
    job = dataclasses.replace(Case(partial(nn.Linear, 4, 512)).job(64, torch.float32, DESCENT), eval_data=None)
    ways = (THROUGH(2, period=2, **{option: each}) for each in ("plain", codec))
    runs = [hr.fit(job, way, engine=hr.ThreadEngine()) for way in ways]
    field = "pushed_bytes" if option == "codec" else "pulled_bytes"
    plain, coded = (sum(getattr(shard, field) for shard in served(run).shards) for run in runs)
    assert coded <= share * plain
    assert 0 < distance(runs[1].model.state_dict(), runs[0].model.state_dict()) < off


@pytest.mark.parametrize("codec", ["plain", "int8"])
@pytest.mark.parametrize("outer", [None, Nesterov()], ids=["mean", "nesterov"])
def test_a_run_goes_on_from_its_checkpoint(outer: OuterStep | None, codec: str, tmp_path: Path) -> None:
    schedule = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.7)
    job = Case(dense, options=hr.Options(schedule=schedule, ema_decay=0.9)).job(COUNTS["uneven"], optimizer=SGD)
    fit = partial(hr.fit, strategy=THROUGH(1, period=2, outer=outer, codec=codec), engine=hr.ThreadEngine())
    whole = fit(dataclasses.replace(job, epochs=3))
    fit(dataclasses.replace(job, epochs=1), run_dir=tmp_path / "a")
    rest = fit(dataclasses.replace(job, epochs=3), run_dir=tmp_path / "b", resume=tmp_path / "a")
    # What a codec has lost so far is lost with the worker.
    assert distance(rest.model.state_dict(), whole.model.state_dict()) <= (DOUBLE if codec == "plain" else 0.02)


@pytest.mark.parametrize(
    ("workers", "optimizer", "given", "equal"),
    [
        (1, ADAM, {}, True),
        (2, DESCENT, {}, True),
        (2, DESCENT, {"outer": "nesterov"}, True),
        (2, ADAM, {"average_optimizer_state": True}, True),
        (2, ADAM, {}, False),
    ],
    ids=["one", "sgd", "nesterov", "mean-state", "own-state"],
)
def test_only_workers_with_states_of_their_own_resume_with_another(
    workers: int, optimizer: Any, given: dict[str, Any], equal: bool, tmp_path: Path
) -> None:
    saves = hr.Checkpoints(every_steps=4, every_s=None, keep=9)
    fit = partial(
        hr.fit, job_of(optimizer), THROUGH(workers, period=3, **given), engine=hr.ThreadEngine(), checkpoints=saves
    )
    # It saves in the same rounds, because a save is a sync point.
    whole = fit(run_dir=tmp_path / "a")
    rest = fit(run_dir=tmp_path / "b", resume=tmp_path / "a" / "checkpoints" / "step-00000004")
    assert (distance(rest.model.state_dict(), whole.model.state_dict()) <= DOUBLE) == equal


@pytest.mark.parametrize("ways", [("server", "all_reduce"), ("all_reduce", "server")], ids="-".join)
def test_an_outer_momentum_goes_on_the_other_way(ways: tuple[str, str], tmp_path: Path) -> None:
    first, then = (hr.ParameterAveraging(3, period=3, outer=Nesterov(), via=way) for way in ways)
    fit = partial(hr.fit, engine=hr.ThreadEngine())
    fit(dataclasses.replace(job_of(), epochs=1), strategy=first, run_dir=tmp_path / "a")
    rest = fit(job_of(), strategy=then, run_dir=tmp_path / "b", resume=tmp_path / "a")
    assert distance(rest.model.state_dict(), fit(job_of(), strategy=first).model.state_dict()) <= DOUBLE


def test_a_checkpoint_goes_on_under_another_strategy(tmp_path: Path) -> None:
    job = Case(dense).job(COUNTS["uneven"], optimizer=SGD)
    fit = partial(hr.fit, engine=hr.ThreadEngine())
    fit(dataclasses.replace(job, epochs=1), strategy=THROUGH(1, period=1), run_dir=tmp_path / "a")
    rest = fit(
        dataclasses.replace(job, epochs=3), strategy=hr.OneDevice(), run_dir=tmp_path / "b", resume=tmp_path / "a"
    )
    whole = fit(dataclasses.replace(job, epochs=3), strategy=hr.OneDevice())
    assert distance(rest.model.state_dict(), whole.model.state_dict()) <= DOUBLE


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"wait": 0}, "wait=0 workers make no average; wait for 1 or more, or for 'all'"),
        ({"wait": -1.0}, "wait=-1.0 must be a number of seconds above 0"),
        ({"wait": float("nan")}, "wait=nan must be a number of seconds above 0"),
        ({"wait": True}, "wait must be 'all', 'none', a number of workers (3) or of seconds (3.0), got True"),
        ({"wait": "some"}, "wait must be 'all', 'none'"),
        ({"wait": "none"}, "would put each worker's parameters in place of the average"),
        (
            {"wait": "none", "outer": "elastic", "average_optimizer_state": True},
            "makes no average of the optimizers'",
        ),
        ({"period": 70_000}, "period must be at most 65,535 through servers, got 70,000"),
        ({"servers": 0}, "servers must be a whole number of at least 1, got 0"),
        ({"backups": 2}, "backups=2 asks for 2 backups of 1 server"),
        ({"transport": "carrier pigeons"}, "transport"),
        ({"codec": "gold"}, "codec"),
    ],
)
def test_what_cannot_be_meant_is_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=re.escape(reason)):
        THROUGH(**given)


def test_a_plan_survives_json() -> None:
    strategy = THROUGH(2, outer=Nesterov(), codec="int8", wait=1.5)
    plan = strategy.plan(MODEL, CLUSTER)
    assert carried(plan) == plan
    assert dict(plan.options) == dataclasses.asdict(strategy)
    assert (plan.workers, plan.servers, plan.shares) == (2, (2,), (1, 1))


@pytest.mark.slow
def test_threads_leave_nothing_behind() -> None:
    before = belongings()
    train(job_of(), THROUGH(2, period=2))
    assert left_since(before) == {}


def test_an_average_of_more_workers_than_there_are() -> None:
    with pytest.raises(
        InfeasiblePlan, match="wait=3 waits for 3 workers and there are 2; use wait='all', or at most wait=2"
    ):
        THROUGH(2, wait=3).plan(MODEL, CLUSTER)
