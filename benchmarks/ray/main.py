"""The Ray engine against the local one, one host, two workers: examples/s of the cnn, and seconds to the first step."""

from __future__ import annotations

import argparse
import functools
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
from harness import alternate, difference, ratio, report
from workloads import EXAMPLES_A_WORKER, examples, throughput

import headrace as hr
from headrace.engine.base import Engine
from headrace.engine.local.engine import LocalEngine
from headrace.models import cnn
from headrace.spec.events import Stepped

STRATEGIES = {"mirrored": hr.Mirrored(2), "downpour": hr.Downpour(2)}


@contextmanager
def cluster() -> Iterator[str]:
    """Starts a Ray cluster of this machine alone; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ray = Path(sys.executable).parent / "ray"
    with tempfile.TemporaryDirectory(prefix="hr-ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        command = [ray, "start", "--head", "--block", f"--port={port}", "--node-ip-address=127.0.0.1", "--num-cpus=4"]
        command += ["--object-store-memory=200000000", "--include-dashboard=false", "--disable-usage-stats"]
        log = Path(folder) / "log"
        with log.open("wb") as output:
            head = subprocess.Popen([*command, f"--temp-dir={folder}"], stdout=output, stderr=output)
        try:
            while b"--block" not in log.read_bytes():
                if head.poll() is not None:
                    raise RuntimeError(log.read_text())
                time.sleep(0.1)
            yield f"127.0.0.1:{port}"
        finally:
            head.terminate()
            head.wait()


def start(make: Callable[[], Engine], strategy: hr.Strategy) -> float:
    """Returns seconds from an engine's making to the end of a run's first step."""
    job = hr.Job(
        model=cnn,
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        data=hr.data.from_arrays(*examples("cnn", 512)),
        global_batch_size=2 * EXAMPLES_A_WORKER,
        steps=2,
    )
    began = time.monotonic()
    engine = make()
    try:
        run = hr.fit(job, strategy, engine=engine)
    finally:
        engine.close()
    (first,) = [event for event in run.events if isinstance(event, Stepped) and event.rank == 0 and event.step == 0]
    started = next(event for event in run.events if event.kind == "run_started")
    return started.clock_s + first.time_s - began


def main() -> None:
    """Measures all and writes the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each run")
    arguments = parser.parse_args()
    folder, rounds, seconds = Path(__file__).parent, arguments.rounds, arguments.seconds
    os.environ.pop("RAY_ADDRESS", None)
    with cluster() as address:
        ray = partial(hr.RayEngine, address)
        kept = {"local": LocalEngine(), "ray": ray()}
        try:
            rates = alternate(
                {
                    f"{name}, {where}": partial(throughput, "cnn", strategy, 2, seconds, engine)
                    for name, strategy in STRATEGIES.items()
                    for where, engine in kept.items()
                },
                rounds,
            )
        finally:
            for engine in kept.values():
                engine.close()
        ratios = {f"{name}, ray / local": ratio(rates, f"{name}, ray", f"{name}, local") for name in STRATEGIES}
        report(folder, "throughput", "examples/s", rates, ratios)
        makes: dict[str, Callable[[], Engine]] = {"local": LocalEngine, "ray": ray}
        starts = alternate(
            {where: partial(start, make, STRATEGIES["mirrored"]) for where, make in makes.items()}, rounds
        )
        report(folder, "start", "s", starts, {"ray - local": difference(starts, "ray", "local")})


if __name__ == "__main__":
    main()
