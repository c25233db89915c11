"""What gossip promises beside the contract: who talks to whom, and what is refused."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as hr
from headrace.engine.local.engine import LocalEngine
from headrace.errors import InfeasiblePlan, RunFailed, UnknownName, UsageError
from headrace.spec.events import ParametersAveraged
from headrace.strategies.gossip import neighbours
from headrace.testing import strategies as contract
from headrace.testing.strategies import DOUBLE, MOMENTUM
from strategies import references
from strategies.contract_models import ADAM, Case, Convolutional, dense, images
from strategies.contract_runs import CLUSTER, MODEL, distance, train

THREADS = hr.ThreadEngine()
job_of = partial(contract.job_of, rounds=3, epochs=3)


@pytest.mark.parametrize("topology", ["ring", "hypercube", "random"])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
def test_weights_are_symmetric_and_sum_to_1(topology: str, world: int) -> None:
    if topology == "hypercube" and world & (world - 1):
        return
    for round_ in range(4):
        weights = torch.zeros(world, world)
        for rank in range(world):
            near = neighbours(topology, rank, world, seed=3, round_=round_)
            weights[rank, [rank, *near]] = 1 / (1 + len(near))
        assert torch.equal(weights, weights.T)
        assert torch.allclose(weights.sum(1), torch.ones(world))


def test_pairs_are_drawn_anew_in_every_round_from_the_seed() -> None:
    drawn = [[neighbours("random", rank, 6, 3, round_) for rank in range(6)] for round_ in range(20)]
    assert len({str(each) for each in drawn}) > 5
    assert drawn == [[neighbours("random", rank, 6, 3, round_) for rank in range(6)] for round_ in range(20)]
    assert drawn != [[neighbours("random", rank, 6, 4, round_) for rank in range(6)] for round_ in range(20)]


def test_one_worker_is_one_device() -> None:
    job = job_of(Case(dense, optimizer=MOMENTUM))
    assert distance(train(job, hr.Gossip(1)).tensors, train(job, hr.OneDevice()).tensors) == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"topology": "rign"}, "did you mean 'ring'"),
        ({"period": 0}, "period must be a whole number of at least 1, got 0"),
        ({"period": None}, "period must be a whole number of rounds of at least 1, got None"),
        ({"workers": 0}, "workers must be a whole number of at least 1"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((UsageError, UnknownName), match=message):
        hr.Gossip(**options)


def test_a_hypercube_has_a_power_of_two_of_workers() -> None:
    with pytest.raises(InfeasiblePlan, match="power of two of workers, got 6; use workers=4 or workers=8"):
        hr.Gossip(6, topology="hypercube").plan(MODEL, CLUSTER)


@pytest.mark.parametrize("changes", [{"ema_decay": 0.9}, {"precision": "fp16"}, {"batch_norm": "sync"}])
def test_options_that_need_equal_workers_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(changes))):
        hr.fit(job_of(Case(dense, options=hr.Options(**changes))), hr.Gossip(2), engine=THREADS)


@pytest.mark.slow
def test_processes_compute_what_the_paper_says() -> None:
    job = job_of(Case(dense, optimizer=MOMENTUM))
    with LocalEngine() as engine:
        assert distance(train(job, hr.Gossip(4), engine).tensors, references.gossip(job, 4).tensors) <= DOUBLE


def fit(job: hr.Job, folder: Path, resume: bool = False) -> hr.Run:
    return hr.fit(job, hr.Gossip(4), device="cpu", run_dir=folder, engine=THREADS, resume=resume)


def test_running_statistics_are_each_workers_own_and_saved(tmp_path: Path) -> None:
    case = Case(Convolutional, images, optimizer=ADAM)
    whole = fit(job_of(case), tmp_path / "whole").model.state_dict()
    fit(job_of(case, epochs=2), tmp_path / "parts")
    resumed = fit(job_of(case), tmp_path / "parts", resume=True).model.state_dict()
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


def test_an_event_says_how_far_neighbours_are_apart(tmp_path: Path) -> None:
    run = fit(job_of(Case(dense, optimizer=MOMENTUM)), tmp_path)
    averaged = [event for event in run.events if isinstance(event, ParametersAveraged)]
    assert len(averaged) == 9
    # All begin alike.
    assert averaged[0].drift < 1e-12
    assert all(event.drift > 1e-6 for event in averaged[1:])


def destroy(worker: hr.Worker) -> None:
    for batch in worker.batches():
        if worker.rank == 2 and worker.round == 1:
            first, *_, last = worker.model.parameters()
            first.data.fill_(math.inf)
            # A loss that does not depend on it.
            worker.backward(last.sum())
            worker.update()
        else:
            worker.step(batch)


def test_parameters_that_are_not_finite_end_the_run_with_their_rank(tmp_path: Path) -> None:
    job = job_of(Case(dense, optimizer=partial(torch.optim.SGD, lr=0.1)), eval_data=None)
    with pytest.raises(RunFailed, match="rank 2 has parameters that are not finite after 2 rounds"):
        hr.launch(destroy, job, hr.Gossip(4), device="cpu", run_dir=tmp_path, engine=THREADS)


def test_a_worker_without_examples_of_a_short_batch_has_nothing_to_clip(tmp_path: Path) -> None:
    case = Case(dense, optimizer=MOMENTUM, options=hr.Options(clip_value=0.05))
    # The last batch of an epoch has 3 examples.
    assert fit(job_of(case), tmp_path).status == "ok"
