"""The YouTube recommender on MovieLens-100K: asynchronous workers, one device, and popularity. See README.md."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "youtube_recommender"))

from harness import alternate, difference, report
from recommend import measure, measure_popular
from watches import movielens

STRATEGIES = {"one device": "one_device", "4 asynchronous workers": "parameter_server(workers=4, servers=2)"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    watches = movielens()
    measured = {
        name: [measure(watches, strategy, seed) for seed in range(seeds)] for name, strategy in STRATEGIES.items()
    }
    measured["popularity"] = [measure_popular(watches)] * seeds
    for figure in measured["popularity"][0]:
        contestants = {name: iter([each[figure] for each in own]).__next__ for name, own in measured.items()}
        figures = alternate(contestants, seeds)
        points = {
            f"{name} - {other}": difference(figures, name, other)
            for name, other in (
                ("4 asynchronous workers", "one device"),
                ("one device", "popularity"),
                ("4 asynchronous workers", "popularity"),
            )
        }
        report(Path(__file__).parent, figure.replace(" ", "-").replace("@", "-at-"), f"%, {figure}", figures, points)


if __name__ == "__main__":
    main()
