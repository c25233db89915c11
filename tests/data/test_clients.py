"""Examples by client: who sees what, and FedAvg on them against a plain loop."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import headrace as hr
from headrace.data import Loader
from headrace.errors import DataError, UsageError

COUNT, CLIENTS, ROUNDS = 103, 7, 3
IDS = np.arange(COUNT) * 5 % CLIENTS
INPUTS = torch.randn(COUNT, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
TARGETS = (INPUTS.sum(1) > 0).long()


def shares_of(workers: int, rounds: int, start: int = 0, batch: int = 10) -> list[list[list[int]]]:
    """Returns the places of every worker's examples of each round."""
    data = hr.data.by_client(hr.data.from_arrays(torch.arange(COUNT)), IDS, ROUNDS)
    loaders = [Loader(data, 3, batch, (1,) * workers, rank) for rank in range(workers)]
    every = [[share.batch[0].tolist() for share in loader.rounds(start, rounds)] for loader in loaders]
    return [list(of) for of in zip(*every, strict=True)]


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_each_worker_has_one_client_for_a_stretch(workers: int) -> None:
    rounds = shares_of(workers, 40)
    seen = set()
    for begin in range(0, 40, ROUNDS):
        clients = [{int(IDS[place]) for each in rounds[begin : begin + ROUNDS] for place in each[worker]}
                   for worker in range(workers)]  # fmt: skip
        assert all(len(each) == 1 for each in clients)
        drawn = [next(iter(each)) for each in clients]
        assert len(set(drawn)) == workers
        seen |= set(drawn)
        # A client's examples come once before one comes again.
        for worker in range(workers):
            places = [place for each in rounds[begin : begin + ROUNDS] for place in each[worker]]
            most = max(places.count(place) for place in places)
            assert most <= -(-len(places) // int((drawn[worker] == IDS).sum()))
    assert seen == set(range(CLIENTS)), "all take part sometimes"


@pytest.mark.parametrize("start", [1, 5, 11, 23])
def test_a_run_that_begins_in_the_middle_sees_the_same(start: int) -> None:
    assert shares_of(2, 30)[start:] == shares_of(2, 30, start)


def test_another_seed_draws_others() -> None:
    data = hr.data.by_client(hr.data.from_arrays(torch.arange(COUNT)), IDS, ROUNDS)
    one, other = ([s.batch[0].tolist() for s in Loader(data, seed, 10, (1,), 0).rounds(0, 9)] for seed in (1, 2))
    assert one != other


def test_evaluations_visit_each_example_once() -> None:
    data = hr.data.by_client(hr.data.from_arrays(torch.arange(COUNT)), IDS, ROUNDS)
    swept = [place for share in Loader(data, 3, 10, (1,), 0, ordered=True).sweep() for place in share.batch[0].tolist()]
    assert swept == list(range(COUNT))


def job(**changes: Any) -> hr.Job:
    data = hr.data.by_client(hr.data.from_arrays(INPUTS, TARGETS), IDS, ROUNDS)
    torch.manual_seed(0)
    plain = hr.Job(
        model=nn.Linear(4, 2, dtype=torch.float64),
        loss=nn.functional.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=data,
        global_batch_size=12,
        epochs=2,
    )
    return dataclasses.replace(plain, **changes)


def federated(job: hr.Job, workers: int, proximal: float) -> dict[str, torch.Tensor]:
    """McMahan et al., 2017, algorithm 1, with FedProx's term: clients start from the server's model."""
    assert isinstance(job.model, nn.Module)
    assert job.loss is not None
    server = {name: each.clone() for name, each in job.model.state_dict().items()}
    pipeline: Any = job.data
    loaders = [Loader(pipeline, job.seed, 12, (1,) * workers, rank) for rank in range(workers)]
    count = (job.epochs or 0) * loaders[0].rounds_per_epoch
    rounds = list(zip(*(loader.rounds(0, count) for loader in loaders), strict=True))
    for begin in range(0, count, ROUNDS):
        models, weights = [], []
        for worker in range(workers):
            model = nn.Linear(4, 2, dtype=torch.float64)
            model.load_state_dict(server)
            optimizer, weight = torch.optim.SGD(model.parameters(), lr=0.1), 0
            for shares in rounds[begin : begin + ROUNDS]:
                inputs, target = shares[worker].batch
                near = sum((each - server[name]).square().sum() for name, each in model.named_parameters())
                optimizer.zero_grad()
                (job.loss(model(inputs), target) + proximal / 2 * near).backward()
                optimizer.step()
                weight += len(inputs)
            models.append(model.state_dict())
            weights.append(weight)
        server = {
            name: sum(weight * model[name] for weight, model in zip(weights, models, strict=True)) / sum(weights)
            for name in server
        }
    return server


@pytest.mark.parametrize("proximal", [0.0, 0.5])
@pytest.mark.parametrize("workers", [1, 3])
def test_averages_of_clients_are_fed_avg_and_fed_prox(workers: int, proximal: float) -> None:
    strategy = hr.ParameterAveraging(workers, period=ROUNDS, proximal=proximal, reset_optimizer_state=True)
    run = hr.fit(job(), strategy, engine=hr.ThreadEngine())
    for name, each in federated(job(), workers, proximal).items():
        assert float((run.model.state_dict()[name] - each).abs().max()) <= 1e-12


def test_verify_knows_clients() -> None:
    assert hr.verify(job(), hr.ParameterAveraging(3, period=ROUNDS), engine=hr.ThreadEngine()).equal


def test_skewed_clients_have_few_classes() -> None:
    labels = np.arange(10_000) % 10
    few, many = (hr.data.dirichlet(labels, clients=20, alpha=alpha) for alpha in (0.05, 1000.0))

    def largest(ids: np.ndarray[Any, Any]) -> float:
        """Returns the share of the most frequent class, of the mean client."""
        counts = [np.bincount(labels[ids == client], minlength=10) for client in np.unique(ids)]
        return float(np.mean([each.max() / each.sum() for each in counts]))

    assert largest(few) > 0.5 > 0.15 > largest(many)
    assert (hr.data.dirichlet(labels, 20, 0.05) == few).all()
    assert not (hr.data.dirichlet(labels, 20, 0.05, seed=1) == few).all()


@pytest.mark.parametrize(
    ("ids", "rounds", "message"),
    [
        (IDS[:-1], 3, r"ids must be \(103,\) whole numbers, one an example, got \(102,\) int64"),
        (IDS.astype(float), 3, r"got \(103,\) float64"),
        (IDS, 0, "rounds must be"),
    ],
)
def test_wrong_clients_are_refused(ids: Any, rounds: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hr.data.by_client(hr.data.from_arrays(INPUTS), ids, rounds)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (hr.data.local, "leave out hr.data.local"),
        (lambda clients: clients.batch(8, lengths=[1] * COUNT), "sorts the examples of all clients by length"),
        (lambda clients: hr.data.mix(clients), r"part 1 of 1 has clients, .*hr.data.by_client\(hr.data.mix"),
        (lambda clients: hr.data.interleave(clients), r"part 1 of 1 has clients"),
    ],
)
def test_what_would_lose_the_clients_is_refused_in_any_order(make: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(hr.data.by_client(hr.data.from_arrays(INPUTS), IDS, ROUNDS))


@pytest.mark.parametrize(
    "function",
    [
        lambda data: hr.data.by_client(data, IDS, ROUNDS),
        hr.data.local,
        hr.data.mix,
        hr.data.interleave,
        lambda data: next(hr.data.batches(data)),
    ],
)
def test_what_takes_pipelines_names_the_function_that_makes_one(function: Any) -> None:
    with pytest.raises(UsageError, match=r"takes a pipeline, got tuple; write hr.data.from_arrays\(\*arrays\)"):
        function((INPUTS, TARGETS))


@pytest.mark.parametrize("alpha", [0, -1, float("inf"), True, "1"])
def test_a_wrong_alpha_is_refused(alpha: Any) -> None:
    with pytest.raises(UsageError, match="alpha must be a number above 0"):
        hr.data.dirichlet(TARGETS, 3, alpha)


def test_labels_of_another_shape_are_refused() -> None:
    with pytest.raises(DataError, match=r"labels must be \(examples,\)"):
        hr.data.dirichlet(INPUTS, 3, 1.0)


def test_more_workers_than_clients_are_refused() -> None:
    with pytest.raises(UsageError, match="9 workers train on one client each, and 7 clients have examples"):
        hr.fit(job(), hr.LocalSGD(9, period=ROUNDS), engine=hr.ThreadEngine())


def test_leased_parts_are_no_clients() -> None:
    with pytest.raises(UsageError, match="parts of rounds are leased to workers as they come"):
        hr.fit(job(), hr.Downpour(2), engine=hr.ThreadEngine())
