"""The answer of `headrace recommend` in words: what to do, what it costs, and what would change it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.errors import UsageError
from headrace.prediction.recommendation.answer import sentences
from headrace.prediction.recommendation.recommend import recommend
from headrace.spec.cluster import Cluster, Host
from headrace.spec.files.clusters import read, text_of
from prediction.simulation.scenes import gpus, model


def rented(count: int, **changes) -> Cluster:
    each = tuple(
        Host(f"h{index}", 1, 8_000_000_000, price_per_hour=3.6, watts=250.0, hours_between_failures=10.0)
        for index in range(count)
    )
    return replace(Cluster(each, link_bytes_per_s=1.25e9, currency="EUR"), **changes)


def answer(cluster: Cluster, examples: int, **changes) -> str:
    found = recommend(model(10), cluster, global_batch_size=64, examples=examples, **changes)
    return " ".join(sentences(found))


def test_it_says_what_to_do_what_it_costs_and_what_is_cheaper() -> None:
    best = recommend(model(10), rented(8), global_batch_size=64)
    said = " ".join(sentences(best))
    assert said.startswith("Take 8 devices of 8 hosts with mirrored: 1,000,000 examples in rounds of 64 take ")
    assert best.winner.money == pytest.approx(8 * 3.6 * best.winner.seconds / 3600)
    assert best.winner.kilowatt_hours == pytest.approx(8 * 0.25 * best.winner.seconds / 3600)
    assert " EUR for the hosts, whole. " in said
    assert " kWh. A host fails every 1.25 h, with a checkpoint every " in said
    assert "The cheapest is one_device on 1 device of 1 host: " in said


def test_a_time_begins_with_the_start() -> None:
    few, many = (
        recommend(model(1), rented(1), global_batch_size=64, examples=examples).winner for examples in (64_000, 128_000)
    )
    assert few.start_s == many.start_s == 2
    assert many.seconds - 2 == pytest.approx(2 * (few.seconds - 2))


def test_what_one_host_trains_in_seconds_stays_there() -> None:
    alone = recommend(model(10), rented(8), global_batch_size=64, examples=640)
    assert len(alone.winner.hosts) == 1
    assert "Do not distribute: one device trains 640 examples in rounds of 64 in " in " ".join(sentences(alone))
    from_on = answer(rented(8), 640).partition("From ")[2]
    assert "examples on, mirrored(workers=8) is worth its start." in from_on
    # There it does win, or its rate would not be worth it.
    later = recommend(model(10), rented(8), global_batch_size=64, examples=1_000_000)
    assert later.winner.candidate.devices == 8


def test_of_those_that_take_the_same_the_simpler_is_advised() -> None:
    found = recommend(model(10, layers=True), gpus(1, 2), global_batch_size=64)
    times = {offer.text: offer.seconds for offer in found.offers}
    # Each worker updates its part, which takes half a percent less; all of the updates take the same on one device.
    assert 0.99 < times["fully_sharded(workers=2)"] / times["central_storage(workers=2)"] < 1
    assert found.winner.text == "central_storage(workers=2)"
    assert times["mirrored(workers=2)"] > 1.01 * times["fully_sharded(workers=2)"]


def test_prices_without_a_currency_are_said() -> None:
    notes = recommend(model(1), rented(1, currency=""), global_batch_size=64).notes
    assert any("no currency" in note for note in notes)
    assert not any("no currency" in note for note in recommend(model(1), rented(1), global_batch_size=64).notes)


def test_the_file_has_currency_and_power(tmp_path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text_of(rented(2)))
    assert read(path) == rented(2)
    path.write_text(text_of(rented(2)).replace("watts = 250", "watts = 0", 1))
    with pytest.raises(UsageError, match=r"hosts\[0\]\.watts must be above 0"):
        read(path)
