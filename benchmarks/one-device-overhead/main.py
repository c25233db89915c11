"""What `fit` costs a step over the bare PyTorch loop, events on; same process environment for both."""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from harness import alternate, ratio, report, rival
from overhead_job import make_data, make_model

import headrace as hr
from headrace.api.fit import fit
from headrace.engine.local.engine import LocalEngine
from headrace.spec.events import Stepped
from headrace.strategies import OneDevice

STEPS = {"tiny": 8000, "cnn": 60}


def ours(workload: str, steps: int, engine: LocalEngine) -> float:
    """Returns us a step: the mean from the 10th to the 50th percentile, as the rival's."""
    job = hr.Job(
        model=partial(make_model, workload),
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        data=hr.data.from_arrays(*make_data(workload)).shuffle(),
        global_batch_size=64,
        steps=steps,
    )
    with tempfile.TemporaryDirectory() as folder:
        run = fit(job, OneDevice(threads=1), run_dir=Path(folder) / "run", engine=engine)
        times = [event.time_s for event in run.events if isinstance(event, Stepped)]
    took = sorted(after - before for before, after in itertools.pairwise(times))
    middle = took[len(took) // 10 : len(took) // 2]
    return 1e6 * sum(middle) / len(middle)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    with LocalEngine() as engine:
        contestants = {}
        for workload, steps in STEPS.items():
            contestants[f"bare loop, {workload}"] = partial(rival, "bare_loop", workload, str(steps), tuned=True)
            contestants[f"headrace one_device, {workload}"] = partial(ours, workload, steps, engine)
        figures = alternate(contestants, rounds)
    difference = sorted(
        a - b for a, b in zip(figures["headrace one_device, tiny"], figures["bare loop, tiny"], strict=True)
    )
    figures["fixed cost a step"] = difference
    ratios = {"headrace / bare loop, cnn": ratio(figures, "headrace one_device, cnn", "bare loop, cnn")}
    report(Path(__file__).parent, "overhead", "us a step", figures, ratios)
