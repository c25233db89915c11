"""Ranking (Covington et al. 2016, section 4): the expected watch time of a film that is shown to a user.

headrace train examples/youtube_recommender/ranking.py --strategy parameter_server --workers 2
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from job import HELD_OUT, Examples, impressions_of
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from watches import DATA, Watches

import headrace as hr


class Ranker(nn.Module):
    """The logarithm of a film's expected watch time, up to what a click's rarity adds."""

    def __init__(self, films: int, users: int, width: int = 32) -> None:
        super().__init__()
        # One table for the shown film and for the watched ones: they share its embeddings.
        self.film = nn.Embedding(films + 1, width, sparse=True, padding_idx=0)
        self.person = nn.Embedding(users, width, sparse=True)
        for table in (self.film, self.person):
            nn.init.normal_(table.weight, std=0.02)
        self.tower = nn.Sequential(nn.Linear(3 * width + 2 + 9, 2 * width), nn.ReLU(), nn.Linear(2 * width, 1))

    def forward(self, film: Tensor, user: Tensor, watched: Tensor, profile: Tensor, numbers: Tensor) -> Tensor:
        """Returns logits `(batch,)`; `numbers` are `(batch, 3)` in [0, 1], and come with squares and roots."""
        there = (watched > 0).sum(1, keepdim=True).clamp(min=1)
        mean = self.film(watched).sum(1) / there
        powers = torch.cat([numbers, numbers**2, numbers.sqrt()], 1)
        shown = self.film(film)
        output: Tensor = self.tower(torch.cat([shown, mean, self.person(user), profile, powers], 1))
        return output.squeeze(1) + (shown * self.person(user)).sum(1)


def loss(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Logistic regression; a click weighs as much as the minutes that were watched, anything else 1."""
    minutes = batch["minutes"]
    return binary_cross_entropy_with_logits(output, (minutes > 0).float(), weight=minutes.clamp(min=1))


class Impressions:
    """Makes a batch from the numbers of impressions."""

    def __init__(self, watches: Watches) -> None:
        self.watches, self.examples = watches, Examples(watches)
        trained = ~watches.held_out(HELD_OUT)
        shown = np.bincount(watches.film[trained], minlength=watches.films + 1)
        minutes = np.bincount(watches.film[trained], watches.minutes[trained], minlength=watches.films + 1)
        self.film_mean = (minutes + watches.minutes.mean()) / (shown + 1)
        self.numbers = np.stack([_quantiles(self.film_mean), _quantiles(shown)], 1).astype(np.float32)

    def columns(self, at: np.ndarray) -> dict[str, Tensor]:
        """Returns the model's input for some impressions, and their minutes."""
        watches = self.watches
        film, user = watches.film[at], watches.user[at]
        earlier = np.minimum((at - watches.first[user]) / 500, 1)[:, None]
        columns = {
            "film": film,
            "user": user,
            "watched": self.examples.watched(at),
            "profile": watches.profile[user],
            "numbers": np.concatenate([self.numbers[film], earlier], 1).astype(np.float32),
            "minutes": watches.minutes[at],
        }
        return {name: torch.from_numpy(values) for name, values in columns.items()}

    def batch(self, examples: Sequence[tuple[Tensor]]) -> dict[str, Tensor]:
        """Returns the columns of some examples."""
        return self.columns(np.array([int(impression) for (impression,) in examples]))


def _quantiles(values: np.ndarray) -> np.ndarray:
    """Returns the share of values that are smaller, for each."""
    ordered = np.sort(values)
    return np.searchsorted(ordered, values) / len(values)


def job(data: str = "movielens", epochs: int = 3, batch: int = 256, lr: float = 0.002, seed: int = 0) -> hr.Job:
    return job_on(DATA[data](), epochs, batch, lr, seed)


def job_on(watches: Watches, epochs: int = 3, batch: int = 256, lr: float = 0.002, seed: int = 0) -> hr.Job:
    make = Impressions(watches)
    # All of them: every user and film has a row to learn, and clicks are few.
    most = len(watches.film)
    train, test = (hr.data.from_arrays(impressions_of(watches, each, most)) for each in (False, True))
    return hr.Job(
        model=functools.partial(Ranker, watches.films, watches.users),
        loss=loss,
        inputs=("film", "user", "watched", "profile", "numbers"),
        optimizer=functools.partial(hr.LazyAdam, lr=lr),
        data=train.shuffle().batch(collate=make.batch),
        eval_data=test.batch(collate=make.batch),
        global_batch_size=batch,
        epochs=epochs,
        seed=seed,
    )
