"""Replicas under torchft, of which one is killed or frozen every so often and started again at once. See README.md."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import RIVALS, TUNED
from workloads import EXAMPLES_A_WORKER

from storm import RECOVERED_S

REPLICAS, FROZEN_S, START_S = 4, 3.0, 40.0
PORT = 29555
URL = f"http://localhost:{PORT}"


@dataclass
class Replica:
    """A process, when it was started and noticed to be gone, and where its steps are written."""

    process: subprocess.Popen[bytes]
    began: float
    file: Path
    ended: float = float("inf")


def storm(every_s: float, seconds: float, seed: int, folder: Path, python: str) -> dict[str, float]:
    """Trains in a storm; returns figures as `main.py storm` does."""
    chance, replicas, struck = random.Random(seed), list[Replica](), list[float]()
    program = str(Path(python).with_name("torchft_lighthouse"))
    limits = ["--heartbeat_timeout_ms", "3000", "--join_timeout_ms", "3000", "--quorum_tick_ms", "100"]
    address = ["--min_replicas", "1", "--bind", f"[::]:{PORT}"]
    with (folder / "lighthouse.log").open("wb") as log:
        quiet = {**os.environ, "RUST_LOG": "warn"}
        lighthouse = subprocess.Popen([program, *address, *limits], stdout=log, stderr=log, env=quiet)

    def start() -> Replica:
        file = folder / f"{len(replicas)}"
        command = [python, str(RIVALS / "torchft_replica.py"), URL, f"r{len(replicas)}_", str(file)]
        # It writes six lines a step otherwise.
        environment = {**os.environ, **TUNED, "OMP_NUM_THREADS": "1", "TORCHFT_LIGHTHOUSE": URL, "RUST_LOG": "warn"}
        with (folder / f"{len(replicas)}.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        return Replica(process, time.monotonic(), file)

    alive: list[Replica] = []
    try:
        for _ in range(REPLICAS):
            replicas.append(start())
            alive.append(replicas[-1])
        time.sleep(START_S)
        began = time.monotonic()
        while time.monotonic() + every_s < began + seconds:
            time.sleep(every_s)
            victim = chance.choice(alive)
            how = chance.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))
            struck.append(time.monotonic())
            victim.process.send_signal(how)
            victim.ended = time.monotonic() + (FROZEN_S if how == signal.SIGSTOP else 0.0)
            if how == signal.SIGSTOP:
                # As long as headrace takes to notice it: torchft itself starts nothing.
                time.sleep(FROZEN_S)
                victim.process.kill()
            alive.remove(victim)
            replicas.append(start())
            alive.append(replicas[-1])
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        ended = time.monotonic()
    finally:
        for each in replicas:
            each.process.kill()
            each.process.wait()
        lighthouse.kill()
        lighthouse.wait()
    edges = [began, *struck, ended]
    calm = [(a + RECOVERED_S * bool(index), b) for index, (a, b) in enumerate(pairwise(edges))]
    whole = rate(replicas, [(began, ended)])
    undisturbed = rate(replicas, [(a, b) for a, b in calm if b > a])
    return {
        "faults": len(struck),
        "seconds": ended - began,
        "rate": whole,
        "calm": undisturbed,
        "kept_within": whole / undisturbed,
    }


def rate(replicas: list[Replica], windows: list[tuple[float, float]]) -> float:
    """Returns the committed examples of a live replica in a second."""
    done = lived = 0.0
    for each in replicas:
        lines = [line.split() for line in each.file.read_text().splitlines()] if each.file.exists() else []
        steps = [float(at) for at, what in lines if what != "begun"]
        # From when it has imported torch, as headrace's workers begin.
        begun = next((float(at) for at, what in lines if what == "begun"), float("inf"))
        for a, b in windows:
            done += EXAMPLES_A_WORKER * sum(a < at <= b for at in steps)
            lived += max(0.0, min(each.ended, b) - max(begun, a))
    return done / lived


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every-s", type=float, default=15.0)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--python", default=sys.executable, help="of an environment with torchft")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = storm(arguments.every_s, 60 * arguments.minutes, arguments.seed, Path(folder), arguments.python)
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    (results / f"torchft-{arguments.every_s:g}s.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
