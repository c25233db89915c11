"""A program whose rank 1 is killed, freezes, is late or calls something else in round 5; it says how that ends.

The environment says which: FAULT (a key of `FAULTS`), SECONDS that a late rank sleeps, TIMEOUT and LIMIT, which are
`timeout_s` and `collective_timeout_s`.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import headrace as hr
from engine.ranks import say
from simulated.nccl import cross_entropy

__all__ = ["FAULTS", "main"]

FAULT = Path("fault")
"""When it began, on the clocks of `now`."""


def now() -> tuple[float, float]:
    """The time, and for how long processes of this machine have waited for a processor, both in seconds."""
    pressure = Path("/proc/pressure/cpu")
    told = re.match(r"some .* total=([0-9]+)", pressure.read_text()) if pressure.exists() else None
    return time.monotonic(), int(told[1]) / 1e6 if told else 0.0


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    return x, (x.sum(1) > 0).long()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def call_another(worker: hr.Worker) -> None:
    worker._session.devices().broadcast(torch.zeros(3, device=worker.device))


def sleep_long(worker: hr.Worker) -> None:
    time.sleep(float(os.environ.get("SECONDS", "8")))


FAULTS: dict[str, Callable[[hr.Worker], None]] = {
    "killed": lambda worker: os.kill(os.getpid(), signal.SIGKILL),
    "frozen": lambda worker: os.kill(os.getpid(), signal.SIGSTOP),
    "late": sleep_long,
    "another": call_another,
    "never": lambda worker: None,
}


def train(worker: hr.Worker) -> None:
    for batch in worker.batches():
        if worker.round == 5 and worker.rank == 1:
            # Hosts tell each other of their calls some times a second, and these steps take no time.
            time.sleep(1.0)
            FAULT.write_text(" ".join(map(str, now())))
            FAULTS[os.environ["FAULT"]](worker)
        worker.step(batch)


def main() -> None:
    """Trains; says the status and the notices, or the error, and how long after the fault it came."""
    job = hr.Job(
        model=model,
        loss=cross_entropy,
        data=data(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        global_batch_size=16,
        epochs=4,
    )
    timeout_s, limit_s = float(os.environ.get("TIMEOUT", "2")), float(os.environ.get("LIMIT", "600"))
    try:
        run = hr.launch(
            *(train, job, hr.Mirrored()),
            device="fake",
            check=False,
            run_dir="run",
            encrypt=False,
            timeout_s=timeout_s,
            collective_timeout_s=limit_s,
        )
        say(ended=run.status, notices=run.summary.outcome.notices)
    except hr.errors.HeadraceError as error:
        said = {"ended": str(error)}
        if not FAULT.exists():
            say(**said)
            return
        since = [after - float(before) for before, after in zip(FAULT.read_text().split(), now(), strict=True)]
        say(**said, s=since[0], crowded_s=since[1])
