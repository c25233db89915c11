"""What the strategies cost a step on one GPU over the bare PyTorch loop; same data path for both."""

from __future__ import annotations

import argparse
import functools
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from harness import alternate, ratio, report, rival
from workloads import LARGE, MODELS, examples, model

import headrace as hr
from headrace.api.fit import fit
from headrace.engine.local.engine import LocalEngine


def batch(workload: str) -> int:
    return 128 if workload == LARGE else 256


def ours(device: str, workload: str, strategy: hr.Strategy, seconds: float, engine: LocalEngine) -> float:
    """Returns examples/s."""
    large = workload == LARGE
    job = hr.Job(
        model=model(workload),
        task=hr.tasks.multiclass(1000 if large else 10),
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        data=hr.data.from_arrays(*examples(workload, 512 if large else 4096)).shuffle(),
        global_batch_size=batch(workload),
        steps=10_000_000,
        options=hr.Options(precision="bf16", memory_format="channels_last") if large else hr.Options(),
    )
    with tempfile.TemporaryDirectory() as folder:
        run = fit(job, strategy, device=device, run_dir=Path(folder) / "run", seconds=seconds, engine=engine)
        return run.throughput or 0.0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each run")
    parser.add_argument("--workloads", nargs="+", default=[*MODELS], choices=[*MODELS, LARGE])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the command out")
    arguments = parser.parse_args()
    device = arguments.device
    strategies = {
        "one_device": hr.OneDevice(),
        "mirrored, 1 worker": hr.Mirrored(1),
        "central_storage, 1 worker": hr.CentralStorage(1),
    }
    with LocalEngine() as engine:
        contestants = {}
        for workload in arguments.workloads:
            contestants[f"bare loop, {workload}"] = partial(
                rival, "bare_device_loop", device, workload, str(batch(workload)), str(arguments.seconds), tuned=True
            )
            for name, strategy in strategies.items():
                contestants[f"headrace {name}, {workload}"] = partial(
                    ours, device, workload, strategy, arguments.seconds, engine
                )
        figures = alternate(contestants, arguments.rounds)
    ratios = {
        f"headrace {name} / bare loop, {workload}": ratio(
            figures, f"headrace {name}, {workload}", f"bare loop, {workload}"
        )
        for workload in arguments.workloads
        for name in strategies
    }
    name = torch.cuda.get_device_name().lower().replace(" ", "-") if device == "cuda" else "cpu"
    suffix = "" if arguments.workloads == [*MODELS] else "-" + "-".join(arguments.workloads)
    report(Path(__file__).parent, name + suffix, "examples/s", figures, ratios)
