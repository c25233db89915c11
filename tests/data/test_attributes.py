"""A loop that changes its data set between epochs: processes that read it have the change, as torch's do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

import headrace as hr
from headrace.data.loading.attributes import state_of

INPUTS = torch.randn(9, 2, generator=torch.Generator().manual_seed(1)).double()


class Curriculum(Dataset[Any]):
    limit = 1

    def __init__(self, also: Any = None) -> None:
        self.epoch, self.also = 0, also
        self.transform = SimpleNamespace(size=[3, 3], table={"p": 0.5})
        self.masks, self.draws = np.zeros(4), np.random.default_rng(0)
        self.weights, self.samples = torch.zeros(4), [("a", 1), ("b", 2)]
        self.scale = partial(lambda factor, value: factor * value, 2.0)

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return INPUTS[index] * (1 + self.epoch), INPUTS[index].sum(0, keepdim=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: setattr(data, "epoch", 1),
        lambda data: setattr(data, "new", None),
        lambda data: setattr(data.transform, "size", [3, 4]),
        lambda data: data.transform.table.update(p=0.4),
        lambda data: data.masks.put(1, 1.0),
        lambda data: data.weights.add_(1),
        lambda data: data.draws.random(),
        lambda data: data.samples.append(("c", 3)),
        lambda data: setattr(data, "scale", partial(data.scale.func, 3.0)),
    ],
)
def test_changes_are_seen(change: Callable[[Any], object]) -> None:
    data = Curriculum()
    before = state_of(Subset(data, range(3)))
    assert before is not None
    assert before == state_of(Subset(data, range(3)))
    change(data)
    assert before != state_of(Subset(data, range(3)))


@pytest.mark.parametrize("held", [count(), [object()] * 2, [[n] for n in range(6000)], np.array([{}])])
def test_what_tells_nothing_of_what_it_holds(held: Any) -> None:
    assert state_of(Curriculum(held)) is None


@pytest.mark.parametrize(("held", "stays"), [(None, False), (count(), False), (None, True)])
def test_a_change_at_an_epochs_end_is_read_by_processes(held: Any, stays: bool) -> None:
    data = Curriculum(held)
    loader = DataLoader(data, num_workers=1, prefetch_factor=4, persistent_workers=stays)
    rounds = hr.data.Loader(hr.data.as_pipeline(loader)[0], 0, 4, (1,), 0, ordered=True).rounds(0, 9)
    for place, share in enumerate(rounds):
        # Processes that stay do not have it in torch, either.
        factor = 1 + (0 if stays else place // 3)
        assert torch.equal(share.batch[0], INPUTS[place % 3 * 4 :][:4] * factor)
        data.epoch = (place + 1) // 3


@pytest.mark.parametrize("strategy", ["one_device", hr.Mirrored(2)])
def test_a_loop_that_tells_its_data_set_the_epoch_trains_as_a_plain_one(strategy: Any) -> None:
    data = Curriculum()
    job = hr.Job(
        model=lambda: torch.nn.Linear(2, 1).double(),
        loss=torch.nn.MSELoss(),
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=DataLoader(data, 4, num_workers=1),
        global_batch_size=4,
        epochs=2,
    )
    torch.manual_seed(job.seed)
    model = torch.nn.Linear(2, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for (indices,) in hr.data.batches(hr.data.from_arrays(torch.arange(9)).shuffle().batch(4), epoch=epoch):
            inputs = INPUTS[indices]
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs * (1 + epoch)), inputs.sum(1, keepdim=True)).backward()
            optimizer.step()

    def train(worker: hr.Worker) -> None:
        for batch in worker.batches():
            worker.step(batch)
            data.epoch = (worker.round + 1) // 3

    run = hr.launch(train, job, strategy, engine=hr.ThreadEngine())
    assert torch.allclose(run.model.weight, model.weight, rtol=0, atol=1e-12)
