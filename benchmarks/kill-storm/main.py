"""A real training while its processes are killed and frozen, beside the same undisturbed. See README.md."""

from __future__ import annotations

import argparse
import dataclasses
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import headrace as hr
from headrace.spec.events import Lost, Stepped

sys.path.insert(0, str(Path(__file__).parents[1]))
from storm import Storm, kept_within, live_seconds

ROOT = Path(__file__).parents[2]
WORKERS, SERVERS = 4, 2
STRATEGY = hr.ParameterServer(WORKERS, servers=SERVERS, backups=1)
TIMEOUT_S = 3.0


def train(make: Callable[..., hr.Job], epochs: int, every_s: float, seed: int) -> dict[str, float]:
    """Trains through a storm, or none (0); returns figures."""
    storm = Storm(STRATEGY, every_s, seed)
    job = dataclasses.replace(make(epochs=epochs), seed=seed)
    run = hr.fit(job, STRATEGY, on_event=storm, timeout_s=TIMEOUT_S)
    steps = [event.time_s for event in run.events if isinstance(event, Stepped)]
    began, ended = min(steps), max(steps)
    examples = epochs * 60_000
    lost = [event for event in run.events if isinstance(event, Lost) and event.lost < WORKERS]
    return {
        "seconds": ended - began,
        "examples_per_live_worker_s": examples / live_seconds(run.events, WORKERS, began, ended),
        "accuracy": 100 * run.metrics["accuracy"],
        "kept_within": kept_within(run.events, [at for at, _, _ in storm.struck], WORKERS),
        "faults": len(storm.struck),
        "workers_lost": len(lost),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every-s", type=float, default=15.0, help="seconds between two faults")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calm-every", type=int, default=1, help="rounds to one undisturbed run before them; 0: none")
    arguments = parser.parse_args()
    make = runpy.run_path(str(ROOT / "examples" / "fashion_mnist" / "job.py"))["job"]
    rows = []
    calm: dict[str, float] = {}
    for seed in range(arguments.rounds):
        if arguments.calm_every and seed % arguments.calm_every == 0:
            calm = train(make, arguments.epochs, 0.0, seed)
        storm = train(make, arguments.epochs, arguments.every_s, seed)
        row: dict[str, object] = {"calm": calm, "storm": storm}
        if calm:
            row["kept"] = storm["examples_per_live_worker_s"] / calm["examples_per_live_worker_s"]
        rows.append(row)
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    name = f"kill-storm-{arguments.every_s:g}s.json"
    (results / name).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
