"""A pipeline of two stages beside torch.distributed.pipelining, and beside what its schedule allows."""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import alternate, ratio, report, rival

import headrace as hr
from headrace.engine.local.engine import LocalEngine
from headrace.pipeline.schedules import SCHEDULES
from headrace.pipeline.schedules.schedule import Action, timed
from headrace.spec.events import PipelineStepTimed, Stepped

WIDTH, LAYERS, BATCH, STAGES, WARM = 1024, 8, 256, 2, 10
CASES = (("gpipe", 4), ("gpipe", 8), ("1f1b", 4), ("1f1b", 8))


def stack() -> nn.Module:
    return nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])


def job(steps: int) -> hr.Job:
    generator = torch.Generator().manual_seed(0)
    data = tuple(torch.randn(4 * BATCH, WIDTH, generator=generator) for _ in range(2))
    optimizer = functools.partial(torch.optim.SGD, lr=0.01)
    return hr.Job(
        model=stack, loss=nn.MSELoss(), optimizer=optimizer, data=data, global_batch_size=BATCH, steps=WARM + steps
    )


def trained(strategy: hr.Strategy, steps: int, engine: LocalEngine) -> hr.Run:
    return hr.fit(job(steps), strategy, device="cpu", engine=engine)


def step_ms(run: hr.Run) -> float:
    """Returns the median over the steps after the first ten, from one step's end to the next one's."""
    ends = [event.time_s for event in run.events if isinstance(event, Stepped) and event.rank == 0]
    return 1e3 * statistics.median(after - before for before, after in pairwise(ends[WARM - 1 :]))


def allowed_ms(run: hr.Run, schedule: str, micro_batches: int) -> float:
    """Returns what the schedule's compute takes if nothing else does, by the passes as they were measured."""
    took: dict[tuple[int, bool], list[float]] = {}
    for event in run.events:
        for each in event.passes if isinstance(event, PipelineStepTimed) else ():
            took.setdefault((each.stage, each.backward), []).append(each.ended_s - each.began_s - each.waited_s)

    def cost(action: Action) -> float:
        return statistics.median(took[action.stage, action.backward])

    return 1e3 * max(span.stop for span in timed(SCHEDULES[schedule](STAGES, micro_batches).orders(), cost))


def main(rounds: int, steps: int) -> None:
    shares: dict[str, list[float]] = {}
    contestants: dict[str, Callable[[], float]] = {}

    with LocalEngine() as engine:

        def ours(schedule: str, micro_batches: int) -> float:
            run = trained(hr.Pipeline(STAGES, micro_batches, schedule), steps, engine)
            took = step_ms(run)
            shares.setdefault(f"{schedule}, M = {micro_batches}", []).append(
                allowed_ms(run, schedule, micro_batches) / took
            )
            return took

        for schedule, count in CASES:
            name = f"{schedule}, M = {count}"
            contestants[f"headrace, {name}"] = functools.partial(ours, schedule, count)
            contestants[f"torch pipelining, {name}"] = functools.partial(
                rival, "torch_pipelining", schedule, str(count), str(steps)
            )
        contestants["headrace one_device, 1 thread"] = lambda: step_ms(trained(hr.OneDevice(threads=1), steps, engine))
        figures = alternate(contestants, rounds)
    names = [f"{schedule}, M = {count}" for schedule, count in CASES]
    ratios = {
        f"torch pipelining / headrace, {n}": ratio(figures, f"torch pipelining, {n}", f"headrace, {n}") for n in names
    }
    ratios |= {f"what the schedule allows / headrace, {n}": statistics.median(shares[n]) for n in names}
    report(Path(__file__).parent, "pipeline-mlp", "ms a step", figures, ratios)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    main(arguments.rounds, arguments.steps)
