"""One of the ranks: trains a few steps, and says how long one took and how many bytes went over its link.

one_rank.py ddp | hybrid STEPS FOLDER
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
"""Examples of a step, on all hosts together."""
SIZES = (9216, 4096, 4096, 1000)
"""AlexNet's dense layers."""
STATISTICS = Path("/sys/class/net/eth0/statistics")
RULES = {"convolution": "batch", "dense.*": "column"}


class Alex(nn.Module):
    """AlexNet's dense layers behind one convolution that makes as many features as AlexNet's five."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Sequential(nn.Conv2d(3, 256, 11), nn.ReLU())
        inputs, *hidden, classes = SIZES
        layers: list[nn.Module] = []
        for count in hidden:
            layers += [nn.Linear(inputs, count), nn.ReLU()]
            inputs = count
        self.dense = nn.Sequential(*layers, nn.Linear(inputs, classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.dense(self.convolution(images).flatten(1))


SGD = functools.partial(torch.optim.SGD, lr=0.01)


def sent_bytes() -> int:
    """What this host has sent, with all that the network adds."""
    return int((STATISTICS / "tx_bytes").read_text())


def data(steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(steps * BATCH, 3, 16, 16), torch.randint(0, SIZES[-1], (steps * BATCH,))


def hybrid(steps: int, folder: str, said: dict[str, float]) -> None:
    def train(worker: hr.Worker) -> None:
        for batch in worker.batches():
            worker.step(batch)
            note(worker.round, steps, said)

    job = hr.Job(
        model=Alex,
        loss=nn.functional.cross_entropy,
        optimizer=SGD,
        data=data(steps),
        global_batch_size=BATCH,
        steps=steps,
    )
    strategy = hr.Hybrid(hr.Mirrored(workers=2), hr.TensorParallel(devices=2, rules=RULES))
    hr.launch(train, job, strategy, run_dir=f"{folder}/run", checkpoints=False, timeout_s=60)


def ddp(steps: int, folder: str, said: dict[str, float]) -> None:
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Alex())
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


def main() -> None:
    way, steps, folder = sys.argv[1:]
    said: dict[str, float] = {}
    torch.set_num_threads(1)
    {"ddp": ddp, "hybrid": hybrid}[way](int(steps), folder, said)
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
