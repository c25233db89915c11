"""What one rank of a run does that a fault strikes, and what it says of its end."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import headrace as hr
from headrace.errors import HeadraceError

EXAMPLES, BATCH, FEATURES = 96, 24, 8
PAUSE_S = 0.02
"""Of a batch, so that a run lasts longer than a fault."""

EPOCHS = 120
TIMEOUT_S = 2.0
SGD = functools.partial(torch.optim.SGD, lr=float(BATCH))


class Counter(nn.Module):
    """Each example adds 1 to its own parameter, whenever a step with it is done."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(EXAMPLES, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            time.sleep(PAUSE_S)
        return -inputs @ self.count


class Slow(nn.Linear):
    """A layer that takes its time."""

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            time.sleep(PAUSE_S / 4)
        return super().forward(inputs)


def layers() -> nn.Sequential:
    """Returns a model of three stages."""
    return nn.Sequential(*(Slow(FEATURES, FEATURES) for _ in range(3)))


def mean(output: Tensor, _: Tensor) -> Tensor:
    return output.mean()


def counting() -> hr.Job:
    data = (torch.eye(EXAMPLES, dtype=torch.float64), torch.zeros(EXAMPLES))
    return hr.Job(Counter, loss=mean, optimizer=SGD, data=data, global_batch_size=BATCH, epochs=EPOCHS)


def staged() -> hr.Job:
    inputs = torch.randn(EXAMPLES, FEATURES, generator=torch.Generator().manual_seed(0))
    optimizer = functools.partial(torch.optim.SGD, lr=0.01)
    return hr.Job(layers, loss=nn.functional.mse_loss, optimizer=optimizer, data=(inputs, inputs.flip(0)),
                  global_batch_size=BATCH, epochs=EPOCHS)  # fmt: skip


STRATEGIES: dict[str, tuple[Callable[[], hr.Job], Callable[[], hr.Strategy]]] = {
    "Mirrored": (counting, functools.partial(hr.Mirrored, min_workers=1)),
    "CentralStorage": (counting, functools.partial(hr.CentralStorage, min_workers=1)),
    "ParameterAveraging": (counting, functools.partial(hr.ParameterAveraging, period=4, min_workers=1)),
    "ParameterServer": (counting, functools.partial(hr.ParameterServer, backups=1)),
    "Pipeline": (staged, functools.partial(hr.Pipeline, micro_batches=2)),
}


def off(model: nn.Module, job: hr.Job) -> float:
    """Returns how far a trained model is from what one device makes of the job."""
    if isinstance(count := getattr(model, "count", None), Tensor):
        return (count - EPOCHS).abs().max().item()
    alone = hr.fit(job, hr.OneDevice(), device="cpu", engine=hr.ThreadEngine(), check=False)
    pairs = zip(model.state_dict().values(), alone.model.state_dict().values(), strict=True)
    return max((ours - theirs).abs().max().item() for ours, theirs in pairs)


def train(strategy: str, run_dir: Path, saves: bool) -> dict[str, Any]:
    """Trains; returns how that ended: the status and how far the model is off, or the error."""
    torch.set_num_threads(1)
    make_job, make_strategy = STRATEGIES[strategy]
    checkpoints = hr.Checkpoints(every_steps=50, every_s=None) if saves else False
    try:
        run = hr.fit(
            make_job(), make_strategy(), timeout_s=TIMEOUT_S, run_dir=run_dir, checkpoints=checkpoints, check=False
        )
    except HeadraceError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    # Alone: the launcher's variables are those of the run that is over.
    rank, *_ = [os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]
    # A host of servers alone has no model.
    computes = run.plan.role(int(rank)).computes
    return {"status": run.status, "off": off(run.model, make_job()) if computes else 0.0}
