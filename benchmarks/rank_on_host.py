"""What ranks of benchmarks on hosts have in common: AlexNet's dense layers, DDP of a model, ours, what is counted.

A benchmark's `one_rank.py WAY STEPS FOLDER` trains a few steps in one of `ways`, and `main` says how long one took and
how many bytes its host has sent.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter

import torch
from torch import nn

import headrace as hr

BATCH = 128
"""Examples of a step, on all hosts together."""
SIZES = (9216, 4096, 4096, 1000)
"""AlexNet's dense layers."""

_STATISTICS = Path("/sys/class/net/eth0/statistics")
_SGD = functools.partial(torch.optim.SGD, lr=0.01)

Said = dict[str, float]
Way = Callable[[int, str, Said], None]


def dense(sizes: Sequence[int] = SIZES) -> nn.Sequential:
    inputs, *hidden, classes = sizes
    layers: list[nn.Module] = []
    for count in hidden:
        layers += [nn.Linear(inputs, count), nn.ReLU()]
        inputs = count
    return nn.Sequential(*layers, nn.Linear(inputs, classes))


def ours(
    model: Callable[[], nn.Module],
    shape: tuple[int, ...],
    strategy: hr.Strategy,
    steps: int,
    folder: str,
    said: Said,
) -> hr.Run:
    """Trains under a strategy.

    Args:
        model: makes it.
        shape: of an example.
        strategy: see there.
        steps: how many.
        folder: for the run.
        said: takes what is counted.
    """

    def train(worker: hr.Worker) -> None:
        for batch in worker.batches():
            worker.step(batch)
            _note(worker.round, steps, said)

    job = hr.Job(
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=_SGD,
        data=_data(shape, steps),
        global_batch_size=BATCH,
        steps=steps,
    )
    return hr.launch(train, job, strategy, run_dir=f"{folder}/run", checkpoints=False, timeout_s=60)


def ddp(model: Callable[[], nn.Module], shape: tuple[int, ...], steps: int, folder: str, said: Said) -> None:
    """Trains under torch's DistributedDataParallel; arguments as those of `ours`."""
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    parallel = nn.parallel.DistributedDataParallel(model())
    optimizer = _SGD(parallel.parameters())
    inputs, target = _data(shape, steps)
    for step in range(steps):
        own = slice(step * BATCH + BATCH * rank // world, step * BATCH + BATCH * (rank + 1) // world)
        optimizer.zero_grad()
        nn.functional.cross_entropy(parallel(inputs[own]), target[own]).backward()
        optimizer.step()
        _note(step, steps, said)
    torch.distributed.destroy_process_group()


def main(ways: Mapping[str, Way]) -> None:
    way, steps, folder = sys.argv[1:]
    said: Said = {}
    torch.set_num_threads(1)
    ways[way](int(steps), folder, said)
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(said))


def _data(shape: tuple[int, ...], steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(steps * BATCH, *shape), torch.randint(0, SIZES[-1], (steps * BATCH,))


def _sent_bytes() -> int:
    """What this host has sent, with all that the network adds."""
    return int((_STATISTICS / "tx_bytes").read_text())


def _note(step: int, steps: int, said: Said) -> None:
    """Counts from the end of the first step to that of the last."""
    if step == 0:
        said.update(began=perf_counter(), sent=_sent_bytes())
    elif step == steps - 1:
        said.update(seconds=(perf_counter() - said["began"]) / step, bytes=(_sent_bytes() - said["sent"]) / step)
