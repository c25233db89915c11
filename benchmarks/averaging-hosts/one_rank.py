"""One of the ranks: trains, and says how long it took to an accuracy, or how many bytes went over its link.

one_rank.py STRATEGY WAY FOLDER, where WAY is "to 0.85" (accuracy) or "from 100 to 300" (rounds).
"""

from __future__ import annotations

import json
import os
import runpy
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import headrace as hr
from headrace.spec.events import Stepped

ROOT = Path(__file__).parents[2]
EVALUATE_EVERY = 20
STATISTICS = Path("/sys/class/net/eth0/statistics")


def sent_bytes() -> int:
    """What this host has sent, with all that the network adds."""
    return int((STATISTICS / "tx_bytes").read_text())


def to_accuracy(target: float, said: dict[str, float], worker: hr.Worker) -> None:
    began, evaluating_s = perf_counter(), 0.0
    for batch in worker.batches():
        worker.step(batch)
        if (worker.round + 1) % EVALUATE_EVERY:
            continue
        asked = perf_counter()
        said.update(seconds=asked - began - evaluating_s, rounds=worker.round + 1)
        accuracy = worker.evaluate()["accuracy"]
        evaluating_s += perf_counter() - asked
        if accuracy >= target:
            said["accuracy"] = accuracy
            return


def between(start: int, stop: int, said: dict[str, float], worker: hr.Worker) -> None:
    examples, sent = 0, 0
    for batch in worker.batches():
        worker.step(batch)
        done = worker.round + 1
        if done == start:
            sent = sent_bytes()
        elif done > start:
            examples += len(batch[1])
        if done == stop:
            said.update(examples=examples, bytes=sent_bytes() - sent)
            return


def main() -> None:
    strategy, way, folder = sys.argv[1:]
    make: Callable[..., hr.Job] = runpy.run_path(str(ROOT / "examples" / "fashion_mnist" / "job.py"))["job"]
    said: dict[str, float] = {}
    numbers = way.split()[1::2]

    def train(worker: hr.Worker) -> None:
        if len(numbers) == 1:
            to_accuracy(float(numbers[0]), said, worker)
        else:
            between(int(numbers[0]), int(numbers[1]), said, worker)

    run = hr.launch(train, make(epochs=20), strategy, run_dir=f"{folder}/run", checkpoints=False, timeout_s=30)
    steps = [event for event in run.events if isinstance(event, Stepped) and event.step >= 5]
    said["compute_s"] = statistics.median(event.compute_s for event in steps)
    said["exchange_s"] = statistics.median(event.exchange_s for event in steps)
    said["gradient_bytes"] = run.plan.gradient_bytes
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
