"""A model whose user has put its convolutions' weights in channels-last order trains as another one does."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import headrace as hr
from strategies.contract_runs import distance, train

EXAMPLES = torch.linspace(-1, 1, 24 * 2 * 6 * 6, dtype=torch.float64).sin().view(24, 2, 6, 6), torch.arange(24) % 3
STRATEGIES = [
    hr.OneDevice(),
    hr.Mirrored(2),
    hr.MultiWorkerMirrored(2),
    hr.CentralStorage(2),
    hr.ParameterServer(2, staleness_bound=0, sharding="max_size:256B"),
    hr.Downpour(1, local="optimizer"),
    hr.Pipeline(2),
    hr.TensorParallel(2),
    hr.Hybrid(hr.Mirrored(2), hr.Pipeline(2)),
]


def job(last: bool) -> hr.Job:
    def model() -> nn.Module:
        made = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
        ).double()
        return made.to(memory_format=torch.channels_last) if last else made  # type: ignore[call-overload, no-any-return]

    return hr.Job(
        model,
        task=hr.tasks.multiclass(3),
        optimizer=functools.partial(torch.optim.Adam, lr=0.01),
        data=EXAMPLES,
        global_batch_size=12,
        epochs=2,
    )


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_channels_last_changes_no_number(strategy: hr.Strategy) -> None:
    assert distance(train(job(True), strategy).tensors, train(job(False), hr.OneDevice()).tensors) <= 1e-9
