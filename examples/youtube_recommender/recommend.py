"""Trains candidate generation and ranking, and compares them with what is popular.

python examples/youtube_recommender/recommend.py --strategy "parameter_server(workers=4, servers=2)"
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import faiss
import job
import numpy as np
import ranking
import torch
from torch import nn
from watches import DATA, Watches

import headrace as hr

Suggest = Callable[[np.ndarray, int], np.ndarray]
"""For some impressions, so many films each, best first, that may be shown in their place: `(impressions, films)`."""


def hit_rate_and_recall(module: nn.Module, watches: Watches) -> tuple[float, float]:
    """Returns how good the candidates are, which are the films nearest to each user's vector.

    The hit rate at 10: how often the film of a held-out impression is among the 10 that are suggested just before it.
    The recall at 50: which share of a user's held-out films is among the 50 that are suggested before all of them.
    Films that the user has watched are not suggested.
    """
    examples = job.Examples(watches)
    with torch.no_grad():
        films = module.film(torch.arange(1, watches.films + 1)).numpy()
    index = faiss.IndexFlatIP(films.shape[1])  # exact; for millions of films IndexHNSWFlat
    index.add(films)

    def suggest(at: np.ndarray, count: int) -> np.ndarray:
        watched = torch.from_numpy(examples.watched(at))
        profile = torch.from_numpy(watches.profile[watches.user[at]])
        with torch.no_grad():
            vectors = module.user(watched, torch.zeros(len(at)), profile).numpy()
        return index.search(vectors, count)[1] + 1

    return _rates(watches, suggest)


def hit_rate_and_recall_of_popular(watches: Watches) -> tuple[float, float]:
    """Returns the same of suggesting to all users what most of them have watched."""
    watched = np.bincount(watches.film[~watches.held_out(job.HELD_OUT)], minlength=watches.films + 1)
    order = np.argsort(-watched[1:], kind="stable") + 1
    return _rates(watches, lambda at, count: np.tile(order[:count], (len(at), 1)))


def _rates(watches: Watches, suggest: Suggest) -> tuple[float, float]:
    at = np.flatnonzero(watches.held_out(job.HELD_OUT))
    first = watches.first[watches.user[at] + 1] - job.HELD_OUT
    return _hits(watches, at, at, suggest, 10), _hits(watches, at, first, suggest, 50)


def _hits(watches: Watches, at: np.ndarray, asked: np.ndarray, suggest: Suggest, count: int) -> float:
    """Returns how often the film of an impression `at` is among those suggested at the time of `asked`."""
    before = asked - watches.first[watches.user[asked]]
    suggested = suggest(asked, min(watches.films, count + int(before.max())))
    hits = 0
    for impression, time, films in zip(at, asked, suggested, strict=True):
        seen = watches.film[watches.first[watches.user[time]] : time]
        hits += watches.film[impression] in films[~np.isin(films, seen)][:count]
    return hits / len(at)


def per_user_loss(score: Callable[[np.ndarray], np.ndarray], watches: Watches) -> float:
    """Returns the weighted, per-user loss of a ranking: section 4.4 of the paper.

    Of all pairs of a clicked and an unclicked held-out impression of one user, the share of the minutes, of the clicked
    ones, where the other one has a higher score.
    """
    at = np.flatnonzero(watches.held_out(job.HELD_OUT))
    scores, users, minutes = score(at), watches.user[at], watches.minutes[at]
    wrong = every = 0.0
    for user in range(watches.users):
        own = users == user
        clicked, other = own & (minutes > 0), own & (minutes == 0)
        pairs = np.broadcast_to(minutes[clicked][:, None], (clicked.sum(), other.sum()))
        wrong += float(pairs[scores[clicked][:, None] < scores[other][None]].sum())
        every += float(pairs.sum())
    return wrong / every


def measure(watches: Watches, strategy: str, seed: int, epochs: tuple[int, int] = (8, 3)) -> dict[str, float]:
    """Trains both models under a strategy; returns the three figures."""
    candidates = hr.fit(job.job_on(watches, epochs[0], seed=seed), strategy).model.eval()
    ranker = hr.fit(ranking.job_on(watches, epochs[1], seed=seed), strategy).model.eval()
    impressions = ranking.Impressions(watches)

    def score(at: np.ndarray) -> np.ndarray:
        columns = impressions.columns(at)
        del columns["minutes"]
        with torch.no_grad():
            scores: np.ndarray = ranker(**columns).numpy()
        return scores

    return _figures(*hit_rate_and_recall(candidates, watches), per_user_loss(score, watches))


def measure_popular(watches: Watches) -> dict[str, float]:
    """Returns the figures of popularity: the films watched most, and the films watched longest when they were shown."""
    mean = ranking.Impressions(watches).film_mean
    return _figures(*hit_rate_and_recall_of_popular(watches), per_user_loss(lambda at: mean[watches.film[at]], watches))


def _figures(hit_rate: float, recall: float, loss: float) -> dict[str, float]:
    return {"hit-rate@10": 100 * hit_rate, "recall@50": 100 * recall, "per-user loss": 100 * loss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="one_device")
    parser.add_argument("--data", default="movielens", choices=DATA)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    watches = DATA[arguments.data]()
    rows = {"popularity": measure_popular(watches)}
    rows[arguments.strategy] = measure(watches, arguments.strategy, arguments.seed)
    print(f"{'per cent':44}" + "".join(f"{name:>15}" for name in rows["popularity"]))
    for name, figures in rows.items():
        print(f"{name:44}" + "".join(f"{value:15.2f}" for value in figures.values()))


if __name__ == "__main__":
    main()
