"""Plants faults in copies of the package, one at a time, and lets `headrace verify` look for them.

python benchmarks/verify-faults/main.py [WORD ...] [--results FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "src"
COMMAND = [sys.executable, "-c", "from headrace.cli import main; main()", "verify", str(HERE / "job.py"), "--json"]
TIMEOUT_S = 300


def verified(source: Path, kind: str, strategy: str) -> tuple[int, Mapping[str, Any], str]:
    """Returns the exit code, the document and what was said of verifying a kind of job with this source."""
    environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"}
    command = [*COMMAND, "--workers", "2", "--strategy", strategy, "--set", f"kind={kind}"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    return ran.returncode, json.loads(ran.stdout) if ran.stdout.strip() else {}, ran.stderr


def outcome(folder: Path, fault: Mapping[str, str]) -> dict[str, Any]:
    """Plants a fault, verifies, and takes it out again."""
    file = folder / "headrace" / fault["file"]
    text = file.read_text(encoding="utf-8")
    found: dict[str, Any] = {"what": fault["what"], "kind": fault["kind"], "strategy": fault["strategy"]}
    if text.count(fault["old"]) != 1:
        return {**found, "found": False, "by": f"stale: its text is there {text.count(fault['old'])} times"}
    file.write_text(text.replace(fault["old"], fault["new"]), encoding="utf-8")
    try:
        code, document, said = verified(folder, fault["kind"], fault["strategy"])
    finally:
        file.write_text(text, encoding="utf-8")
    rows = [row for row in document.get("rows", ()) if row["verdict"] == "differs"]
    error = document.get("error", {}).get("type", "")
    by = rows[0]["what"] if rows else error or said[-200:]
    # A fault that only breaks the program is found by anything.
    return {
        **found,
        "found": code == 1 and (bool(rows) or error == "RanksDiffer"),
        "by": by,
        "cause": document.get("cause", ""),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--results", type=Path)
    chosen = parser.parse_args(arguments)
    every = tomllib.loads((HERE / "faults.toml").read_text(encoding="utf-8"))["fault"]
    faults = [each for each in every if not chosen.words or any(word in each["what"] for word in chosen.words)]
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(SOURCE / "headrace", folder / "headrace", ignore=shutil.ignore_patterns("__pycache__"))
        for kind, strategy in sorted({(each["kind"], each["strategy"]) for each in faults}):
            code, _, said = verified(folder, kind, strategy)
            if code:
                print(f"{kind}, {strategy}: differs without a fault: {said[-300:]}", flush=True)
        for fault in faults:
            began = time.monotonic()
            found.append(outcome(folder, fault))
            verdict = "found" if found[-1]["found"] else "NOT FOUND"
            print(
                f"{verdict:<10}{found[-1]['by']:<28.28} {fault['what']} [{time.monotonic() - began:.0f} s]", flush=True
            )
    count = sum(each["found"] for each in found)
    print(f"{count} of {len(found)}")
    if chosen.results:
        facts = {"date": date.today().isoformat(), "python": platform.python_version(), "cores": os.cpu_count()}
        chosen.results.write_text(
            json.dumps({**facts, "found": count, "faults": found}, indent=1) + "\n", encoding="utf-8"
        )
    sys.exit(count != len(found))


if __name__ == "__main__":
    main(sys.argv[1:])
