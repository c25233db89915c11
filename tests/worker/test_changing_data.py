"""A loop that changes a variable between epochs which its data read: what reads ahead has the change, too."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import headrace as hr

INPUTS = torch.randn(9, 2, generator=torch.Generator().manual_seed(1)).double()
EPOCH = 0


class Curriculum(Dataset[Any]):
    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return INPUTS[index] * (1 + 3 * EPOCH), INPUTS[index].sum(0, keepdim=True)


def scaled(example: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    (inputs,) = example
    return inputs * (1 + 3 * EPOCH), inputs.sum(0, keepdim=True)


def tell(epoch: int) -> None:
    global EPOCH
    EPOCH = epoch


LOADER = DataLoader(Curriculum(), 4, num_workers=1)
STAYS = DataLoader(Curriculum(), 4, num_workers=1, persistent_workers=True)
AHEAD = hr.data.from_arrays(INPUTS).map(scaled, parallel="threads").shuffle()


@pytest.mark.parametrize(
    ("data", "strategy", "factor"),
    [
        (LOADER, "one_device", 3),
        (LOADER, hr.Mirrored(2), 3),
        # Processes that stay do not have it in torch, either.
        (STAYS, "one_device", 0),
        (AHEAD, "one_device", 3),
    ],
    ids=["processes", "several workers", "processes that stay", "threads"],
)
def test_a_loop_that_tells_its_data_the_epoch_trains_as_a_plain_one(data: Any, strategy: Any, factor: int) -> None:
    tell(0)
    job = hr.Job(
        model=lambda: torch.nn.Linear(2, 1).double(),
        loss=torch.nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=data,
        global_batch_size=4,
        epochs=3,
    )
    torch.manual_seed(job.seed)
    model = torch.nn.Linear(2, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(job.epochs):
        for (indices,) in hr.data.batches(hr.data.from_arrays(torch.arange(9)).shuffle().batch(4), epoch=epoch):
            inputs = INPUTS[indices]
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs * (1 + factor * epoch)), inputs.sum(1, keepdim=True)).backward()
            optimizer.step()

    def train(worker: hr.Worker) -> None:
        for batch in worker.batches():
            worker.step(batch)
            if worker.epoch_ended:
                tell((worker.round + 1) // 3)

    run = hr.launch(train, job, strategy, engine=hr.ThreadEngine())
    assert torch.allclose(run.model.weight, model.weight, rtol=0, atol=1e-12)
