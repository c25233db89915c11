"""Who watched which film, when and for how long: MovieLens-100K, or generated."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

# The package is a library of recommenders; it ships the data set. Nothing of it is installed or run.
PACKAGE = "recbole==1.2.1"
WHEEL = "recbole-1.2.1-py3-none-any.whl"
SHA256 = "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407"
FOLDER = "recbole/dataset_example/ml-100k"
CACHE = Path.home() / ".cache" / "headrace"

Integers = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Watches:
    """Impressions, by user and within a user by time.

    Attributes:
        users, films: how many there are; users are 0 to users - 1, films 1 to films, and 0 is no film.
        user, film, time: of each impression, int64.
        minutes: watch time of each impression; 0 where the film was shown and not clicked.
        first: `(users + 1,)`, where the impressions of each user begin.
        profile: `(users, 2)`, what is known of each user.
    """

    users: int
    films: int
    user: Integers
    film: Integers
    time: Integers
    minutes: Floats
    first: Integers
    profile: Floats

    @property
    def days(self) -> Floats:
        """How long before the last one each impression was, in days."""
        days: Floats = ((self.time.max() - self.time) / 86_400).astype(np.float32)
        return days

    def held_out(self, last: int) -> NDArray[np.bool_]:
        """Tells which impressions are among the `last` of their user."""
        after: NDArray[np.bool_] = np.arange(len(self.user)) >= self.first[self.user + 1] - last
        return after


def movielens() -> Watches:
    """Returns MovieLens-100K: every rating is an impression.

    It has no watch times. A rating of 4 or 5 stands for a click with 4 or 5 minutes, a lower one for an impression that
    was not clicked.

    Raises:
        RuntimeError: the package cannot be fetched.
        ValueError: the package is another one than this was written for.
    """
    wheel = CACHE / WHEEL
    if not wheel.is_file():
        fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(CACHE), PACKAGE]
        if subprocess.run(fetch, check=False).returncode:
            raise RuntimeError(
                f"pip could not fetch {PACKAGE}, which ships MovieLens-100K; put {WHEEL} into {CACHE}, or use "
                "data='generated'"
            )
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != SHA256:
        raise ValueError(f"{wheel} has the SHA-256 {digest}, and not {SHA256}; remove it, and it is fetched again")
    with zipfile.ZipFile(wheel) as archive:
        ratings = np.loadtxt(archive.open(f"{FOLDER}/ml-100k.inter"), skiprows=1)
        people = [line.split("\t") for line in archive.read(f"{FOLDER}/ml-100k.user").decode().splitlines()[1:]]
    user, film, rating, time = ratings.T
    profile = np.zeros((len(people), 2), np.float32)
    for number, age, gender, *_ in people:
        profile[int(number) - 1] = (float(age) - 34) / 12, 1 if gender == "F" else -1
    minutes = np.where(rating >= 4, rating, 0).astype(np.float32)
    return _sorted(user.astype(np.int64) - 1, film.astype(np.int64), time.astype(np.int64), minutes, profile)


def generated(users: int = 2_000, films: int = 20_000, each: int = 60, seed: int = 0, topics: int = 20) -> Watches:
    """Returns impressions of users who like two topics each; which films of a topic they see is like Zipf(1.1).

    Of `each` impressions of a user, those of a film that was seen before are left out.
    """
    chance = np.random.default_rng(seed)
    likes = chance.integers(0, topics, (users, 2))
    user = np.repeat(np.arange(users), each)
    liked = likes[user, chance.integers(0, 2, len(user))]
    topic = np.where(chance.random(len(user)) < 0.8, liked, chance.integers(0, topics, len(user)))
    # Films of a topic are `topics` apart; the first ones are seen most.
    ranks = np.arange(1, films // topics + 1)
    shares = np.cumsum(ranks**-1.1) / (ranks**-1.1).sum()
    film = np.searchsorted(shares, chance.random(len(user))) * topics + topic + 1
    _, kept = np.unique(user * (films + 1) + film, return_index=True)
    user, topic, film = user[kept], topic[kept], film[kept]
    time = chance.integers(0, 200 * 86_400, len(user))
    clicked = chance.random(len(user)) < np.where((likes[user] == topic[:, None]).any(1), 0.7, 0.2)
    minutes = np.where(clicked, chance.integers(1, 10, len(user)), 0).astype(np.float32)
    return _sorted(user, film, time, minutes, np.zeros((users, 2), np.float32), films)


def _sorted(
    user: Integers, film: Integers, time: Integers, minutes: Floats, profile: Floats, films: int = 0
) -> Watches:
    order = np.lexsort((time, user))
    first = np.searchsorted(user[order], np.arange(len(profile) + 1))
    films = films or int(film.max())
    return Watches(len(profile), films, user[order], film[order], time[order], minutes[order], first, profile)


DATA = {"movielens": movielens, "generated": generated}
