"""Plain indexed slicing of arrays in memory, shuffled: `indexed_slicing.py arrays|bytes SECONDS`; prints examples/s."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from input_workloads import BATCH, clothes

WARM_UP_S = 0.5

if __name__ == "__main__":
    workload, seconds = sys.argv[1], float(sys.argv[2])
    torch.set_num_threads(1)
    images, labels = clothes(workload)
    examples, began = 0, time.perf_counter() + WARM_UP_S
    while (now := time.perf_counter()) < began + seconds:
        order = torch.randperm(len(images))
        for start in range(0, len(images), BATCH[workload]):
            chosen = order[start : start + BATCH[workload]]
            batch = images[chosen], labels[chosen]
            examples += len(batch[0]) * (now > began)
    print(examples / (time.perf_counter() - began))
