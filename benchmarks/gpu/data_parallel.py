"""Mirrored on all devices beside torch's DDP: over nccl on GPUs, over gloo with two workers on a CPU. See README.md."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from harness import alternate, ratio, report, rival
from workloads import MODELS, throughput

import headrace as hr
from headrace.engine.local.engine import LocalEngine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the command out")
    arguments = parser.parse_args()
    device, seconds = arguments.device, arguments.seconds
    workers = torch.cuda.device_count() if device == "cuda" else 2
    os.environ["DEVICE"] = device
    with LocalEngine() as engine:
        contestants = {}
        for workload in MODELS:
            ours = partial(throughput, workload, workers=workers, seconds=seconds, engine=engine, device=device)
            contestants[f"headrace mirrored, {workload}"] = partial(ours, strategy=hr.Mirrored(workers))
            contestants[f"DDP, {workload}"] = partial(rival, "ddp", str(workers), workload, str(seconds))
        figures = alternate(contestants, arguments.rounds)
    ratios = {
        f"mirrored / DDP, {workload}": ratio(figures, f"headrace mirrored, {workload}", f"DDP, {workload}")
        for workload in MODELS
    }
    report(Path(__file__).parent, f"data-parallel-{device}-{workers}", "examples/s", figures, ratios)


if __name__ == "__main__":
    main()
