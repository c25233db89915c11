"""Two trees of headrace beside each other, case by case in turns: `main.py OTHER_TREE [--rounds 5] [--only CASE]`."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
OURS = HERE.parents[1]
MEASURED = ("one_device, tiny", "one_device, cnn", "mirrored, mlp", "mirrored, cnn", "pipeline, mlp")
SCRIPTS = {
    "all-reduce, 100 MB": ("rivals/ours_all_reduce.py", "2", "25000000"),
    "all-reduce, 4 kB": ("rivals/ours_all_reduce.py", "2", "1024"),
    "push-pull, 100 MB": ("rivals/ours_push_pull.py", "25000000"),
    "push-pull, 4 kB": ("rivals/ours_push_pull.py", "1024"),
}
START = "start-up of the command"


def run(tree: Path, *command: str) -> str:
    """Returns what a Python program prints that imports this tree's headrace."""
    path = os.pathsep.join(map(str, (tree / "src", tree / "benchmarks")))
    environment = {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run(
        [sys.executable, *command], env=environment, cwd=tree, check=True, capture_output=True, text=True
    )
    return ended.stdout


def start_up(tree: Path) -> float:
    """Returns seconds from the command to the end of the first step of two workers."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "run"
        began = time.monotonic()
        job = str(HERE.parent / "start-up" / "job.py")
        code = "from headrace.cli import main; main()"
        run(tree, "-c", code, "train", job, "--strategy", "mirrored", "--workers", "2", "--run-dir", str(directory))
        events = [json.loads(line) for line in (directory / "events" / "rank-0.jsonl").read_text().splitlines()]
        first = next(event for event in events if event["kind"] == "stepped")
        launcher = json.loads((directory / "events" / "launcher.jsonl").read_text().splitlines()[0])
        return float(launcher["clock_s"] + first["time_s"] - began)


def figure(tree: Path, case: str) -> float:
    """Returns one measurement; less is better."""
    if case == START:
        return start_up(tree)
    if case in SCRIPTS:
        name, *arguments = SCRIPTS[case]
        return float(run(tree, str(tree / "benchmarks" / name), *arguments).split()[0])
    return float(run(tree, str(HERE / "measure.py"), case).split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("other", type=Path, help="a checkout of another commit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", action="append", help="a case, or several")
    arguments = parser.parse_args()
    cases = arguments.only or [*MEASURED, *SCRIPTS, START]
    results = {}
    for case in cases:
        pairs = []
        for turn in range(arguments.rounds):
            trees = (OURS, arguments.other.resolve())
            # The first of a pair alternates, so that a drift of the machine favours neither.
            order = trees if turn % 2 == 0 else trees[::-1]
            taken = {tree: figure(tree, case) for tree in order}
            pairs.append((taken[trees[0]], taken[trees[1]]))
        ratios = sorted(here / there for here, there in pairs)
        results[case] = {"this / other": statistics.median(ratios), "lowest": ratios[0], "highest": ratios[-1],
                         "this": statistics.median(a for a, _ in pairs),
                         "other": statistics.median(b for _, b in pairs)}  # fmt: skip
        print(case, json.dumps({key: round(value, 4) for key, value in results[case].items()}), flush=True)
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "latest.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
