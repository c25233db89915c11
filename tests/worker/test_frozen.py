"""What a loop has frozen, or put into eval mode, stays so where another process goes on: after a resume, or a loss."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.errors import WorkerFailed
from headrace.strategies import Strategy

GENERATOR = torch.Generator().manual_seed(0)
DATA = torch.randn(64, 6, dtype=torch.float64, generator=GENERATOR), torch.randint(3, (64,), generator=GENERATOR)
JOB = hr.Job(
    lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 3)).double(),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    DATA,
    task=hr.tasks.multiclass(3),
    global_batch_size=16,
    steps=12,
)


def freeze_once(worker: hr.Worker) -> None:
    for batch in worker.batches():
        if worker.round == 3:
            worker.model[0].requires_grad_(False)  # type: ignore[operator,index]
        if worker.round == 0:
            worker.model[1].eval()  # type: ignore[operator,index]
        worker.step(batch)


def lose_rank_1(worker: hr.Worker) -> None:
    for batch in worker.batches():
        if worker.round == 3:
            worker.model[0].requires_grad_(False)  # type: ignore[operator,index]
        if worker.round == 7 and worker.rank == 1 and not Path("lost").exists():
            Path("lost").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        worker.step(batch)


def trained(model: nn.Module) -> Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


@pytest.mark.parametrize(
    "strategy", [hr.Mirrored(2), hr.CentralStorage(2), hr.Pipeline(2)], ids=lambda strategy: strategy.name
)
def test_a_resumed_run_freezes_what_was_frozen(strategy: Strategy, tmp_path: Path) -> None:
    threads, saving = hr.ThreadEngine(), hr.Checkpoints(every_steps=6, keep=2)
    once = hr.launch(freeze_once, JOB, strategy, engine=threads, run_dir=tmp_path / "run", checkpoints=saving)
    shutil.rmtree(tmp_path / "run/checkpoints/step-00000012")
    again = hr.launch(freeze_once, JOB, strategy, engine=threads, run_dir=tmp_path / "run", resume=True)
    assert torch.equal(trained(once.model), trained(again.model))
    alone = hr.launch(freeze_once, JOB, hr.OneDevice(), engine=threads)
    assert torch.allclose(trained(again.model), trained(alone.model), rtol=0, atol=1e-12)


def test_a_worker_in_a_lost_ones_place_does_not_train_what_was_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorkerFailed, match=r"it does not know that user code has frozen parameters"):
        # The other one trains alone until there is a process in its place.
        hr.launch(lose_rank_1, replace(JOB, steps=10**5), hr.ParameterServer(workers=2, staleness_bound=0))
