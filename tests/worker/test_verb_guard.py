"""Workers whose loops go different ways."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import headrace as hr
from headrace.errors import UsageError, WorkerFailed
from headrace.spec.events import Notice

X = torch.linspace(-1, 1, 96 * 4, dtype=torch.float64).view(-1, 4)


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


JOB = hr.Job(
    model=make,
    loss=nn.functional.mse_loss,
    optimizer=partial(torch.optim.SGD, lr=0.1),
    data=(X, X[:, :2]),
    eval_data=(X, X[:, :2]),
    global_batch_size=8,
    epochs=1,
)


def straying(how: str, rank: int, worker: hr.Worker) -> None:
    """The usual loop, from which one rank strays in round 5."""
    for batch in worker.batches():
        worker.step(batch)
        if worker.rank == rank and worker.round == 5:
            if how == "evaluates":
                worker.evaluate()
            else:
                worker.step(batch)
        if worker.evaluation_due:
            worker.evaluate()


SAID = {
    ("evaluates", 0): r"rank 0 is in round 5, evaluate; rank 1 is in round 6, step",
    ("evaluates", 1): r"rank 0 is in round 6, step; rank 1 is in round 5, evaluate",
    ("steps", 0): r"rank 0 is in round 5, step 2 of that round; rank 1 is in round 6, step",
    ("steps", 1): r"rank 0 is in round 6, step; rank 1 is in round 5, step 2 of that round",
}


@pytest.mark.parametrize("strategy", [hr.Mirrored(2), hr.CentralStorage(2), hr.Pipeline(2)], ids=lambda each: each.name)
@pytest.mark.parametrize(("how", "rank"), SAID)
def test_the_error_says_where_each_worker_is(strategy: Any, how: str, rank: int) -> None:
    with pytest.raises(UsageError, match=f"different ways: {SAID[how, rank]}; every worker calls the same verbs"):
        hr.launch(partial(straying, how, rank), JOB, strategy, engine=hr.ThreadEngine())


def test_processes_say_so_too() -> None:
    with pytest.raises(
        WorkerFailed, match=r"different ways: rank 0 is in round 5, evaluate; rank 1 is in round 6, step"
    ):
        hr.launch(partial(straying, "evaluates", 0), JOB, hr.Mirrored(2))


@pytest.mark.parametrize(
    "strategy",
    [hr.Mirrored(2), hr.Mirrored(3, min_workers=2), hr.ParameterServer(2), hr.ParameterAveraging(2), hr.Unconnected(2)],
    ids=lambda strategy: strategy.name,
)
def test_loops_that_go_the_same_way_are_left_alone(strategy: Any) -> None:
    run = hr.launch(partial(straying, "evaluates", -1), JOB, strategy, engine=hr.ThreadEngine())
    assert run.status == "ok"
    assert set(run.metrics) == {"loss"}


def drawing(generator: str, worker: hr.Worker) -> None:
    """Draws for the batch from round 3 on, or from a forward with dropout and loaders of its own alone."""
    own = np.random.default_rng(0)
    for inputs, target in worker.batches():
        if worker.round >= 3 and generator:
            inputs = inputs * (torch.rand(1) if generator == "torch" else float(own.random()))
        torch.save(worker.model, io.BytesIO())
        output = worker.model(inputs)
        # What looks at the model meanwhile is in no file and no copy.
        torch.save(copy.deepcopy(worker.model), io.BytesIO())
        worker.backward(nn.functional.mse_loss(nn.functional.dropout(output), target))
        worker.update()
        assert len([*DataLoader(range(3), shuffle=True)]) == 3


@pytest.mark.parametrize("generator", ["torch", "own", ""])
def test_a_loop_that_draws_for_its_batch_is_told_that_it_has_a_share(generator: str) -> None:
    run = hr.launch(partial(drawing, generator), JOB, hr.Mirrored(2))
    said = [each.text for each in run.events if isinstance(each, Notice) and "the loop draws" in each.text]
    assert len(said) == bool(generator)
    assert all(f"for its batch ({generator}): each worker draws its own, for its share alone" in each for each in said)
