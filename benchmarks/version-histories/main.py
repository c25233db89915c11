"""How many histories of versions break a rule, and whether the checker sees bugs that are planted."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from datetime import date
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from headrace.parameter_server.core import shard
from parameter_server.operations import BareBook, violations
from parameter_server.seeded import SEEDED, found, world
from parameter_server.virtual import Machines, run
from parameter_server.worlds import mutated

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--histories", type=int, default=500)
    parser.add_argument("--operations", type=int, default=2000, help="of a history, at least")
    options = parser.parse_args()
    wrong, operations, least = 0, 0, 1 << 60
    for seed in range(options.histories):
        # Some leave before they have asked for all.
        made, bound = world(seed, 2 * options.operations)
        history = run(made, Machines(book=BareBook))
        wrong += bool(violations(history.operations, len(made.paces), bound))
        operations += len(history.operations)
        least = min(least, len(history.operations))
    bugs = {bug: bool(found(Machines(mutated(shard, "Shard", *SEEDED[bug]), book=BareBook), 100)) for bug in SEEDED}
    record = {
        "date": date.today().isoformat(), "machine": platform.machine(), "torch": torch.__version__,
        "options": vars(options), "operations": operations, "least": least, "wrong": wrong, "bugs": bugs,
    }  # fmt: skip
    (Path(__file__).parent / "results" / "version-histories.json").write_text(json.dumps(record, indent=1) + "\n")
    bound = f", at most {3 / options.histories:.1%} with 95 % confidence" if not wrong else ""
    print(f"{wrong} of {options.histories} histories ({operations:,} operations, at least {least:,} each){bound}")
    print(f"{sum(bugs.values())} of {len(bugs)} seeded bugs found")
