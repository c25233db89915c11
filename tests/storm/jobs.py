"""A small job under every strategy that runs on one host, as a command: python tests/storm/jobs.py STRATEGY RUN_DIR."""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import headrace as hr
from headrace.errors import HeadraceError
from storm.hosts import HOSTS

__all__ = ["ACCOUNTED", "BATCH", "ELASTIC", "EXACT", "OVER_HOSTS", "ROUNDS", "STRATEGIES", "TIMEOUT_S"]

TIMEOUT_S = 3.0
BATCH, ROUNDS, FEATURES = 12, 64, 8
EXAMPLES = 4 * BATCH
STEP_S = 0.01

STRATEGIES: dict[str, hr.Strategy] = {
    "one_device": hr.OneDevice(threads=1),
    "mirrored": hr.Mirrored(2),
    "elastic": hr.Mirrored(3, min_workers=1),
    "central_storage": hr.CentralStorage(2),
    "fully_sharded": hr.FullySharded(2),
    "servers": hr.ParameterServer(2, servers=1),
    "servers with a backup": hr.ParameterServer(2, servers=1, backups=1),
    "servers in lock-step": hr.ParameterServer(2, servers=1, staleness_bound=0),
    "downpour": hr.Downpour(2, servers=1),
    "averaging": hr.ParameterAveraging(2, period=4),
    "gossip": hr.Gossip(2),
    "pipeline": hr.Pipeline(stages=2, micro_batches=2),
    "tensor_parallel": hr.TensorParallel(2),
    "hybrid": hr.Hybrid(hr.Mirrored(2), hr.Pipeline(stages=2, micro_batches=2)),
    "sharded stages": hr.Hybrid(hr.FullySharded(2), hr.Pipeline(stages=2, micro_batches=2)),
}

OVER_HOSTS: dict[str, hr.Strategy] = {
    "mirrored over hosts": hr.Mirrored(),
    "elastic over hosts": hr.Mirrored(min_workers=1),
    "servers over hosts": hr.ParameterServer(HOSTS - 1, servers=1),
    "pipeline over hosts": hr.Pipeline(stages=HOSTS, micro_batches=2),
    "fully_sharded over hosts": hr.FullySharded(),
}
"""One rank on each host."""

EXACT = ("one_device", "mirrored", "central_storage", "fully_sharded", "pipeline", "tensor_parallel", "hybrid",
         "sharded stages", "mirrored over hosts", "pipeline over hosts", "fully_sharded over hosts")  # fmt: skip
"""A resumed run equals the uninterrupted one bit for bit."""

ACCOUNTED = (
    "one_device", "mirrored", "central_storage", "fully_sharded", "mirrored over hosts", "fully_sharded over hosts",
)  # fmt: skip
"""Every worker counts its own part of each round's examples, and all the workers are there from beginning to end."""


ELASTIC = ("elastic", "elastic over hosts")
"""Workers go on without those that were lost."""


def loss(output: Tensor, target: Tensor) -> Tensor:
    """The mean square, slowly: a fault has time to come."""
    time.sleep(STEP_S)
    return nn.functional.mse_loss(output, target)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, FEATURES))


def main(strategy: str, run_dir: Path) -> int:
    torch.set_num_threads(1)
    inputs = torch.randn(EXAMPLES, FEATURES, generator=torch.Generator().manual_seed(0))
    job = hr.Job(
        model, loss=loss, optimizer=functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        data=(inputs, inputs.flip(0)), global_batch_size=BATCH, steps=ROUNDS,
    )  # fmt: skip
    checkpoints = hr.Checkpoints(every_steps=8, every_s=None, keep=3)
    try:
        hr.fit(job, (STRATEGIES | OVER_HOSTS)[strategy], run_dir=run_dir, timeout_s=TIMEOUT_S, checkpoints=checkpoints,
               resume="if_saved", check=False)  # fmt: skip
    except HeadraceError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
