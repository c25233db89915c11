"""Mirrored and FullySharded on all devices beside torch's DDP and FSDP; with --shared two workers on one device.

Over nccl on GPUs; over gloo with two workers on a CPU, which only tries the command out. Two workers on one device
exchange in host memory, because NCCL takes one process a GPU. See README.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
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
    parser.add_argument("--shared", action="store_true", help="two workers on the first device")
    arguments = parser.parse_args()
    device, seconds = arguments.device, arguments.seconds
    workers = 2 if arguments.shared or device == "cpu" else torch.cuda.device_count()
    os.environ["DEVICE"] = device
    with LocalEngine() as engine:
        contestants: dict[str, Callable[[], float]] = {}
        ratios: dict[str, tuple[str, str]] = {}
        for workload in MODELS:
            ours = partial(throughput, workload, seconds=seconds, engine=engine)
            if arguments.shared:
                first = "cuda:0" if device == "cuda" else "cpu"
                both = partial(ours, workers=2, device=[first, first])
                rows = {
                    "mirrored, 2 workers": partial(both, strategy=hr.Mirrored(2)),
                    "parameter_server, 2 workers": partial(both, strategy=hr.ParameterServer(2)),
                    "one_device": partial(ours, workers=2, device=device, strategy=hr.OneDevice()),
                }
                pairs = [("mirrored, 2 workers", "one_device"), ("parameter_server, 2 workers", "one_device")]
            else:
                each = partial(ours, workers=workers, device=device)
                rows = {
                    "mirrored": partial(each, strategy=hr.Mirrored(workers)),
                    "DDP": partial(rival, "ddp", str(workers), workload, str(seconds)),
                    "fully_sharded": partial(each, strategy=hr.FullySharded(workers)),
                    "FSDP": partial(rival, "ddp", str(workers), workload, str(seconds), "fsdp"),
                }
                pairs = [("mirrored", "DDP"), ("fully_sharded", "FSDP")]
            contestants |= {f"{name}, {workload}": contestant for name, contestant in rows.items()}
            ratios |= {f"{a} / {b}, {workload}": (f"{a}, {workload}", f"{b}, {workload}") for a, b in pairs}
        figures = alternate(contestants, arguments.rounds)
    found = {name: ratio(figures, *pair) for name, pair in ratios.items()}
    what = "shared" if arguments.shared else "data-parallel"
    report(Path(__file__).parent, f"{what}-{device}-{workers}", "examples/s", figures, found)


if __name__ == "__main__":
    main()
