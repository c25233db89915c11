"""Candidate generation (Covington et al. 2016, section 3): which films a user may watch next, out of all.

headrace train examples/youtube_recommender/job.py --strategy parameter_server --workers 2
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from watches import DATA, Watches

import headrace as hr

HISTORY = 50
"""Films that a user watched last, of which the embeddings are averaged."""
NEGATIVES = 100
"""Other films that are drawn for each example."""
PER_USER = 50
"""Impressions of each user that are trained on, at most."""
HELD_OUT = 10
"""Last impressions of each user, which are not trained on."""


class Candidates(nn.Module):
    """A user's vector from what the user watched; a film's is a row of a table. Their dot product is the logit."""

    def __init__(self, films: int, width: int = 64) -> None:
        super().__init__()
        self.watched = nn.EmbeddingBag(films + 1, width, mode="mean", sparse=True, padding_idx=0)
        self.film = nn.Embedding(films + 1, width, sparse=True)
        for table in (self.watched, self.film):
            nn.init.normal_(table.weight, std=width**-0.5)
        self.tower = nn.Sequential(nn.Linear(width + 4, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))

    def user(self, watched: Tensor, age: Tensor, profile: Tensor) -> Tensor:
        """Returns vectors `(batch, width)`; `age` is that of the example, in days, and 0 for what is asked now."""
        # The age also by its root, so that a small tower has curves to choose from.
        years = (age / 365).unsqueeze(1)
        output: Tensor = self.tower(torch.cat([self.watched(watched), years, years.sqrt(), profile], 1))
        return output

    def forward(self, watched: Tensor, age: Tensor, profile: Tensor, films: Tensor, log_chance: Tensor) -> Tensor:
        """Returns logits `(batch, 1 + negatives)`: the watched film first."""
        # Each film once, by all users: a film is drawn for many of them.
        every, places = torch.unique(films, return_inverse=True)
        logits = (self.user(watched, age, profile) @ self.film(every).T).gather(1, places) - log_chance
        # Another draw of the watched film is no negative.
        again = films[:, 1:] == films[:, :1]
        return torch.cat([logits[:, :1], logits[:, 1:].masked_fill(again, -torch.inf)], 1)

    def exported(self) -> nn.Module:
        """Returns what `headrace export` writes in place of the training's logits."""
        return Retrieval(self)


class Retrieval(nn.Module):
    """The films with the largest dot products with a user's vector, out of all, best first."""

    def __init__(self, candidates: Candidates, count: int = 50) -> None:
        super().__init__()
        self.candidates = candidates
        self.count = count

    def forward(self, watched: Tensor, age: Tensor, profile: Tensor) -> dict[str, Tensor]:
        """Returns the numbers of the films and their scores, `(batch, count)`."""
        # Row 0 stands for no film.
        films = torch.arange(1, self.candidates.film.num_embeddings)
        scores = self.candidates.user(watched, age, profile) @ self.candidates.film(films).T
        best = scores.topk(min(self.count, len(films)))
        return {"films": best.indices + 1, "scores": best.values}


def loss(output: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Softmax over the watched film and the drawn ones, whose logits have been corrected for how they are drawn."""
    return cross_entropy(output, output.new_zeros(len(output), dtype=torch.long))


class Examples:
    """Makes a batch from the numbers of impressions: what was watched before, and films to tell the next one from."""

    def __init__(self, watches: Watches) -> None:
        self.film, self.first, self.user = watches.film, watches.first, watches.user
        self.profile, self.days = watches.profile, watches.days
        seen = np.bincount(watches.film[~watches.held_out(HELD_OUT)], minlength=watches.films + 1)
        # One more of each, so that every film is drawn now and then; film 0 is none.
        chance = (seen + 1.0) * (np.arange(watches.films + 1) > 0)
        self.chance = np.cumsum(chance) / chance.sum()
        self.log_chance = np.log(np.maximum(chance, 1) / chance.sum()).astype(np.float32)

    def watched(self, impressions: np.ndarray, until: np.ndarray | None = None) -> np.ndarray:
        """Returns the films that were watched last before some impressions, `(impressions, HISTORY)`, filled with 0."""
        at = impressions[:, None] - 1 - np.arange(HISTORY)
        before = at >= self.first[self.user[impressions]][:, None]
        return np.where(before, self.film[np.maximum(at, 0)], 0)

    def draw(
        self, examples: Sequence[tuple[Tensor]], rng: Sequence[np.random.Generator]
    ) -> list[tuple[Tensor, np.ndarray]]:
        """Adds other films to the numbers of impressions; any number of workers draw the same ones."""
        drawn = np.searchsorted(self.chance, np.stack([each.random(NEGATIVES) for each in rng]), side="right")
        return [(impression, films) for (impression,), films in zip(examples, drawn, strict=True)]

    def batch(self, drawn: Sequence[tuple[Tensor, np.ndarray]]) -> dict[str, Tensor]:
        """Returns the model's input for some impressions, with the other films of each."""
        at = np.array([int(impression) for impression, _ in drawn])
        films = np.concatenate([self.film[at][:, None], np.stack([other for _, other in drawn])], 1)
        columns = {
            "watched": self.watched(at),
            "age": self.days[at],
            "profile": self.profile[self.user[at]],
            "films": films,
            "log_chance": self.log_chance[films],
        }
        return {name: torch.from_numpy(values) for name, values in columns.items()}


def impressions_of(watches: Watches, held_out: bool, most: int = PER_USER) -> Tensor:
    """Returns the numbers of the impressions that have one before them: of the held-out ones, or of the others.

    Of those to train on, the last `most` of each user, so that all users weigh about the same (section 3.4).
    """
    last = watches.held_out(HELD_OUT)
    ours = last if held_out else watches.held_out(HELD_OUT + most) & ~last
    return torch.from_numpy(np.flatnonzero(ours & (np.arange(len(ours)) > watches.first[watches.user])))


def job(
    data: str = "movielens", epochs: int = 8, batch: int = 256, lr: float = 0.002, width: int = 64, seed: int = 0
) -> hr.Job:
    watches = DATA[data]()
    return job_on(watches, epochs, batch, lr, width, seed)


def job_on(
    watches: Watches, epochs: int = 8, batch: int = 256, lr: float = 0.002, width: int = 64, seed: int = 0
) -> hr.Job:
    make = Examples(watches)
    train, test = (hr.data.from_arrays(impressions_of(watches, each)) for each in (False, True))
    return hr.Job(
        model=functools.partial(Candidates, watches.films, width),
        loss=loss,
        optimizer=functools.partial(hr.LazyAdam, lr=lr),
        data=train.shuffle().map(make.draw, batched=True).batch(collate=make.batch),
        eval_data=test.map(make.draw, batched=True).batch(collate=make.batch),
        global_batch_size=batch,
        epochs=epochs,
        seed=seed,
    )
