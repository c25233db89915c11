"""16 configurations of this machine: predicted from one worker's profile and measured links, and measured."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from configurations import BATCH, CONFIGURATIONS, Configuration, job
from harness import TUNED, machine
from on_hosts import hosts, run

import headrace as hr
from headrace.spec.cluster import Host
from headrace.spec.model import ModelSpec

FOLDER = Path(__file__).resolve().parent
KEPT = FOLDER.parents[1] / ".cache" / "prediction-truth"
"""Measured links and rows, so that the configurations can be measured in several calls."""
RANK = FOLDER / "configuration_rank.py"
HOSTS = 3
_LEAST_STEPS, _LEAST_PERIODS = 16, 4
_PROFILE_S = 0.7


def profiled(case: Configuration) -> ModelSpec:
    """Returns the profile of one worker with one thread: now, because such a machine drifts from minute to minute."""
    sizes = (case.batch // case.micro_batches,) if case.micro_batches > 1 else ()
    return hr.profile(job(case.model, BATCH[case.model]), threads=1, batch_sizes=sizes, seconds=_PROFILE_S)


def linked(mbit: int) -> hr.Cluster:
    """Returns three hosts of one core and their links, measured if they have not been."""
    file = KEPT / f"{mbit}.toml"
    if not file.exists():
        there = importlib.util.spec_from_file_location("doctor", FOLDER.parent / "cluster-doctor" / "main.py")
        assert there
        assert there.loader
        doctor = importlib.util.module_from_spec(there)
        sys.path.insert(0, str(FOLDER.parent / "cluster-doctor"))
        there.loader.exec_module(doctor)
        hosts("up", str(HOSTS), "--rate", f"{mbit}mbit")
        cluster, wrong, _ = doctor.doctor(count=HOSTS)
        print(*wrong, sep="\n", file=sys.stderr)
        file.write_text(replace(cluster, hosts=tuple(replace(each, cores=1) for each in cluster.hosts)).toml())
    return hr.Cluster.load(file)


def predict(case: Configuration) -> hr.Prediction:
    """Returns what is predicted of a configuration."""
    model = profiled(case)
    if case.mbit:
        # The hosts share one machine's caches and memory, as workers of one host do.
        assert model.compute
        speed, cluster = 1 / model.compute.among(2), linked(case.mbit)
        cluster = replace(cluster, hosts=tuple(replace(host, speed=speed) for host in cluster.hosts))
    else:
        cluster = hr.Cluster((Host("here", 2, 16 << 30),))
    return hr.simulate(model, cluster, case.strategy, global_batch_size=case.batch)


def measure(number: int, steps: int) -> dict[str, Any]:
    """Returns what rank 0 says of so many steps of a configuration."""
    case = CONFIGURATIONS[number]
    if case.mbit:
        hosts("up", str(HOSTS), "--rate", f"{case.mbit}mbit")
        return run(RANK, 2 + case.servers, str(number), str(steps))[0]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, str(RANK), str(number), str(steps), folder], check=True)
        said: dict[str, Any] = json.loads(Path(folder, "0.json").read_text())
        return said


def row(number: int, seconds: float) -> dict[str, Any]:
    """Returns the row of a configuration: what is predicted before and after its run, on average, and measured.

    The second prediction has a profile of its own; that of the first gives the number of steps.
    """
    case = CONFIGURATIONS[number]
    before = predict(case)
    periods = max(_LEAST_PERIODS, round(seconds / before.step_s / case.period))
    measured = measure(number, max(_LEAST_STEPS, periods * case.period))
    both = [plain(before), plain(predict(case))]
    predicted = {name: statistics.fmean(each.get(name, 0.0) for each in both) for name in both[0]}
    return {"name": case.name, "predicted": predicted, "predictions": both, "measured": measured}


def plain(found: hr.Prediction) -> dict[str, float]:
    """Returns what a prediction says."""
    return {
        "rate": found.examples_per_s,
        "memory_bytes": found.memory_bytes,
        "moved_bytes": found.moved_bytes,
        **{f"{name} s": share * found.step_s for name, share in found.shares.items()},
    }


def ranks(values: Sequence[float]) -> list[int]:
    """Returns each value's place in their order."""
    order = sorted(range(len(values)), key=lambda place: values[place])
    return [order.index(place) for place in range(len(values))]


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns the rank correlation of values that all differ."""
    count = len(one)
    squares = sum((a - b) ** 2 for a, b in zip(ranks(one), ranks(other), strict=True))
    return 1 - 6 * squares / (count * (count**2 - 1))


def errors(rows: Sequence[dict[str, Any]], what: str) -> list[float]:
    """Returns by how much each prediction is too high, as a part of what was measured."""
    return [each["predicted"][what] / each["measured"][what] - 1 for each in rows]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the rows as Markdown."""
    lines = [
        "| configuration | examples/s | predicted | error | MB | predicted | error |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]
    for each, rate, memory in zip(rows, errors(rows, "rate"), errors(rows, "memory_bytes"), strict=True):
        measured, predicted = each["measured"], each["predicted"]
        lines.append(
            f"| {each['name']} | {measured['rate']:.4g} | {predicted['rate']:.4g} | {rate:+.1%} "
            f"| {measured['memory_bytes'] / 1e6:.0f} | {predicted['memory_bytes'] / 1e6:.0f} | {memory:+.1%} |"
        )
    return "\n".join(lines)


def figures(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns what the targets are about."""
    rate, memory = errors(rows, "rate"), errors(rows, "memory_bytes")
    return {
        "rate, median error": statistics.median(map(abs, rate)),
        "rate, worst error": max(map(abs, rate)),
        "rank correlation": spearman(*([each[kind]["rate"] for each in rows] for kind in ("predicted", "measured"))),
        "memory, median error": statistics.median(map(abs, memory)),
        "memory, most too low": -min(0.0, *memory),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=f"1-{len(CONFIGURATIONS)}", help="the configurations to measure now: 1-8")
    parser.add_argument("--seconds", type=float, default=6.0, help="that each configuration is predicted to train for")
    parser.add_argument("--fresh", action="store_true", help="forget links and rows of earlier calls")
    options = parser.parse_args()
    os.environ.update(TUNED)
    # Others may have networks here, too.
    os.environ.setdefault("HEADRACE_HOSTS", "truth")
    first, _, last = options.only.partition("-")
    KEPT.mkdir(parents=True, exist_ok=True)
    for file in KEPT.iterdir() if options.fresh else ():
        file.unlink()
    try:
        for number in range(int(first) - 1, int(last or first)):
            found = row(number, options.seconds)
            (KEPT / f"row-{number + 1}.json").write_text(json.dumps(found, indent=1))
            print(f"{number + 1:2} {found}", flush=True)
    finally:
        hosts("down")
    files = [KEPT / f"row-{number + 1}.json" for number in range(len(CONFIGURATIONS))]
    rows = [json.loads(file.read_text()) for file in files if file.exists()]
    print(table(rows))
    if len(rows) > 1:
        print(*(f"{name}: {value:.3f}" for name, value in figures(rows).items()), sep="\n")
    if len(rows) == len(CONFIGURATIONS):
        document = {**machine(), "rows": rows, "figures": figures(rows)}
        (FOLDER / "results" / "this_machine.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
