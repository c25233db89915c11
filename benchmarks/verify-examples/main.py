"""Verifies the examples under every strategy, with the command line as a user would, 2 workers each.

python benchmarks/verify-examples/main.py [WORD ...] [--results FILE]

A WORD takes the examples or strategies that have it in their names.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from harness import machine

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = (
    "digits",
    "fashion_mnist",
    "char_lstm",
    "transformer_lm",
    "youtube_recommender",
    "alexnet_two_devices",
    "gan",
)
STRATEGIES = (
    "mirrored",
    "multi_worker_mirrored",
    "central_storage",
    "tpu",
    "fully_sharded",
    "pipeline",
    "tensor_parallel",
    "parameter_server",
    "parameter_server(staleness_bound=0)",
    "parameter_server(staleness_bound=2)",
    "downpour",
    "sandblaster",
    "parameter_averaging",
    "gossip",
    "unconnected",
)
TIMEOUT_S = 300


def verified(example: str, strategy: str, folder: str) -> dict[str, Any]:
    """Returns one run's seconds, exit code and result."""
    workers = ["--workers", "2"]
    command = ["headrace", "verify", str(ROOT / "examples" / example / "job.py"), "--strategy", strategy, *workers]
    began = time.monotonic()
    ended = subprocess.run(
        [str(Path(sys.executable).parent / command[0]), *command[1:], "--json"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=folder,
        check=False,
    )
    seconds = time.monotonic() - began
    said: dict[str, Any] = json.loads(ended.stdout)
    what = said["error"]["message"] if "error" in said else said.get("cause") or ""
    kept = {"result": outcome(ended.returncode, said), "said": what}
    return {"example": example, "strategy": strategy, "seconds": round(seconds, 1), "code": ended.returncode, **kept}


def outcome(code: int, said: dict[str, Any]) -> str:
    """Returns the result in a word or two."""
    if "error" in said:
        return "refused" if code == 2 else "failed"
    return "equal" if said["equal"] else "differs"


def main() -> None:
    """Prints a line for each run, and a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--results", type=Path)
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for example in EXAMPLES:
            for strategy in STRATEGIES:
                if given.words and not any(word in (example, strategy) for word in given.words):
                    continue
                rows.append(verified(example, strategy, folder))
                print(*(str(value) for value in rows[-1].values()), sep=" | ", flush=True)
    seconds = [row["seconds"] for row in rows]
    print(f"{len(rows)} runs: median {statistics.median(seconds):.1f} s, most {max(seconds):.1f} s")
    if given.results:
        given.results.write_text(json.dumps({"machine": machine(), "runs": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
