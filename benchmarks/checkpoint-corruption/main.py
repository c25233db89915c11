"""Flipped bits, truncations, missing and exchanged files: whether each is found and named."""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from datetime import date
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from checkpoint.damage import complaint, damages, prepare


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    began = time.monotonic()
    kinds: Counter[str] = Counter()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        sound = Path(folder) / "sound"
        prepare(sound)
        every = damages(random.Random(arguments.seed), sound)
        for count, damage in enumerate(itertools.islice(every, arguments.trials), 1):
            kinds[damage.kind] += 1
            if said := complaint(sound, damage, Path(folder) / "aside"):
                wrong.append(said)
            if count % 100 == 0:
                print(f"\r{count} of {arguments.trials}, {len(wrong)} wrong", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    for kind, count in kinds.items():
        print(f"{kind:30}{count:8,}")
    total = sum(kinds.values())
    print(f"{total - len(wrong):,} of {total:,} found, the one before loaded, the bad file named")
    for line in wrong[:20]:
        print(line)
    results = Path(__file__).parent / "results"
    results.mkdir(exist_ok=True)
    document = {
        "date": date.today().isoformat(),
        "arguments": vars(arguments),
        "torch": torch.__version__,
        "trials": dict(kinds),
        "wrong": wrong,
        "seconds": round(time.monotonic() - began, 1),
    }
    (results / "corruption.json").write_text(json.dumps(document, indent=1) + "\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
