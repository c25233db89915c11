"""One of the ranks: configuration_rank.py NUMBER STEPS FOLDER trains a configuration, and says what was measured."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from configurations import CONFIGURATIONS, Configuration, job

import headrace as hr
from headrace.spec.events import Stepped, WorkerEnded


def whole_periods(run: hr.Run, case: Configuration, steps: int) -> float:
    """Returns the examples a second from the end of the first period to that of the last."""
    ends = sorted(event.time_s for event in run.events if isinstance(event, Stepped) and event.rank == 0)
    return (steps - case.period) * case.batch / (ends[-1] - ends[case.period - 1])


def main() -> None:
    number, steps, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    case, rank = CONFIGURATIONS[number], os.environ.get("RANK", "0")
    if case.mbit:
        torch.set_num_threads(1)
    run = hr.fit(
        job(case.model, case.batch, steps),
        case.strategy,
        run_dir=f"{folder}/run",
        checkpoints=False,
        check=False,
        timeout_s=60,
    )
    said: dict[str, float | None] = {}
    if rank == "0":
        ended = [event for event in run.events if isinstance(event, WorkerEnded)]
        times = run.summary.times
        said = {
            "rate": whole_periods(run, case, steps) if case.period > 1 else run.throughput,
            "memory_bytes": max(event.peak_memory_bytes - event.runtime_bytes for event in ended),
            "moved_bytes": sum(event.moved_bytes / event.steps for event in ended) / len(ended),
            "spread": run.summary.training.spread,
            "steps": run.summary.steps,
        }
        names = ("compute_s", "exchange_s", "update_s", "other_s")
        said |= {name: getattr(times, name) for name in names} if times else {}
    Path(folder, f"{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
