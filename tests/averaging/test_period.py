"""A period that adapts, in a world whose exchange and drift are formulas."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import UsageError
from headrace.policies.period import AutoPeriod, Measured, Period, first_period, next_period

STEP_S = 0.01


def live(wish: int | AutoPeriod, meetings: int, exchange_s: float, drift: Callable[[int, int], float]) -> list[Period]:
    """Returns the periods that come, where `drift(meeting, rounds)` is seen."""
    periods = [first_period(wish)]
    for meeting in range(meetings):
        rounds = periods[-1].rounds
        seen = Measured(rounds, rounds * STEP_S, exchange_s if meeting else 0.0, drift(meeting, rounds))
        periods.append(next_period(periods[-1], seen, wish))
    return periods


def share(period: Period, exchange_s: float) -> float:
    return exchange_s / (exchange_s + period.rounds * STEP_S)


def test_a_fixed_period_stays_whatever_is_seen() -> None:
    periods = live(7, 5, 10.0, lambda meeting, rounds: 9.0)
    assert {(period.rounds, period.why) for period in periods} == {(7, "as asked for")}


@pytest.mark.parametrize("exchange_s", [1e-5, 0.002, 0.01, 0.1, 1.0])
@pytest.mark.parametrize("allowed", [0.01, 0.05, 0.3])
def test_it_grows_until_the_exchange_takes_its_share_and_no_further(exchange_s: float, allowed: float) -> None:
    wish = AutoPeriod(exchange_share=allowed, longest=100_000)
    *_, before, last = live(wish, 30, exchange_s, lambda meeting, rounds: 0.001)
    assert before == last
    assert share(last, exchange_s) <= allowed
    assert last.rounds == 1 or share(Period(last.rounds // 2, "", 1), exchange_s) > allowed / 2
    assert "of the time, at most" in last.why


def test_it_doubles_at_most() -> None:
    rounds = [period.rounds for period in live(AutoPeriod(), 8, 1.0, lambda meeting, rounds: 0.0)]
    assert rounds == [1, 1, 2, 4, 8, 16, 32, 64, 128]


def test_drift_goes_before_the_exchange() -> None:
    # A hundredth a round: more than four rounds are too many, and what was too long is not tried again.
    periods = live(AutoPeriod(drift=0.05), 20, 1.0, lambda meeting, rounds: 0.01 * rounds)
    rounds = [period.rounds for period in periods]
    assert max(rounds) == 8
    assert rounds[-10:] == [4] * 10
    assert "drift 0.08 is above 0.05" in [period.why for period in periods]
    assert periods[-1].why.endswith("and drift allows 4")


def test_what_drift_allows_grows_again_when_it_is_small() -> None:
    periods = live(AutoPeriod(drift=0.05), 40, 1.0, lambda meeting, rounds: 0.1 if meeting < 10 else 0.001)
    assert periods[10].rounds == 1
    assert periods[-1].rounds > 64


def test_an_exchange_that_has_become_cheap_shortens_it() -> None:
    wish, period = AutoPeriod(), Period(512, "", 1024)
    rounds = []
    for _ in range(7):
        period = next_period(period, Measured(period.rounds, period.rounds * STEP_S, 0.01, 0.001), wish)
        rounds.append(period.rounds)
    assert rounds == [256, 128, 64, 32, 32, 32, 32]
    assert share(period, 0.01) <= 0.05


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10), st.floats(0, 1e6)), max_size=30),
    st.floats(0.001, 0.9),
    st.floats(1e-6, 10),
    st.integers(1, 10_000),
)
def test_it_is_always_between_1_and_the_longest(
    world: list[tuple[float, float, float]], allowed: float, drift: float, longest: int
) -> None:
    wish = AutoPeriod(allowed, drift, longest)
    period = first_period(wish)
    for train_s, exchange_s, seen in world:
        period = next_period(period, Measured(period.rounds, train_s, exchange_s, seen), wish)
        assert 1 <= period.rounds <= longest
        assert 1 <= period.most <= longest
        assert period.why


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"exchange_share": 0}, "exchange_share of an automatic period must be a number above 0 and below 1"),
        ({"exchange_share": 1.0}, "above 0 and below 1"),
        ({"drift": -0.1}, "drift of an automatic period must be a number above 0, got -0.1"),
        ({"drift": True}, "got True"),
        ({"longest": 0}, "longest must be a whole number of at least 1"),
    ],
)
def test_bounds_that_cannot_be_meant_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        AutoPeriod(**wrong)  # type: ignore[arg-type]


def test_a_period_that_was_saved_is_kept_within_the_limit_of_the_run_that_goes_on() -> None:
    saved = {"averaging": Period(512, "the drift", 1024).settings()}
    assert Period.restored(saved, AutoPeriod()) == Period(512, "the drift", 1024)
    assert Period.restored(saved, AutoPeriod(longest=8)) == Period(8, "the drift", 8)
