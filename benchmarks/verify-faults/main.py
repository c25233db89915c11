"""Plants faults in copies of the package, one at a time, and lets `headrace verify` look for them.

python benchmarks/verify-faults/main.py [WORD ...] [--results FILE]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import shutil
import signal
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
TIMEOUT_S = 300
IMPORTED = ("torch", "numpy", "typer", "rich")
"""What every trial imports besides headrace: each process is forked with it."""


def verified(source: Path, kind: str, strategy: str, processes: bool) -> dict[str, Any]:
    """Verifies a kind of job with the package in `source`; returns what came out, or the error.

    In threads of a forked process, or where `processes` are asked for (threads share random numbers), in real ones.
    """
    output = source / "output.json"
    output.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        sys.path.insert(0, str(source))
        sys.path.insert(0, str(HERE))
        os.environ["PYTHONPATH"] = str(source)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            output.write_text(json.dumps(trial(kind, strategy, processes)), encoding="utf-8")
        finally:
            os._exit(0)
    began = time.monotonic()
    while not os.waitpid(pid, os.WNOHANG)[0]:
        if time.monotonic() - began > TIMEOUT_S:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return json.loads(output.read_text(encoding="utf-8")) if output.exists() else {"error": "nothing came out"}


def trial(kind: str, strategy: str, processes: bool) -> dict[str, Any]:
    """Verifies here, with the package that `sys.path` has first."""
    hr: Any = importlib.import_module("headrace")
    resolve = importlib.import_module("headrace.strategies").resolve
    # The cause of a difference is not looked for: that takes several times as long.
    importlib.import_module("headrace.api.verification.verify").SUSPECTS = {}
    try:
        job = importlib.import_module("job").job(kind)
        engine = None if processes else hr.ThreadEngine()
        found = hr.verify(job, resolve(strategy, 2), double=True, engine=engine)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"differ": [row.what for row in found.differences]}


def outcome(folder: Path, fault: Mapping[str, str]) -> dict[str, Any]:
    """Plants a fault, verifies, and takes it out again."""
    file = folder / "headrace" / fault["file"]
    text = file.read_text(encoding="utf-8")
    found: dict[str, Any] = {"what": fault["what"], "kind": fault["kind"], "strategy": fault["strategy"]}
    if text.count(fault["old"]) != 1:
        return {**found, "found": False, "by": f"stale: its text is there {text.count(fault['old'])} times"}
    file.write_text(text.replace(fault["old"], fault["new"]), encoding="utf-8")
    try:
        result = verified(folder, fault["kind"], fault["strategy"], bool(fault.get("processes")))
    finally:
        file.write_text(text, encoding="utf-8")
    differ, error = result.get("differ", []), result.get("error", "")
    # A fault that only breaks the program is found by anything.
    named = bool(differ) or error.startswith("RanksDiffer")
    return {
        **found,
        "found": named,
        "by": (differ or [error])[0] if named or error else "",
        "cause": result.get("cause", ""),
    }


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True, help="also without a fault")
    chosen = parser.parse_args(arguments)
    for name in IMPORTED:
        importlib.import_module(name)
    every = tomllib.loads((HERE / "faults.toml").read_text(encoding="utf-8"))["fault"]
    faults = [each for each in every if not chosen.words or any(word in each["what"] for word in chosen.words)]
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(SOURCE / "headrace", folder / "headrace", ignore=shutil.ignore_patterns("__pycache__"))
        kinds = {(f["kind"], f["strategy"], bool(f.get("processes"))) for f in faults if chosen.check}
        for kind, strategy, own in sorted(kinds):
            if (result := verified(folder, kind, strategy, own)).get("differ") != []:
                print(f"without a fault {kind}, {strategy}: {result}", flush=True)
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
