"""Makes ranks on simulated devices killed, frozen, late, different or endless, and fits many times: see README.md."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1] / "tests"))

from simulated.cluster import Ended, on_hosts  # noqa: E402  (from the tests)

LOST = "from simulated import lost\nlost.main()"
FITS = "from simulated import fits\nfits.main({times}, {failing})"
FAILING = (10, 45, 80)
HELD = ("threads", "descriptors", "groups", "blocks", "bytes")


@dataclass(frozen=True)
class Case:
    """A fault of rank 1 of `hosts` x `devices`; what the others say has `words`, within `limit_s` seconds."""

    fault: str
    hosts: int
    devices: int
    words: str
    limit_s: float
    environment: dict[str, str] = field(default_factory=dict)


NEVER = {"SIMULATED_FAULTS": json.dumps([{"rank": 0, "call": "all_reduce", "at": 3, "do": "never"}]), "LIMIT": "4"}
PLACES = ((1, 2), (2, 1), (2, 2))
CASES = [
    case
    for hosts, devices in PLACES
    for case in (
        Case("killed", hosts, devices, "rank 1 on ", 2.0, {"TIMEOUT": "30"}),
        Case("frozen", hosts, devices, "rank 1 on ", 3.0),
        Case("another", hosts, devices, "rank 1: broadcast (number ", 2.0, {"SIMULATED_MISMATCH": "hang"}),
        Case("never", hosts, devices, " has not ended, 4 s after rank ", 600.0, NEVER),
        Case("late", hosts, devices, "rank 1 has not come to ", 600.0, {"SECONDS": "60"}),
    )
]


def tried(case: Case) -> dict[str, Any]:
    """Returns what came of a case."""
    with tempfile.TemporaryDirectory() as folder:
        ended = on_hosts(
            LOST, Path(folder), case.hosts, case.devices, timeout_s=150, FAULT=case.fault, **case.environment
        )
    lines = [line for each in ended.said for line in each]
    told = [" ".join([line["ended"], *line.get("notices", [])]) for line in lines]
    seconds = [round(line["s"], 2) for line in lines if "s" in line]
    waits, unmeasured = case.fault == "late", case.fault == "never"
    right = (
        bool(told)
        and any(case.words in each for each in told)
        and (
            all(line["ended"] == "ok" for line in lines)
            if waits
            else unmeasured or max(seconds, default=case.limit_s) < case.limit_s
        )
    )
    return {
        "fault": case.fault,
        "hosts": case.hosts,
        "devices": case.devices,
        "right": right,
        "s": seconds,
        "said": told,
    }


def fits(times: int) -> dict[str, Any]:
    """Returns what so many fits of a process leave, of which some fail."""
    failing = [turn for turn in FAILING if turn < times]
    with tempfile.TemporaryDirectory() as folder:
        before = sorted(os.listdir("/dev/shm"))
        ended = on_hosts(FITS.format(times=times, failing=failing), Path(folder), launched=True, timeout_s=3000)
        left = sorted(set(os.listdir("/dev/shm")).difference(before))
    return {"times": times, "failing": failing, "codes": ended.codes, "shm": left, "ranks": _held(ended)}


def _held(ended: Ended) -> list[dict[str, Any]]:
    """Returns of each rank what it holds after the fourth fit and the last, and after how many it holds another."""
    told = []
    for lines in ended.said:
        held = [{what: line[what] for what in HELD} for line in lines]
        apart = [turn for turn, each in enumerate(held) if turn > 3 and each != held[3]]
        counted = [
            {what: dict(Counter(value)) if isinstance(value, list) else value for what, value in each.items()}
            for each in (held[3], held[-1])
        ]
        errors = sum(bool(line["error"]) for line in lines)
        told.append({"fits": len(lines), "errors": errors, "settled": counted[0], "last": counted[1], "apart": apart})
    return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="the faults that contain a word; fits for those alone")
    parser.add_argument("--fits", type=int, default=100)
    arguments = parser.parse_args()
    path = HERE / "results" / "lost-ranks.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    results["date"], results["load"] = date.today().isoformat(), os.getloadavg()
    bad = 0
    for case in CASES:
        if arguments.only in case.fault:
            row = tried(case)
            bad += not row["right"]
            results[f"{case.fault} {case.hosts} x {case.devices}"] = row
            path.write_text(json.dumps(results, indent=1) + "\n")
            print(f"{case.hosts} x {case.devices}  {case.fault:8} {row['right']!s:5} {row['s']}", flush=True)
    if arguments.only in "fits":
        results["fits"] = row = fits(arguments.fits)
        bad += any(row["codes"]) or bool(row["shm"]) or any(rank["apart"] for rank in row["ranks"])
        print(json.dumps(row), flush=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    return bad


if __name__ == "__main__":
    sys.exit(main())
