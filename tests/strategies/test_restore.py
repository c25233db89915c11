"""A checkpoint of a model that several devices hold together is resumed by any strategy, and back."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from strategies.contract_runs import distance

PIECES = {
    "fully_sharded": hr.FullySharded(3),
    "sharded replicas": hr.Hybrid(hr.Mirrored(2), hr.FullySharded(2)),
    "sharded stages": hr.Hybrid(hr.FullySharded(2), hr.Pipeline(2, 2, partition=[2, 3])),
    "pipeline": hr.Pipeline(2, 4, partition=[2, 3]),
    "tensor_parallel": hr.TensorParallel(2),
}
WHOLE = {
    "mirrored": hr.Mirrored(2),
    "parameter_server": hr.ParameterServer(workers=2, servers=1, staleness_bound=0),
    # Each worker has a momentum of its own, and a resumed run does not have their mean.
    "parameter_averaging": hr.ParameterAveraging(2, period=1),
}


def model() -> nn.Module:
    layers = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    return nn.Sequential(*layers).double()


def trained(strategy: hr.Strategy, epochs: int, run_dir: Path | None = None, resume: bool = False) -> hr.Run:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 6, generator=generator, dtype=torch.float64)
    job = hr.Job(
        model=model,
        task=hr.tasks.multiclass(3),
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        data=(x, x[:, :3].argmax(1)),
        global_batch_size=8,
        epochs=epochs,
    )
    return hr.fit(job, strategy, device="cpu", run_dir=run_dir, engine=hr.ThreadEngine(), resume=resume)


def there_and_back(pieces: hr.Strategy, whole: hr.Strategy, run_dir: Path) -> dict[str, Tensor]:
    trained(pieces, 1, run_dir)
    trained(whole, 2, run_dir, resume=True)
    run = trained(pieces, 3, run_dir, resume=True)
    assert run.summary.steps == 9
    return run.model.state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("whole", WHOLE)
@pytest.mark.parametrize("pieces", PIECES)
def test_there_and_back_is_what_it_is_for_one_device(pieces: str, whole: str, tmp_path: Path) -> None:
    ours = there_and_back(PIECES[pieces], WHOLE[whole], tmp_path / "pieces")
    assert distance(ours, there_and_back(hr.OneDevice(), WHOLE[whole], tmp_path / "one")) <= 1e-9
    uninterrupted = trained(hr.OneDevice(), 3).model.state_dict()
    assert (distance(ours, uninterrupted) <= 1e-9) == (whole != "parameter_averaging")
