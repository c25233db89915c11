"""Alternating runs, medians, ratios: how every figure here is made.

These machines drift by tens of per cent from minute to minute, so rivals take turns (A B C A B C ...), each row
is the median of its runs, and ratios are medians of the ratios within a round.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path

import torch

RIVALS = Path(__file__).parent / "rivals"

# What headrace gives its workers; quote ceilings under the same.
TUNED = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


def alternate(contestants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Runs all contestants in turn, `rounds` times; returns every figure."""
    figures: dict[str, list[float]] = {name: [] for name in contestants}
    for round_ in range(rounds):
        for name, contestant in contestants.items():
            figures[name].append(contestant())
            print(f"round {round_ + 1}/{rounds}  {name:36} {figures[name][-1]:12.4f}", file=sys.stderr, flush=True)
    return figures


def ratio(figures: Mapping[str, list[float]], ours: str, theirs: str) -> float:
    """Returns the median over rounds of ours / theirs."""
    return statistics.median(a / b for a, b in zip(figures[ours], figures[theirs], strict=True))


def difference(figures: Mapping[str, list[float]], ours: str, theirs: str) -> float:
    """Returns the median over rounds of ours - theirs."""
    return statistics.median(a - b for a, b in zip(figures[ours], figures[theirs], strict=True))


def rival(name: str, *arguments: str, copies: int = 1, tuned: bool = False, python: str = sys.executable) -> float:
    """Runs `copies` of a rival's script at the same time; returns the sum of the figures that they print last."""
    environment = {**os.environ, **(TUNED if tuned else {})}
    command = [python, str(RIVALS / f"{name}.py"), *arguments]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) for _ in range(copies)]
    outputs = [process.communicate()[0] for process in processes]
    return sum(float(output.strip().splitlines()[-1]) for output in outputs)


def report(folder: Path, name: str, unit: str, figures: Mapping[str, list[float]], ratios: Mapping[str, float]) -> None:
    """Prints a table and keeps it in `results/`."""
    lines = [f"{'':40}{'median':>12}{'least':>12}{'most':>12}   {unit}, {len(next(iter(figures.values())))} runs each"]
    for row, values in figures.items():
        lines.append(f"{row:40}{statistics.median(values):12.4g}{min(values):12.4g}{max(values):12.4g}")
    lines += [f"{row:60}{value:8.3f}" for row, value in ratios.items()]
    print("\n".join(lines))
    results = folder / "results"
    results.mkdir(exist_ok=True)
    document = {
        **machine(),
        "unit": unit,
        "figures": dict(figures),
        "medians": {row: statistics.median(values) for row, values in figures.items()},
        "ratios": dict(ratios),
    }
    (results / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")


def machine() -> dict[str, object]:
    """Returns when and on what figures were made."""
    return {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {_processor()}",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"
