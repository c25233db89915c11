"""How many small pushes four servers take from sixteen workers."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from harness import alternate, report, rival

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    contestants = {
        "16 workers, 4 servers, 1 kB": partial(rival, "ours_pushes", "16", "4", "1024"),
        "1 worker, 4 servers, 1 kB": partial(rival, "ours_pushes", "1", "4", "1024"),
        "1 worker, 1 server, 1 kB": partial(rival, "ours_pushes", "1", "1", "1024"),
    }
    report(Path(__file__).parent, "pushes", "pushes/s", alternate(contestants, rounds), {})
