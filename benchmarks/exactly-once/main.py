"""How many acknowledged pushes are lost, and how many are applied twice, under faults of every kind."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections import Counter
from datetime import date
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from parameter_server.counting import World, count
from transport.faulty import Odds

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--pushes", type=int, default=1_000_000, help="in all")
    parser.add_argument("--width", type=int, default=1000, help="pushes of a round")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--kills", type=int, default=60, help="workers that are killed; as many are frozen")
    parser.add_argument("--odds", type=float, default=5e-5, help="of each kind of fault, a message")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    odds = Odds(options.odds, options.odds, options.odds, options.odds)
    rows, faults, lost, doubled = [], Counter[str](), 0, 0
    for way in ("local", "remote"):
        with tempfile.TemporaryDirectory() as folder:
            rounds = options.pushes // options.width // 2
            world = World(
                Path(folder), way, options.workers, options.servers, options.width, rounds, odds,
                options.kills // 2, options.kills // 2, options.seed,
            )  # fmt: skip
            result = count(world)
        faults.update(result.faults)
        lost, doubled = lost + result.lost, doubled + result.doubled
        rows.append({"way": way, "pushes": result.pushes, "lost": result.lost, "doubled": result.doubled,
                     "faults": dict(result.faults), "seconds": round(result.seconds, 1)})  # fmt: skip
        print(f"{way}: {json.dumps(rows[-1])}", file=sys.stderr, flush=True)
    pushes = sum(row["pushes"] for row in rows)
    record = {
        "date": date.today().isoformat(), "machine": platform.machine(), "torch": torch.__version__,
        "options": vars(options), "runs": rows,
    }  # fmt: skip
    out = Path(__file__).parent / "results" / "exactly-once.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{pushes:,} acknowledged pushes, {faults.total():,} faults: {dict(sorted(faults.items()))}")
    for name, number in (("lost", lost), ("applied twice", doubled)):
        bound = f"; at most {3 / pushes:.1e} of them, with 95 % confidence" if not number else ""
        print(f"{number} {name}{bound}")
