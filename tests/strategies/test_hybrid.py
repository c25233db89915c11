"""Replicas that several workers hold: what they do together is what as many workers do that hold whole models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.engine.base import Engine
from headrace.engine.local.engine import LocalEngine
from headrace.errors import InfeasiblePlan, UsageError
from headrace.spec.cluster import Cluster, Host
from headrace.strategies import resolve
from strategies.contract_models import MODELS, SGD, VARIANTS, Case
from strategies.contract_runs import GIGABYTE, MODEL, distance, train

CASES = {**MODELS, **VARIANTS}
PIPELINE = hr.Pipeline(stages=2, micro_batches=2)
SLICES = hr.TensorParallel(devices=2)
INNER = {"pipeline": PIPELINE, "slices": SLICES}
EVERY_INNER = {**INNER, "divided": hr.FullySharded(workers=2)}
TWO = hr.Mirrored(workers=2)
AVERAGING = hr.ParameterAveraging(workers=2, period=3)


@pytest.fixture(scope="module")
def processes() -> Iterator[LocalEngine]:
    with LocalEngine() as engine:
        yield engine


@pytest.mark.parametrize("model", ["mlp", "tied", "idle", "clipped", "mean-clipped", "muon"])
@pytest.mark.parametrize("count", [11, 9])
def test_replicas_that_are_pipelines_are_one_device(model: str, count: int) -> None:
    job = CASES[model].job(count)
    outcome, one = train(job, hr.Hybrid(TWO, PIPELINE)), train(job, hr.OneDevice())
    assert distance(outcome.tensors, one.tensors) <= 1e-9
    assert outcome.losses == pytest.approx(one.losses, rel=1e-9)
    assert outcome.metrics == pytest.approx(one.metrics, rel=1e-9)


@pytest.mark.parametrize("outer", [hr.Mirrored, hr.FullySharded])
def test_stages_with_large_layers_are_one_device(outer: Callable[[int], hr.Strategy]) -> None:
    # Of so many elements the gradient is written to its place, where a worker has the whole model.
    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 512), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512), nn.Linear(512, 3))

    job = dataclasses.replace(Case(wide).job(8), optimizer=partial(torch.optim.SGD, lr=0.01), epochs=1)
    strategy = hr.Hybrid(outer(2), hr.Pipeline(2, 2, partition=[2, 3]))
    assert distance(train(job, strategy).tensors, train(job, hr.OneDevice()).tensors) <= 1e-9


@pytest.mark.parametrize("model", ["mlp", "idle", "clipped", "mean-clipped", "tokens"])
@pytest.mark.parametrize("count", [11, 9])
def test_replicas_that_are_divided_are_one_device(model: str, count: int) -> None:
    job = CASES[model].job(count)
    outcome, one = train(job, hr.Hybrid(TWO, hr.FullySharded(2))), train(job, hr.OneDevice())
    assert distance(outcome.tensors, one.tensors) <= 1e-9
    assert outcome.losses == pytest.approx(one.losses, rel=1e-9)
    assert outcome.metrics == pytest.approx(one.metrics, rel=1e-9)


def test_replicas_are_one_device_where_what_they_do_with_each_other_is() -> None:
    served = [hr.ParameterServer(2, staleness_bound=bound) for bound in (0, 1, None)]
    outer = [TWO, hr.FullySharded(2), AVERAGING, *served, hr.Downpour(2)]
    every = [hr.Hybrid(one, PIPELINE).equals_one_device for one in outer]
    assert every == [True, True, False, True, False, False, False]


@pytest.mark.slow
@pytest.mark.parametrize("inner", sorted(INNER))
@pytest.mark.parametrize("model", ["mlp", "tokens"])
def test_replicas_that_average_are_workers_that_average(inner: str, model: str) -> None:
    job = CASES[model].job(9)
    outcome, whole = train(job, hr.Hybrid(AVERAGING, INNER[inner])), train(job, AVERAGING)
    assert distance(outcome.tensors, whole.tensors) <= 1e-9
    assert outcome.losses == pytest.approx(whole.losses, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("inner", sorted(EVERY_INNER))
def test_four_processes_are_one_device_and_two_runs_alike(processes: Engine, inner: str) -> None:
    job = CASES["clipped"].job(11)
    one, again = (train(job, hr.Hybrid(TWO, EVERY_INNER[inner]), processes) for _ in range(2))
    assert distance(one.tensors, train(job, hr.OneDevice()).tensors) <= 1e-9
    assert distance(one.tensors, again.tensors) == 0
    assert one.losses == again.losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"), [(hr.Hybrid(TWO, PIPELINE), hr.Hybrid(TWO, SLICES)), (SLICES, hr.Hybrid(TWO, PIPELINE))]
)
def test_checkpoints_go_from_stages_to_slices_and_back(first: hr.Strategy, then: hr.Strategy, tmp_path: Path) -> None:
    job = CASES["clipped"].job(8)
    halfway = hr.Job(**{**vars(job), "epochs": None, "steps": 3})
    hr.fit(halfway, first, device="cpu", run_dir=tmp_path, engine=hr.ThreadEngine())
    run = hr.fit(job, then, device="cpu", run_dir=tmp_path, engine=hr.ThreadEngine(), resume=True)
    assert distance(run.model.state_dict(), train(job, hr.OneDevice()).tensors) <= 1e-9


def test_norms_of_what_several_stages_hold_are_refused() -> None:
    job = CASES["tied"].job(8)
    clipped = hr.Job(**{**vars(job), "options": hr.Options(clip_norm=1.0)})
    with pytest.raises(UsageError, match=r"several stages of a replica hold .embedding\.weight."):
        train(clipped, hr.Hybrid(TWO, PIPELINE))


def test_a_launcher_s_processes_are_shared_out() -> None:
    def plan(ranks: int, strategy: hr.Hybrid) -> tuple[list[tuple[int, int]], int]:
        plan = strategy.plan(MODEL, Cluster((Host("here", 4, GIGABYTE),), ranks=ranks))
        return [(role.data_rank, role.stage) for role in plan.roles], plan.replicas

    two_of_three = [(data_rank, stage) for data_rank in (0, 1) for stage in (0, 1, 2)]
    assert plan(6, hr.Hybrid(TWO, hr.TensorParallel())) == (two_of_three, 2)
    assert plan(6, hr.Hybrid(hr.Mirrored(), hr.TensorParallel(devices=3))) == (two_of_three, 2)
    with pytest.raises(InfeasiblePlan, match=r"\? replicas on 4 devices each, and the launcher started 6"):
        plan(6, hr.Hybrid(hr.Mirrored(), hr.TensorParallel(devices=4)))


def test_a_hybrid_has_a_name_on_the_command_line() -> None:
    text = "hybrid(outer='mirrored(workers=2)', inner='tensor_parallel(devices=2)')"
    assert resolve(text) == hr.Hybrid(TWO, SLICES)


class FrozenStage(nn.Module):
    """The last of two stages has no parameter to train."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.act = nn.Tanh()
        self.last = nn.Linear(6, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.first(x)))


@pytest.mark.parametrize("server", [False, True])
def test_a_stage_without_a_parameter_to_train(server: bool) -> None:
    draw = torch.Generator().manual_seed(1)
    rows = [(torch.randn(4, generator=draw), torch.tensor(index % 3)) for index in range(9)]
    job = hr.Job(
        model=FrozenStage,
        loss=nn.functional.cross_entropy,
        data=rows,
        global_batch_size=4,
        epochs=2,
        optimizer=SGD,
        options=hr.Options(clip_value=0.05) if server else hr.Options(clip_norm=0.5),
    )
    outer = hr.ParameterServer(workers=2, servers=1, staleness_bound=0) if server else TWO
    staged = train(job, hr.Hybrid(outer, hr.Pipeline(2, 2, partition=[2, 1])))
    assert distance(staged.tensors, train(job, outer if server else hr.OneDevice()).tensors) <= 1e-6
