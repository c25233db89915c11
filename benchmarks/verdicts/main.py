"""Jobs that are slow on purpose: whether the verdict is right, and whether its remedy is faster; see README.md."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cases import CASES, Case

HERE = Path(__file__).parent
HEADRACE = Path(sys.executable).parent / "headrace"


def run(command: str, run_dir: Path) -> dict[str, Any]:
    """Runs `headrace train ...` and returns its report."""
    words = [str(HEADRACE), *shlex.split(command)[1:], "--run-dir", str(run_dir)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env={**os.environ, "COLUMNS": "200"})
    assert done.returncode == 0, f"{command}\n{done.stderr[-2000:]}"
    reported = subprocess.run([HEADRACE, "report", str(run_dir), "--json"], check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(reported.stdout)
    return found["runs"][0] if "runs" in found else found


def tried(case: Case, rounds: int, folder: Path) -> dict[str, Any]:
    """Returns what was said of a case, and how much faster its remedy is: the median of alternating runs."""
    command = shlex.join(["headrace", "train", str(HERE / "job.py"), "--set", f"case={case.job}", *case.arguments])
    rates, ratios, verdicts = [], [], []
    remedy = ""
    for number in range(rounds):
        before = run(command, folder / f"{number}-before")
        verdicts.append(before["bottleneck"])
        remedy = remedy or before["bottleneck"]["command"]
        rates.append(before["examples_per_s"])
        if case.ill and remedy:
            after = run(remedy, folder / f"{number}-after")
            ratios.append(after["examples_per_s"] / rates[-1])
    first = verdicts[0]
    right = [each["kind"].startswith(case.kind) and case.said in each["because"] for each in verdicts]
    return {
        "case": case.name,
        "verdict": f"{first['kind']}: {first['because']}",
        "right": right,
        "remedy": remedy.replace(str(HERE), "benchmarks/verdicts") if case.ill else "",
        "times as fast": round(statistics.median(ratios), 2) if ratios else None,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="a part of the names of cases")
    chosen = parser.parse_args()
    rows = []
    for case in CASES:
        if chosen.only not in case.name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            rows.append(tried(case, chosen.rounds, Path(folder)))
        print(json.dumps(rows[-1], ensure_ascii=False), flush=True)
    ill = [row for row, case in zip(rows, CASES, strict=False) if row["times as fast"]]
    print(f"{sum(all(row['right']) for row in rows)} of {len(rows)} verdicts right in every run")
    print(f"{sum(row['times as fast'] > 1 for row in ill)} of {len(ill)} remedies faster")
    if not chosen.only:
        (HERE / "results").mkdir(exist_ok=True)
        (HERE / "results" / "verdicts.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
