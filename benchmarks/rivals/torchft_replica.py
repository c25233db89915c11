"""A replica under torchft: `torchft_replica.py LIGHTHOUSE NAME FILE`; a line for each step that it has committed.

The model and the batch of 64 are those of the cnn workload; gradients go over gloo. Needs `pip install torchft`.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from torch import nn
from torch.distributed import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from workloads import EXAMPLES_A_WORKER, MODELS, examples

TIMEOUT = timedelta(seconds=3)


def main(lighthouse: str, name: str, file: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = MODELS["cnn"][0]()
    inner = torch.optim.SGD(model.parameters(), lr=0.01)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    # What torchrun would give: one process is a whole replica.
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="localhost",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=name,
    )
    module, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    x, y = examples("cnn", 4096)
    loss = nn.CrossEntropyLoss()
    with open(file, "a", buffering=1, encoding="utf-8") as log:
        print(f"{time.monotonic()} begun", file=log)
        while True:
            index = torch.randint(len(x), (EXAMPLES_A_WORKER,))
            before = manager.current_step()
            optimizer.zero_grad()
            loss(module(x[index]), y[index]).backward()
            optimizer.step()
            if manager.current_step() > before:
                print(f"{time.monotonic()} {manager.num_participants()}", file=log)


if __name__ == "__main__":
    main(*sys.argv[1:])
