"""One of the ranks: trains a few steps, and says how long one took and how many bytes went over its link.

one_rank.py ddp | mirrored | pipeline STEPS FOLDER
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from time import perf_counter

import torch
from torch import nn

import headrace as hr

BATCH = 128
"""Examples of a step, on both hosts together."""
SIZES = (9216, 4096, 4096, 1000)
"""AlexNet's dense layers."""
STATISTICS = Path("/sys/class/net/eth0/statistics")
SGD = functools.partial(torch.optim.SGD, lr=0.01)


def dense() -> nn.Module:
    inputs, *hidden, classes = SIZES
    layers: list[nn.Module] = []
    for count in hidden:
        layers += [nn.Linear(inputs, count), nn.ReLU()]
        inputs = count
    return nn.Sequential(*layers, nn.Linear(inputs, classes))


def sent_bytes() -> int:
    """What this host has sent, with all that the network adds."""
    return int((STATISTICS / "tx_bytes").read_text())


def data(steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(steps * BATCH, SIZES[0]), torch.randint(0, SIZES[-1], (steps * BATCH,))


def ours(strategy: hr.Strategy, steps: int, folder: str, said: dict[str, float]) -> None:
    def train(worker: hr.Worker) -> None:
        for batch in worker.batches():
            worker.step(batch)
            note(worker.round, steps, said)

    job = hr.Job(
        model=dense,
        loss=nn.functional.cross_entropy,
        optimizer=SGD,
        data=data(steps),
        global_batch_size=BATCH,
        steps=steps,
    )
    run = hr.launch(train, job, strategy, run_dir=f"{folder}/run", checkpoints=False, timeout_s=60)
    if run.plan.partition:
        # Values of so many features cross the cut, behind a linear layer or its ReLU.
        layers = sum(name.rpartition(".")[2] in ("0", "2", "4") for name in run.plan.partition[0])
        said["features"] = SIZES[layers]


def ddp(steps: int, folder: str, said: dict[str, float]) -> None:
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(dense())
    optimizer = SGD(model.parameters())
    inputs, target = data(steps)
    for step in range(steps):
        own = slice(step * BATCH + BATCH * rank // world, step * BATCH + BATCH * (rank + 1) // world)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[own]), target[own]).backward()
        optimizer.step()
        note(step, steps, said)
    torch.distributed.destroy_process_group()


def note(step: int, steps: int, said: dict[str, float]) -> None:
    """Counts from the end of the first step to that of the last."""
    if step == 0:
        said.update(began=perf_counter(), sent=sent_bytes())
    elif step == steps - 1:
        said.update(seconds=(perf_counter() - said["began"]) / step, bytes=(sent_bytes() - said["sent"]) / step)


WAYS = {
    "ddp": ddp,
    "mirrored": functools.partial(ours, hr.Mirrored()),
    "pipeline": functools.partial(ours, hr.Pipeline(micro_batches=8)),
}


def main() -> None:
    way, steps, folder = sys.argv[1:]
    said: dict[str, float] = {}
    torch.set_num_threads(1)
    WAYS[way](int(steps), folder, said)
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
