"""Optimizers as users write them under every strategy: as in a plain loop, or refused before the start."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import headrace as hr
from cover import in_turn
from headrace.api.exporting import trained
from headrace.data import Loader, as_pipeline
from headrace.errors import InfeasiblePlan, UsageError
from headrace.training.update import HasModes
from strategies.contract_runs import distance
from training.odd_optimizers import (
    Anchored,
    Averaging,
    Counting,
    CountingByGroup,
    Keeping,
    Limited,
    Noisy,
    OfGroup,
    OfParameter,
    Placed,
    Remembering,
    Written,
    by_dims,
    careless,
    clamp,
    double,
    hooked,
    looking_ahead,
    momentous,
    of_tensors,
    patched,
)

DOUBLE = 1e-9
STRATEGIES: dict[str, hr.Strategy] = {
    "mirrored": hr.Mirrored(2),
    "central_storage": hr.CentralStorage(2),
    "one server": hr.ParameterServer(2, staleness_bound=0),
    "two servers": hr.ParameterServer(2, servers=2, staleness_bound=0),
    "shards": hr.ParameterServer(2, servers=2, staleness_bound=0, sharding="fixed_shards:3"),
    "pipeline": hr.Pipeline(2),
    "tensor_parallel": hr.TensorParallel(2),
    "fully_sharded": hr.FullySharded(2),
    "hybrid": hr.Hybrid(hr.Mirrored(2), hr.Pipeline(2)),
    "divided mirrors": hr.Hybrid(hr.Mirrored(2), hr.TensorParallel(2)),
    "divided hybrid": hr.Hybrid(hr.FullySharded(2), hr.Pipeline(2)),
}
WHOLE = {"mirrored", "central_storage", "one server"}
"""Where one process updates all parameters."""
OF_PARAMETERS = WHOLE | {"two servers", "pipeline", "hybrid"}
"""Where one process updates all of a parameter."""
EVERYWHERE = set(STRATEGIES)

OPTIMIZERS: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "attribute": (of_tensors(partial(Written, boost=5.0)), EVERYWHERE),
    "hook": (hooked(clamp), EVERYWHERE),
    "hook without care": (hooked(careless), EVERYWHERE - {"pipeline", "hybrid", "divided hybrid"}),
    "patched step": (patched, EVERYWHERE),
    "hook that writes": (hooked(double), EVERYWHERE),
    "momentum at the start": (momentous, EVERYWHERE),
    "groups by dims": (by_dims, EVERYWHERE),
    "state of values": (Anchored, EVERYWHERE - {"one server", "two servers", "shards"}),
    "state by place": (Placed, EVERYWHERE - {"tensor_parallel", "divided mirrors"}),
    "collections": (Keeping, EVERYWHERE),
    "counts": (Counting, EVERYWHERE),
    "counts by group": (of_tensors(CountingByGroup), EVERYWHERE),
    "wrapper": (looking_ahead, EVERYWHERE),
    "modes": (of_tensors(Averaging), EVERYWHERE),
    "a parameter's length": (of_tensors(OfParameter), OF_PARAMETERS),
    "a group's length": (of_tensors(OfGroup), WHOLE),
    "a limit on all": (Limited, WHOLE - {"hybrid"}),
}


def job(optimizer: Callable[..., Any], epochs: int = 2) -> hr.Job:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    data = torch.randn(11, 4).double(), torch.randn(11, 2).double()
    return hr.Job(
        model=model, loss=nn.functional.mse_loss, optimizer=optimizer, data=data, eval_data=data, global_batch_size=4,
        epochs=epochs,
    )  # fmt: skip


def by_hand(job: hr.Job) -> tuple[dict[str, torch.Tensor], float]:
    """Trains with a plain loop; returns the model, and its loss over all data."""
    assert isinstance(job.model, nn.Module)
    assert job.loss is not None
    module = copy.deepcopy(job.model)
    optimizer = job.optimizer(list(module.named_parameters()))
    loader = Loader(as_pipeline(job.data)[0], job.seed, job.global_batch_size, (1,), 0)
    if isinstance(optimizer, HasModes):
        optimizer.train()
    rounds = loader.rounds()
    for _ in range((job.epochs or 0) * loader.rounds_per_epoch):
        inputs, target = next(rounds).batch
        optimizer.zero_grad()
        job.loss(module(inputs), target).backward()
        optimizer.step()
    if isinstance(optimizer, HasModes):
        optimizer.eval()
    inputs, target = job.data
    return module.state_dict(), float(job.loss(module(inputs), target).detach())


def fit(job: hr.Job, strategy: hr.Strategy, **options: Any) -> hr.Run:
    return hr.fit(job, strategy, device="cpu", engine=hr.ThreadEngine(), check=False, **options)


@pytest.mark.parametrize(("name", "strategy"), in_turn(sorted(OPTIMIZERS), sorted(STRATEGIES)))
def test_it_is_carried_or_refused(name: str, strategy: str) -> None:
    factory, takes = OPTIMIZERS[name]
    if strategy not in takes:
        with pytest.raises((UsageError, InfeasiblePlan), match=r"[Oo]ptimizer|looks at several parameters together"):
            fit(job(factory), STRATEGIES[strategy])
        return
    expected, loss = by_hand(job(factory))
    run = fit(job(factory), STRATEGIES[strategy])
    assert distance(run.model.state_dict(), expected) <= DOUBLE
    assert math.isclose(run.metrics["loss"], loss, rel_tol=DOUBLE)


@pytest.mark.parametrize("name", ["collections", "counts", "counts by group", "wrapper", "modes", "state of values"])
def test_it_goes_on_under_another_strategy(name: str, tmp_path: Path) -> None:
    factory, _ = OPTIMIZERS[name]
    fit(job(factory, epochs=1), hr.FullySharded(2), run_dir=tmp_path / "a")
    resumed = fit(job(factory), hr.CentralStorage(3), run_dir=tmp_path / "b", resume=tmp_path / "a")
    assert distance(resumed.model.state_dict(), by_hand(job(factory))[0]) <= DOUBLE


def test_servers_go_on_with_what_they_count(tmp_path: Path) -> None:
    strategy = STRATEGIES["shards"]
    fit(job(Counting, epochs=1), strategy, run_dir=tmp_path / "a")
    resumed = fit(job(Counting), strategy, run_dir=tmp_path / "b", resume=tmp_path / "a")
    assert distance(resumed.model.state_dict(), by_hand(job(Counting))[0]) <= DOUBLE


def test_an_exported_checkpoint_has_the_parameters_of_the_eval_mode(tmp_path: Path) -> None:
    every = hr.Checkpoints(every_steps=3)
    fit(job(Averaging), hr.CentralStorage(2), run_dir=tmp_path, checkpoints=every)
    _, module, _ = trained(job(Averaging), tmp_path, step=3)
    expected, _ = by_hand(job(Averaging, epochs=1))
    assert distance(module.state_dict(), expected) <= DOUBLE


def test_what_no_checkpoint_holds_is_refused_where_there_are_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"Remembering keeps something outside .* or use checkpoints=False"):
        fit(job(Remembering), hr.OneDevice(), run_dir=tmp_path)
    expected, _ = by_hand(job(Remembering))
    assert distance(fit(job(Remembering), hr.Mirrored(2)).model.state_dict(), expected) <= DOUBLE


def test_each_mirror_would_draw_other_numbers() -> None:
    with pytest.raises(UsageError, match=r"Noisy.step\(\) draws random numbers, of which the processes of mirrored"):
        fit(job(Noisy), hr.Mirrored(2))
    assert fit(job(Noisy), hr.Mirrored(1)).status == "ok"


@pytest.mark.parametrize(
    "strategy", [hr.ParameterAveraging(2, period=2), hr.Gossip(2), hr.Downpour(2, local="optimizer")]
)
def test_workers_with_parameters_of_their_own_have_no_modes(strategy: hr.Strategy) -> None:
    with pytest.raises(UsageError, match="has a train and an eval mode, and under"):
        fit(job(Averaging), strategy)


def test_a_table_is_not_updated_by_hooks() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(9, 2, sparse=True), nn.Linear(2, 2))

    data = torch.zeros(8, dtype=torch.int64), torch.zeros(8, 2)
    of_table = dataclasses.replace(job(hooked(clamp)), model=make, data=data, eval_data=None)
    with pytest.raises(UsageError, match="the job's SGD has hooks of its step"):
        fit(of_table, hr.Mirrored(2))
