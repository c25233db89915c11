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
from workloads import GPT2, LARGE, MODELS, examples, loss_of, model

import headrace as hr
from headrace.api.fit import fit
from headrace.engine.local.engine import LocalEngine

BATCHES = {LARGE: 128, GPT2: 16}
"""Examples of a step; of the others 256."""


def options(workload: str, compiles: bool | str) -> hr.Options:
    return hr.Options(
        precision="bf16" if workload in BATCHES else "fp32",
        memory_format="channels_last" if workload == LARGE else "preserve",
        compile=compiles,
    )


def batch(workload: str) -> int:
    return BATCHES.get(workload, 256)


def ours(
    device: str, workload: str, strategy: hr.Strategy, compiles: bool | str, seconds: float, engine: LocalEngine
) -> float:
    """Returns examples/s."""
    job = hr.Job(
        model=model(workload),
        loss=loss_of(workload),
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        data=hr.data.from_arrays(*examples(workload, 512 if workload in BATCHES else 4096)).shuffle(),
        global_batch_size=batch(workload),
        steps=10_000_000,
        options=options(workload, compiles),
    )
    with tempfile.TemporaryDirectory() as folder:
        run = fit(job, strategy, device=device, run_dir=Path(folder) / "run", seconds=seconds, engine=engine)
        return run.throughput or 0.0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each run")
    parser.add_argument("--workloads", nargs="+", default=[*MODELS], choices=[*MODELS, LARGE, GPT2])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the command out")
    arguments = parser.parse_args()
    device = arguments.device
    strategies: dict[str, tuple[hr.Strategy, bool | str]] = {
        "one_device": (hr.OneDevice(), False),
        "mirrored, 1 worker": (hr.Mirrored(1), False),
        "central_storage, 1 worker": (hr.CentralStorage(1), False),
    }
    if device == "cuda":
        strategies["one_device, cudagraphs"] = hr.OneDevice(), "cudagraphs"
    with LocalEngine() as engine:
        contestants = {}
        for workload in arguments.workloads:
            loop = partial(
                rival, "bare_device_loop", device, workload, str(batch(workload)), str(arguments.seconds), tuned=True
            )
            contestants |= {f"bare loop, {workload}": loop, f"DDP, {workload}": partial(loop, "ddp")}
            for name, (strategy, compiles) in strategies.items():
                contestants[f"headrace {name}, {workload}"] = partial(
                    ours, device, workload, strategy, compiles, arguments.seconds, engine
                )
        figures = alternate(contestants, arguments.rounds)
    ratios = {
        f"headrace {name} / {other}, {workload}": ratio(figures, f"headrace {name}, {workload}", f"{other}, {workload}")
        for workload in arguments.workloads
        for other in ("bare loop", "DDP")
        for name in strategies
    }
    name = torch.cuda.get_device_name().lower().replace(" ", "-") if device == "cuda" else "cpu"
    suffix = "" if arguments.workloads == [*MODELS] else "-" + "-".join(arguments.workloads)
    report(Path(__file__).parent, name + suffix, "examples/s", figures, ratios)
