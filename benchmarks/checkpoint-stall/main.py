"""What saving in the background costs: training with and without checkpoints, by turns.

A model of 12.5 million parameters with momentum (a state of 100 MB) trains for some time without saving, saving every
30 s (the target's interval) and saving every 5 s (more saves in less time). A figure is the mean time of a step over a
run, with all that happens between steps; the stall of a save is what its event says: how long training stood still.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import alternate, ratio, report

import headrace as hr
from headrace.engine.local.engine import LocalEngine
from headrace.spec.events import Saved, Stepped

WIDTH = 2500
WARM_UP_S = 2.0
EVERY_S = (None, 30.0, 5.0)
STRATEGIES = {"one_device": hr.OneDevice(), "mirrored": hr.Mirrored(2), "central_storage": hr.CentralStorage(2)}


def model() -> nn.Module:
    """12.5 million parameters."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def make_job() -> hr.Job:
    """Returns a job that would take days, of some 100 ms a step."""
    torch.manual_seed(0)
    return hr.Job(
        model=model,
        task=hr.tasks.regression(),
        optimizer=functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
        data=(torch.randn(512, WIDTH), torch.randn(512, WIDTH)),
        global_batch_size=128,
        epochs=10**6,
    )


def mean_step_s(
    engine: LocalEngine, strategy: str, every_s: float | None, seconds: float, stalls: list[float]
) -> float:
    """Trains for so long; returns rank 0's time a step, over everything that happens between steps."""
    checkpoints = hr.Checkpoints(every_s=every_s, keep=1) if every_s else False
    with tempfile.TemporaryDirectory() as folder:
        run = hr.fit(make_job(), STRATEGIES[strategy], run_dir=Path(folder) / "run", engine=engine, seconds=seconds,
                     checkpoints=checkpoints)  # fmt: skip
        times = [event.time_s for event in run.events if isinstance(event, Stepped) and event.rank == 0]
        # The last save is at the end, when training is over.
        stalls += [event.stall_s for event in run.events if isinstance(event, Saved)][:-1]
    times = [time_s for time_s in times if time_s > times[0] + WARM_UP_S]
    return (times[-1] - times[0]) / (len(times) - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=list(STRATEGIES), default="one_device")
    parser.add_argument("--seconds", type=float, default=95.0, help="of each run: 3 saves every 30 s")
    parser.add_argument("--rounds", type=int, default=5, help="of turns")
    arguments = parser.parse_args()
    os.environ["CI"] = "true"  # no moving bars
    stalls: dict[str, list[float]] = {}
    with LocalEngine() as engine:
        contestants = {}
        for every_s in EVERY_S:
            name = f"every {every_s:.0f} s" if every_s else "no saves"
            stalls[name] = []
            contestants[name] = functools.partial(
                mean_step_s, engine, arguments.strategy, every_s, arguments.seconds, stalls[name]
            )
        figures = alternate(contestants, arguments.rounds)
    ratios = {f"{name} / no saves": ratio(figures, name, "no saves") for name in figures if name != "no saves"}
    here = Path(__file__).parent
    report(here, f"stall-{arguments.strategy}", "s a step", figures, ratios)
    for name, values in stalls.items():
        if values:
            print(f"{name:12} stall of a save: median {statistics.median(values):.4f} s, most {max(values):.4f} s, "
                  f"{len(values)} saves")  # fmt: skip
    (here / "results" / f"stalls-{arguments.strategy}.json").write_text(json.dumps(stalls, indent=1) + "\n")


if __name__ == "__main__":
    main()
