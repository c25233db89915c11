"""Doubtful measurements are repeated: with planted ones, so that no time is measured here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from headrace.api import profiling
from headrace.api.profiling import settle
from headrace.api.run import Run
from headrace.policies.measurement import Measurement


class Planted:
    """Gives, for each label, one planted measurement after the other."""

    def __init__(self, **planted: list[Measurement | None]) -> None:
        self._planted = planted
        self.asked: list[tuple[str, int]] = []

    def __call__(self, label: str, attempt: int) -> Measurement | None:
        self.asked.append((label, attempt))
        return self._planted[label].pop(0)


ONE = Measurement(100.0, 1, spread=0.1)
GOOD = Measurement(190.0, 2, spread=0.1)
UNEVEN = Measurement(150.0, 2, spread=0.5)
FAST = Measurement(300.0, 2, spread=0.1)


def test_what_is_believed_is_not_measured_again() -> None:
    again = Planted()
    found = {"one": ONE, "pair": GOOD}
    assert settle(found, "one", again, retries=2) == {}
    assert again.asked == []


def test_the_first_that_is_believed_counts() -> None:
    again = Planted(pair=[UNEVEN, GOOD])
    found = {"one": ONE, "pair": UNEVEN}
    assert settle(found, "one", again, retries=2) == {}
    assert again.asked == [("pair", 1), ("pair", 2)]
    assert found["pair"] is GOOD


def test_what_stays_doubtful_is_told_after_so_many_attempts() -> None:
    again = Planted(pair=[UNEVEN, UNEVEN])
    assert settle({"one": ONE, "pair": UNEVEN}, "one", again, retries=2) == {"pair": ("its rate varied by 50 %",)}
    assert len(again.asked) == 2
    assert settle({"one": ONE, "pair": UNEVEN}, "one", again, retries=0) == {"pair": ("its rate varied by 50 %",)}


def test_an_impossible_rate_may_be_the_fault_of_one_device() -> None:
    again = Planted(pair=[FAST], one=[Measurement(160.0, 1)])
    found = {"one": ONE, "pair": FAST}
    assert settle(found, "one", again, retries=2) == {}
    assert again.asked == [("pair", 1), ("one", 1)]
    assert found["one"].rate == 160.0


def test_an_interrupt_ends_the_measuring() -> None:
    again = Planted(pair=[None])
    assert list(settle({"one": ONE, "pair": UNEVEN}, "one", again, retries=2)) == ["pair"]
    assert again.asked == [("pair", 1)]


def test_a_program_that_begins_meanwhile_is_among_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = iter([0.25, 1.5, 0.5, 0.0])
    monkeypatch.setattr(profiling, "_busy_others", lambda: next(busy))
    training = SimpleNamespace(spread=0.1)
    started = SimpleNamespace(device="cpu", threads=1)
    summary = SimpleNamespace(started=started, workers=1, examples_per_s=100.0, training=training)
    for others in (1.5, 0.5):
        machine = profiling.measured(lambda: cast("Run", SimpleNamespace(summary=summary)))[1].machine
        assert machine is not None
        assert machine.others == others
