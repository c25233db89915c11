"""Two workers on one host beside DDP, the ceiling, and one process with all threads. See `*-throughput/`."""

from __future__ import annotations

import argparse
import os
from functools import partial
from pathlib import Path

from harness import alternate, ratio, report, rival
from workloads import EXAMPLES_A_WORKER, throughput

import headrace as hr
from headrace.engine.local.engine import LocalEngine


def main(workload: str, folder: Path) -> None:
    """Measures one workload."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run")
    arguments = parser.parse_args()
    rounds, seconds = arguments.rounds, arguments.seconds
    cores = str(len(os.sched_getaffinity(0)))
    os.environ.pop("THREADS", None)

    def all_threads() -> float:
        os.environ.update(THREADS=cores, BATCH=str(2 * EXAMPLES_A_WORKER))
        try:
            return rival("ddp", "1", workload, str(seconds), tuned=True)
        finally:
            del os.environ["THREADS"], os.environ["BATCH"]

    with LocalEngine() as engine:
        ours = partial(throughput, workload, workers=2, seconds=seconds, engine=engine)
        figures = alternate(
            {
                "ceiling: 2 unconnected, tuned": partial(
                    rival, "ddp", "1", workload, str(seconds), copies=2, tuned=True
                ),
                "headrace mirrored, 2 workers": partial(ours, strategy=hr.Mirrored(2)),
                "headrace central_storage, 2 workers": partial(ours, strategy=hr.CentralStorage(2)),
                "DDP over gloo, 2 workers": partial(rival, "ddp", "2", workload, str(seconds)),
                "DDP over gloo, 2 workers, tuned": partial(rival, "ddp", "2", workload, str(seconds), tuned=True),
                "one process, all threads, tuned": all_threads,
                "headrace one_device": partial(
                    throughput, workload, hr.OneDevice(), workers=2, seconds=seconds, engine=engine
                ),
            },
            rounds,
        )
    names = ("headrace mirrored, 2 workers", "headrace central_storage, 2 workers")
    ratios = {
        f"{name} / {rival_name}": ratio(figures, name, rival_name)
        for name in names
        for rival_name in (
            "DDP over gloo, 2 workers",
            "DDP over gloo, 2 workers, tuned",
            "ceiling: 2 unconnected, tuned",
            "one process, all threads, tuned",
        )
    }
    report(folder, workload, "examples/s", figures, ratios)
