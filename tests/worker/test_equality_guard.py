"""Workers whose copies of the model drift apart."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import headrace as hr
from headrace.errors import RanksDiffer, WorkerFailed

ROUNDS = 12
X = torch.linspace(-1, 1, ROUNDS * 8 * 4).view(-1, 4)


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def job(**changes: Any) -> hr.Job:
    fixed: dict[str, Any] = {
        "model": make,
        "loss": nn.functional.mse_loss,
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "data": (X, X[:, :2]),
        "global_batch_size": 8,
        "epochs": 1,
    }
    return hr.Job(**{**fixed, **changes})


def drifting(after: int, name: str, worker: hr.Worker) -> None:
    """The usual loop; on rank 1 one element moves by its last bit after some rounds."""
    for batch in worker.batches():
        worker.step(batch)
        if worker.rank == 1 and worker.round + 1 == after:
            element = worker.model.get_parameter(name).data.view(-1)[3:4]
            element.copy_(torch.nextafter(element, torch.full_like(element, 9.0)))
        if worker.evaluation_due:
            worker.evaluate()


@pytest.mark.parametrize(("after", "noticed"), [(1, 2), (2, 4), (5, ROUNDS), (ROUNDS, ROUNDS)])
def test_a_mirror_that_drifts_by_a_last_bit_ends_the_run(after: int, noticed: int) -> None:
    """At the latest where the run would return its model."""
    said = rf"after {noticed} rounds rank 1 has another '0\.weight' \(\d+ of 32 elements, by up to .*\).* than rank 0"
    with pytest.raises(RanksDiffer, match=said) as error:
        hr.launch(
            partial(drifting, after, "0.weight"), job(), hr.Mirrored(2), engine=hr.ThreadEngine(), checkpoints=False
        )
    assert (error.value.rank, error.value.name, error.value.done) == (1, "0.weight", noticed)


@pytest.mark.parametrize("every", [{"eval_data": (X, X[:, :2]), "options": hr.Options(eval_every=6)}, {}])
def test_evaluations_and_saves_compare(every: dict[str, Any]) -> None:
    checkpoints = False if every else hr.Checkpoints(every_steps=6)
    with pytest.raises(RanksDiffer, match="after 6 rounds rank 1"):
        hr.launch(
            partial(drifting, 5, "2.weight"),
            job(**every),
            hr.Mirrored(2),
            engine=hr.ThreadEngine(),
            checkpoints=checkpoints,
        )


def test_processes_say_the_same() -> None:
    with pytest.raises(WorkerFailed, match=r"RanksDiffer: after 2 rounds rank 1 has another '2\.weight'"):
        hr.launch(partial(drifting, 1, "2.weight"), job(), hr.Mirrored(2))


class Drawing(nn.Module):
    """Has a buffer of its own on each worker, which forward draws."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("last", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last.copy_(torch.rand(2))
        return self.layer(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "strategy",
    [
        hr.Mirrored(2),
        hr.CentralStorage(2),
        hr.ParameterServer(2),
        hr.Downpour(2),
        hr.ParameterAveraging(2),
        hr.Unconnected(2),
        hr.FullySharded(2),
    ],
    ids=lambda strategy: strategy.name,
)
@pytest.mark.parametrize("make", [make, Drawing])
def test_what_is_no_mirror_by_definition_is_left_alone(strategy: Any, make: Any) -> None:
    """Statistics of BatchNorm and buffers are each worker's own between evaluations, parameters where they average."""
    data = (X, X[:, :2])
    run = hr.fit(
        job(model=make, data=data, eval_data=data, options=hr.Options(eval_every=5)), strategy, engine=hr.ThreadEngine()
    )
    assert run.status == "ok"
    assert re.fullmatch(r"0\.\d+", f"{run.metrics['loss']:.4f}")
