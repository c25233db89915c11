"""Memory for parameters and optimizer state: CentralStorage with 4 workers against one process; Adam."""

from __future__ import annotations

import functools
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from harness import report
from workloads import MODELS, examples

import headrace as hr
from headrace.api.fit import fit
from headrace.engine.local.engine import LocalEngine


def held(strategy: hr.Strategy, engine: LocalEngine) -> float:
    """Returns MB of parameters and optimizer state in all workers together, a shared copy counted once."""
    job = hr.Job(
        model=MODELS["mlp"][0],
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.Adam, lr=1e-3),
        data=examples("mlp", 1024),
        global_batch_size=64,
        steps=5,
    )
    with tempfile.TemporaryDirectory() as folder:
        cost = fit(job, strategy, run_dir=Path(folder) / "run", engine=engine).summary.cost
    return ((cost.parameter_bytes or 0) + (cost.optimizer_bytes or 0)) / 1e6


if __name__ == "__main__":
    with LocalEngine() as engine:
        strategies = {
            "one_device": hr.OneDevice(),
            "central_storage, 4 workers": hr.CentralStorage(4),
            "mirrored, 4 workers": hr.Mirrored(4),
        }
        figures = {name: [held(strategy, engine)] for name, strategy in strategies.items()}
    ratios = {f"{name} / one_device": figures[name][0] / figures["one_device"][0] for name in list(strategies)[1:]}
    report(Path(__file__).parent, "memory", "MB", figures, ratios)
