"""How long large simulations and a plan over 1,000 candidates take, and their memory; each in a process of its own."""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from harness import machine

FOLDER = Path(__file__).resolve().parent


def asynchronous() -> str:
    """10,000 workers, 100 steps each, 100 servers."""
    from headrace.prediction.assumptions import Assumptions
    from headrace.prediction.simulation.simulate import simulate
    from headrace.strategies import ParameterServer

    strategy = ParameterServer(workers=10_000, servers=100)
    found = simulate(_model(), _gpus(10_100, 1), strategy, assumptions=Assumptions(steps=100))
    return f"{len(found.timeline.step):,} steps"


def hybrid() -> str:
    """4,096 devices: 64 replicas of 64 stages, 1,000 micro-batches."""
    from headrace.prediction.assumptions import Assumptions
    from headrace.prediction.simulation.simulate import simulate
    from headrace.strategies import Hybrid, Mirrored, Pipeline

    strategy = Hybrid(Mirrored(workers=64), Pipeline(stages=64, micro_batches=1000, schedule="1f1b"))
    simulate(_model(), _gpus(512, 8), strategy, global_batch_size=128_000, assumptions=Assumptions(steps=1))
    return f"{2 * 1000 * 4096:,} passes"


def plan() -> str:
    """A recommendation over at least 1,000 candidates: 24 layers, 256 hosts of 8 cores."""
    from headrace.prediction.recommendation.recommend import recommend
    from headrace.spec.cluster import Cluster, Host

    hosts = tuple(Host(f"h{index}", 8, 64_000_000_000) for index in range(256))
    found = recommend(_model(), Cluster(hosts, link_bytes_per_s=1.25e9, link_latency_s=1e-4), global_batch_size=8192)
    return f"{found.tried:,} candidates"


CASES: dict[str, Callable[[], str]] = {"asynchronous": asynchronous, "hybrid": hybrid, "plan": plan}


def _model():  # type: ignore[no-untyped-def]
    from headrace.spec.compute import BatchProfile, ComputeProfile, LayerSpec
    from headrace.spec.model import ModelSpec, ParameterSpec

    layers = tuple(LayerSpec(f"l{place}", (f"p{place}",), 4_000_000, 1e-3, 2e-3, 10**6, 10**6) for place in range(64))
    batch = BatchProfile(32, 0.064, 0.128, 64 * 10**6, layers)
    parameters = tuple(ParameterSpec(f"p{place}", (10**6,)) for place in range(64))
    return ModelSpec(parameters, layers=layers, compute=ComputeProfile((batch,), 0.004, 0.0, 0.05))


def _gpus(count: int, devices: int):  # type: ignore[no-untyped-def]
    from headrace.spec.cluster import Cluster, Host

    names = tuple(f"cuda:{index}" for index in range(devices))
    host = Host("", 8, 64_000_000_000, names, device_memory_bytes=16_000_000_000, bus_bytes_per_s=12e9)
    hosts = tuple(replace(host, name=f"h{index}") for index in range(count))
    return Cluster(hosts, device="cuda", link_bytes_per_s=25e9 / 8, link_latency_s=2e-5)


def measure(case: str) -> dict[str, object]:
    """Runs a case in this process; the import of torch is not counted."""
    import headrace.prediction.recommendation.recommend  # noqa: F401

    begun, busy = time.perf_counter(), time.process_time()
    size = CASES[case]()
    seconds, processor = time.perf_counter() - begun, time.process_time() - busy
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"case": case, "size": size, "seconds": seconds, "processor_s": processor, "peak_bytes": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=sorted(CASES))
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case)))
        return
    rows = []
    for case in CASES:
        done = subprocess.run([sys.executable, __file__, "--case", case], capture_output=True, text=True, check=True)
        row = json.loads(done.stdout.splitlines()[-1])
        rows.append(row)
        print(
            f"{case}: {row['size']}, {row['seconds']:.1f} s ({row['processor_s']:.1f} s of the processor), "
            f"{row['peak_bytes'] / 1e9:.2f} GB"
        )
    file = FOLDER / "results" / "speed.json"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
