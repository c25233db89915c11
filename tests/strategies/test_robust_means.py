"""Means that some workers cannot spoil, wherever workers' values are combined; each beside a plain loop."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.errors import InfeasiblePlan, UnknownName, UsageError
from headrace.testing.references import ReferenceResult, WorkerCopies
from strategies.contract_models import COUNTS, Case, Convolutional, dense, images
from strategies.contract_runs import CLUSTER, MODEL, distance, train
from strategies.test_parameter_averaging import MOMENTUM

MLP = Case(dense, optimizer=MOMENTUM)
THREADS = hr.ThreadEngine()


def median_of_parameters(job: hr.Job, workers: int, period: int) -> ReferenceResult:
    """All go on from the median of every element."""
    copies = WorkerCopies(job, workers)
    for done, shares in copies.rounds():
        for worker, share in enumerate(shares):
            copies.step(worker, share)
        if done % period == 0 or done == copies.last:
            for every in copies.parameters():
                middle = torch.stack([each.detach() for each in every]).quantile(0.5, dim=0)
                for each in every:
                    each.data.copy_(middle)
    return copies.outcome(copies.models[0])


def median_of_gradients(job: hr.Job, workers: int) -> ReferenceResult:
    """One model; what counts is each worker's gradient of its own mean loss."""
    copies = WorkerCopies(job, workers)
    for _, shares in copies.rounds():
        busy = [worker for worker, share in enumerate(shares) if copies.differentiate(worker, share)]
        for every in copies.parameters():
            every[0].grad = torch.stack([every[worker].grad for worker in busy]).quantile(0.5, dim=0)  # type: ignore[misc]
        copies.optimizers[0].step()
        for every in copies.parameters():
            for each in every[1:]:
                each.data.copy_(every[0].data)
    return copies.outcome(copies.models[0])


@pytest.mark.parametrize(
    "options", [{}, {"via": "server"}, {"via": "server", "servers": 2}, {"min_workers": 3}], ids=str
)
@pytest.mark.parametrize(("workers", "period"), [(3, 2), (4, 3)])
def test_workers_go_on_from_the_median(workers: int, period: int, options: dict[str, Any]) -> None:
    job = MLP.job(COUNTS["even"])
    strategy = hr.ParameterAveraging(workers, period=period, mean="trimmed_mean", **options)
    # An evaluation is where workers of servers meet, too.
    evaluated, job = job, dataclasses.replace(job, eval_data=None)
    assert distance(train(job, strategy).tensors, median_of_parameters(evaluated, workers, period).tensors) <= 1e-11
    assert distance(train(job, hr.LocalSGD(workers, period=period)).tensors, train(job, strategy).tensors) > 1e-3


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("size", ["even", "tiny"])
def test_servers_take_the_median_of_a_round(size: str, servers: int) -> None:
    job = MLP.job(COUNTS[size])
    strategy = hr.ParameterServer(3, servers=servers, staleness_bound=0, mean=hr.TrimmedMean())
    assert distance(train(job, strategy).tensors, median_of_gradients(job, 3).tensors) <= 1e-11
    assert not strategy.equals_one_device


class Weighted(hr.WorkerMean):
    """The usual mean, by its weights."""

    def mean(self, values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
        return torch.stack([each * weight for each, weight in zip(values, weights, strict=True)]).sum(0)


@pytest.mark.parametrize(
    "make", [partial(hr.ParameterServer, 3, staleness_bound=0), partial(hr.ParameterAveraging, 3, period=2)]
)
def test_the_weights_of_a_mean_add_up_to_one(make: Any) -> None:
    job = MLP.job(COUNTS["uneven"])
    assert distance(train(job, make(mean=Weighted())).tensors, train(job, make()).tensors) <= 1e-11


def lie(victim: int, loss: Any, worker: hr.Worker) -> None:
    """Worker `victim` says the opposite, a hundred times as loud."""
    for inputs, target in worker.batches():
        own = loss(worker.model(inputs), target)
        worker.backward(own * -100 if worker.rank == victim else own)
        worker.update()


@pytest.mark.parametrize(
    "make",
    [
        lambda mean: hr.Aggregated(4, by=mean),
        lambda mean: hr.ParameterServer(4, staleness_bound=0, mean=mean),
        lambda mean: hr.ParameterAveraging(4, period=1, mean=mean),
        lambda mean: hr.ParameterAveraging(4, period=1, mean=mean, via="server"),
    ],
    ids=["gradients", "servers", "parameters", "parameters on servers"],
)
def test_a_worker_that_lies_spoils_a_mean_and_no_trimmed_one(make: Any) -> None:
    inputs = torch.randn(160, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    data = (inputs, (inputs.sum(1) > 0).long())
    job = hr.Job(model=dense().double(), loss=nn.functional.cross_entropy, optimizer=partial(torch.optim.SGD, lr=0.2),
                 data=data, eval_data=data, global_batch_size=16, epochs=4)  # fmt: skip
    begin = float(nn.functional.cross_entropy(copy.deepcopy(job.model)(inputs), data[1]).detach())  # type: ignore[operator, misc]
    ends = []
    for trim in (1, 0):
        run = hr.launch(partial(lie, 2, job.loss), job, make(hr.TrimmedMean(trim)), engine=THREADS)
        ends.append(float(nn.functional.cross_entropy(run.model(inputs), data[1]).detach()))
    assert ends[0] < 0.8 * begin < begin < ends[1]


def test_running_statistics_are_the_medians_too() -> None:
    job = Case(Convolutional, images, optimizer=MOMENTUM).job(COUNTS["even"])
    run = train(job, hr.ParameterAveraging(3, period=1, mean="trimmed_mean"))
    plain = train(job, hr.ParameterAveraging(3, period=1))
    assert distance({"m": run.tensors["body.1.running_mean"]}, {"m": plain.tensors["body.1.running_mean"]}) > 0


@pytest.mark.parametrize("strategy", [hr.ParameterAveraging(3, period=2, mean="trimmed_mean")])
def test_verify_knows_them(strategy: hr.Strategy) -> None:
    assert hr.verify(MLP.job(COUNTS["uneven"]), strategy, engine=THREADS).equal


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: hr.ParameterServer(2, mean="trimmed_mean"), UsageError, "each gradient is a step by itself"),
        (lambda: hr.ParameterServer(2, staleness_bound=0, mean="top_k"), UsageError, "mean is one over workers"),
        (lambda: hr.ParameterAveraging(2, mean="trimed_mean"), UnknownName, "trimmed_mean"),
        (lambda: hr.ParameterAveraging(2, mean=3), UsageError, "mean is a name"),  # type: ignore[arg-type]
        (lambda: hr.ParameterAveraging(2, mean="trimmed_mean", codec="int8"), UsageError, "use codec='plain'"),
        (
            lambda: hr.ParameterAveraging(2, mean="trimmed_mean", via="server", wait="none", outer="elastic"),
            UsageError,
            "wait='none' has one at a time",
        ),
        (lambda: hr.TrimmedMean(-1), UsageError, "trim must be a whole number of at least 0"),
        (
            lambda: hr.ParameterAveraging(2, mean="trimmed_mean(trim=1)").plan(MODEL, CLUSTER),
            InfeasiblePlan,
            r"TrimmedMean\(trim=1\) needs 3 workers, and there are 2",
        ),
        (
            lambda: hr.Aggregated(2, by="trimmed_mean(trim=1)").plan(MODEL, CLUSTER),
            InfeasiblePlan,
            r"TrimmedMean\(trim=1\) needs 3 workers",
        ),
    ],
)
def test_what_has_no_mean_is_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
