"""All that a machine with GPUs can show of headrace: tests, overhead, data parallelism, the hardware. See README.md.

One part after the other, each a command; what failed does not keep the rest from running.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from harness import machine  # noqa: E402

TAIL_LINES = 40
"""Of what a part says, kept in the report."""

INTERRUPTED_S = 10.0
"""A part has so long to end after an interrupt."""


@dataclass(frozen=True)
class Part:
    """A command, the folders where it leaves results, and why it cannot run here, "" where it can."""

    name: str
    command: Sequence[str]
    results: Sequence[Path] = ()
    lacks: str = ""


def parts(device: str, quick: bool) -> list[Part]:
    """Returns what there is to run on a kind of device."""
    python, here = sys.executable, ROOT / "benchmarks"
    sizes = ["--device", device, *(("--rounds", "1", "--seconds", "1.5") if quick else ())]
    overhead, parallel = here / "cuda-overhead", here / "gpu"
    devices = torch.cuda.device_count() if device == "cuda" else 2
    large = ["gpt2", *(["resnet50"] if find_spec("torchvision") else [])]
    headrace = [python, "-m", "headrace"]
    return [
        Part("doctor", [*headrace, "doctor", "--json"]),
        Part(
            "tests",
            [python, "-m", "pytest", "-q", "-n4", "--full", "--cold", "tests/gpu"],
            lacks="" if device == "cuda" else "they need a CUDA device",
        ),
        Part("overhead", [python, str(overhead / "main.py"), *sizes], [overhead / "results"]),
        Part(
            "large",
            [python, str(overhead / "main.py"), *sizes, "--workloads", *large],
            [overhead / "results"],
            lacks="" if device == "cuda" else "models of 25 and 124 million parameters need a CUDA device",
        ),
        Part("waits", [python, str(parallel / "waits.py"), "--device", device], [parallel / "results"]),
        Part(
            "checkpoints",
            [python, str(parallel / "checkpoints.py"), "--device", device, *(("--millions", "20") if quick else ())],
            [parallel / "results"],
        ),
        Part(
            "data parallel",
            [python, str(parallel / "data_parallel.py"), *sizes],
            [parallel / "results"],
            lacks="" if devices > 1 else f"it needs two GPUs, and there is {devices}",
        ),
        Part("shared", [python, str(parallel / "data_parallel.py"), "--shared", *sizes], [parallel / "results"]),
        Part("hardware", [*headrace, "bench", "--quick", "--json", *(("--only", "matrix") if quick else ())]),
    ]


def run(part: Part, limit_s: float | None) -> dict[str, object]:
    """Runs a part; returns its exit code, seconds, answer or last lines, and what it has left in its results.

    A part that takes longer than `limit_s` is interrupted, as by Ctrl-C, and killed where that does not end it.
    """
    began, before = time.monotonic(), written(part)
    with subprocess.Popen(part.command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            output, complaints = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                output, complaints = process.communicate(timeout=INTERRUPTED_S)
            except subprocess.TimeoutExpired:
                process.kill()
                output, complaints = process.communicate()
    return {
        "command": " ".join(part.command).replace(f"{ROOT}/", ""),
        "code": process.returncode,
        "seconds": round(time.monotonic() - began, 1),
        **said(output),
        "complained": complaints.splitlines()[-TAIL_LINES:] if process.returncode else [],
        "results": {path.name: json.loads(path.read_text()) for path, _ in sorted(written(part) - before)},
    }


def said(output: str) -> dict[str, object]:
    """Returns the JSON document that a command has printed, or its last lines."""
    if output.startswith("{") and output.endswith("}\n"):
        return {"answer": json.loads(output)}
    return {"said": output.splitlines()[-TAIL_LINES:]}


def written(part: Part) -> set[tuple[Path, int]]:
    """Returns the files in a part's folders of results, each with the time of its last change."""
    return {(path, path.stat().st_mtime_ns) for folder in part.results for path in folder.glob("*.json")}


def accelerators() -> list[dict[str, object]]:
    """Returns name, memory and compute capability of each GPU."""
    found = (torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count()))
    return [
        {"name": each.name, "bytes": each.total_memory, "capability": f"{each.major}.{each.minor}"} for each in found
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu only tries the command out")
    parser.add_argument("--quick", action="store_true", help="one short round of each")
    parser.add_argument("--part-s", type=float, metavar="SECONDS", help="ends a part that takes longer")
    parser.add_argument("--only", default="", metavar="PART,PART", help="of doctor, tests, overhead, ...")
    parser.add_argument("--out", type=Path, default=Path("gpu-report.json"))
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here; --device cpu tries the command out without one", file=sys.stderr)
        return 3
    every = parts(arguments.device, arguments.quick)
    chosen = arguments.only.split(",") if arguments.only else [part.name for part in every]
    if unknown := set(chosen) - {part.name for part in every}:
        names = ", ".join(part.name for part in every)
        print(f"no part is called {' or '.join(sorted(unknown))}; there are {names}", file=sys.stderr)
        return 2
    report: dict[str, object] = {**machine(), "device": arguments.device, "gpus": accelerators(), "parts": {}}
    failed = []
    outcome: dict[str, object] = {}
    for part in every:
        if part.name not in chosen:
            continue
        if part.lacks:
            outcome[part.name] = {"left_out": part.lacks}
            print(f"{part.name:16} left out: {part.lacks}", flush=True)
            continue
        found = run(part, arguments.part_s)
        outcome[part.name] = found
        failed += [part.name] if found["code"] else []
        print(f"{part.name:16} {'failed' if found['code'] else 'ok':8} {found['seconds']:8} s", flush=True)
        # After each, so that what was found outlives an interruption.
        arguments.out.write_text(json.dumps({**report, "parts": outcome}, indent=1) + "\n")
    arguments.out.write_text(json.dumps({**report, "parts": outcome}, indent=1) + "\n")
    print(f"report: {arguments.out}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
