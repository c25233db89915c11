"""The recommender learns from generated impressions, also on parameter servers, and its figures are what they say."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace as hr

THREADS = hr.ThreadEngine()
FOLDER = Path(__file__).resolve().parents[2] / "examples" / "youtube_recommender"
MODULES = ("job", "ranking", "recommend", "watches")


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        # Under names of their own, since other examples have a job.py, too.
        for name in MODULES:
            patch.delitem(sys.modules, name, raising=False)
        yield {name: importlib.import_module(name) for name in MODULES}
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def watches(modules: dict[str, Any]) -> Any:
    return modules["watches"].generated(users=300, films=400, each=50, topics=5)


def by_hand(modules: dict[str, Any], minutes: list[float]) -> Any:
    """Two users who each watched the films 1, 2, 3, ... in this order, the last ones `minutes` long."""
    count = len(minutes)
    return modules["watches"].Watches(
        users=2,
        films=count,
        user=np.repeat([0, 1], count),
        film=np.tile(np.arange(1, count + 1), 2),
        time=np.arange(2 * count),
        minutes=np.tile(np.array(minutes, np.float32), 2),
        first=np.array([0, count, 2 * count]),
        profile=np.zeros((2, 2), np.float32),
    )


def test_the_per_user_loss_is_the_share_of_minutes_that_an_unclicked_one_beats(modules: dict[str, Any]) -> None:
    watches = by_hand(modules, [0.0] * 5 + [0, 0, 2, 6] + [0] * 6)
    held_out = np.tile([7, 8], 2) + np.repeat([0, 15], 2)

    def score(at: np.ndarray) -> np.ndarray:
        # Of each user, the film of 2 minutes is last of all, that of 6 minutes is first of all.
        return np.where(at == held_out[0], -1, np.where(np.isin(at, held_out), 1, 0)) - 2 * (at == held_out[2])

    assert modules["recommend"].per_user_loss(score, watches) == pytest.approx(2 / 8)
    assert modules["recommend"].per_user_loss(lambda at: watches.minutes[at], watches) == 0


def test_popular_films_are_those_not_yet_watched(modules: dict[str, Any]) -> None:
    watches = by_hand(modules, [1.0] * 30)
    # Films 1 to 20 are watched before; the next one is always the first that is left.
    assert modules["recommend"].hit_rate_and_recall_of_popular(watches) == (1.0, 1.0)


def test_a_user_has_no_history_from_another_user(modules: dict[str, Any]) -> None:
    examples = modules["job"].Examples(by_hand(modules, [1.0] * 30))
    before = examples.watched(np.array([0, 2, 30, 33]))
    assert [row[row > 0].tolist() for row in before] == [[], [2, 1], [], [3, 2, 1]]


def test_another_package_in_the_cache_is_refused(
    modules: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules["watches"], "CACHE", tmp_path)
    (tmp_path / modules["watches"].WHEEL).write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"has the SHA-256 f41f\w+, and not 9c99.*; remove it"):
        modules["watches"].movielens()


@pytest.mark.slow
def test_servers_give_the_loss_of_one_device(modules: dict[str, Any]) -> None:
    watches = modules["watches"].generated(users=60, films=200, each=30, topics=5)
    for job in (modules["job"].job_on(watches, epochs=1), modules["ranking"].job_on(watches, epochs=1)):
        one = hr.fit(job, engine=THREADS)
        served = hr.fit(job, hr.ParameterServer(2, servers=2, staleness_bound=0), engine=THREADS)
        assert served.metrics["loss"] == pytest.approx(one.metrics["loss"], rel=1e-4)


@pytest.mark.slow
def test_asynchronous_workers_learn_more_than_what_is_popular(modules: dict[str, Any], watches: Any) -> None:
    recommend, strategy = modules["recommend"], hr.ParameterServer(2, servers=2)
    run = hr.fit(modules["job"].job_on(watches, epochs=3, lr=0.01), strategy, engine=THREADS)
    learnt, popular = recommend.hit_rate_and_recall(run.model.eval(), watches), recommend.measure_popular(watches)
    assert 100 * learnt[0] > popular["hit-rate@10"] + 2
    assert 100 * learnt[1] > popular["recall@50"] + 2
