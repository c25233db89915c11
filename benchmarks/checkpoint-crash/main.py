"""What crashes leave of checkpoints: processes killed at random, and power cut on a modelled disk after every act."""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from checkpoint.crash_histories import MUTANTS, at_once, complaint, fingerprint, history, killed_histories
from checkpoint.kills import campaign
from checkpoint.model_disk import Act, Crash, crashes

Mutation = Callable[[Sequence[Act]], list[Act]]


def power_cuts(dice: random.Random, change: Mutation = list) -> Iterator[Crash]:
    """Yields without end what a power cut could leave of saves, some by processes that were killed before."""
    whole = history()
    interrupted = list(killed_histories())
    while True:
        yield from crashes(change(at_once(whole.acts, dice)), dice, 200)
        for disk, since in dice.sample(interrupted, 10):
            acts = at_once(disk.acts, dice)
            yield from crashes(change(acts), dice, 50, since if change is list else 0)


def replay(states: int, seed: int) -> dict[str, object]:
    """Looks at so many different states; returns how many there were and what was wrong with them."""
    seen: set[bytes] = set()
    wrong: list[str] = []
    looked = 0
    for crash in power_cuts(random.Random(seed)):
        looked += 1
        mark = fingerprint(crash)
        if mark in seen:
            continue
        seen.add(mark)
        if said := complaint(crash):
            wrong.append(said)
        if len(seen) % 5000 == 0:
            print(f"\r{len(seen):,} of {states:,} states, {len(wrong)} wrong", end="", file=sys.stderr, flush=True)
        if len(seen) >= states:
            break
    print(file=sys.stderr)
    return {"sampled": looked, "different": len(seen), "wrong": wrong}


def mutants(most: int, seed: int) -> dict[str, int | None]:
    """Returns how many states it took to find each thing that can be left out; None where `most` did not do."""
    found: dict[str, int | None] = {}
    for name, mutant in MUTANTS.items():
        found[name] = None
        for count, crash in enumerate(power_cuts(random.Random(seed), mutant), 1):
            if complaint(crash):
                found[name] = count
            if found[name] is not None or count == most:
                break
        print(f"{name:45} found after {found[name]} states")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=1000, help="processes killed")
    parser.add_argument("--states", type=int, default=100_000, help="different states of the modelled disk")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        killed = campaign(arguments.kills, Path(folder) / "checkpoints", arguments.seed)
    kills_s = time.monotonic() - began
    print(f"{killed.sound} of {arguments.kills} killed processes left a loadable checkpoint, the one they had promised")
    print(f"{killed.saves} saves; trials that left something half-done, by its ending: {dict(killed.left)}")
    cuts = replay(arguments.states, arguments.seed)
    print(f"{cuts['different']:,} different states after a power cut, {len(cuts['wrong'])} wrong")  # type: ignore[arg-type]
    found = mutants(1_000_000, arguments.seed)
    wrong = [*killed.wrong, *cuts["wrong"], *[name for name, count in found.items() if count is None]]  # type: ignore[misc]
    for line in wrong[:20]:
        print(line)
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    document = {
        "date": date.today().isoformat(),
        "arguments": vars(arguments),
        "torch": torch.__version__,
        "kills": {"sound": killed.sound, "saves": killed.saves, "left": dict(killed.left), "wrong": killed.wrong},
        "power cuts": cuts,
        "states until a mutant is found": found,
        "seconds": {"kills": round(kills_s, 1), "all": round(time.monotonic() - began, 1)},
    }
    (results / "crash.json").write_text(json.dumps(document, indent=1) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
