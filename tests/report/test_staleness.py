"""Staleness as servers counted it: its numbers, and what it was from one time to the next."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.report.model.events import attempts
from headrace.report.model.servers import Staleness, staleness_over_time
from headrace.report.model.training import TrainingClock
from headrace.spec.events import LAUNCHER, Evaluated, RunStarted, ServerStats, Stepped

COUNTS = st.dictionaries(st.integers(0, 300).map(str), st.integers(0, 50), max_size=12)


@pytest.mark.slow
@given(st.lists(COUNTS, max_size=4))
def test_the_numbers_are_those_of_the_updates_one_by_one(counts):
    updates = sorted(int(staleness) for each in counts for staleness, count in each.items() for _ in range(count))
    staleness = Staleness.of(counts)
    if not updates:
        assert staleness is None
        return
    assert staleness.updates == len(updates)
    assert staleness.mean == pytest.approx(sum(updates) / len(updates))
    assert staleness.largest == updates[-1]
    for percent in (50, 99, 100):
        assert staleness.percentile(percent) == updates[math.ceil(percent * len(updates) / 100) - 1]


def _started(time_s=0.0, resumed=0):
    return RunStarted(LAUNCHER, time_s, "parameter_server", 2, "cpu", 1, 8, 80, "now", {}, {}, resumed_step=resumed)


def _step(rank, time_s, step):
    return Stepped(rank, time_s, step, 0, 4, 1.0, 4.0, 0.0, 0.5, 0.5, 0.0)


def _served(rank, time_s, staleness):
    return ServerStats(rank, time_s, 0.1, 1.0, 1, staleness, {}, {}, ())


def _over_time(events):
    begun = attempts(events)
    evaluated = [event for event in events if isinstance(event, Evaluated)]
    return staleness_over_time(begun, TrainingClock((attempt.steps for attempt in begun), evaluated))


def test_over_time_is_what_came_between_two_words_of_all_servers():
    events = [
        _started(),
        *(_step(rank, 11.0 + second, second) for second in range(4) for rank in (0, 1)),
        _served(2, 11.2, {"0": {"0": 4}}),
        _served(3, 11.3, {"1": {"2": 4}}),
        _served(2, 12.2, {"0": {"0": 4, "1": 2}, "1": {"3": 2}}),
        _served(2, 13.2, {"0": {"0": 4, "1": 2}, "1": {"3": 2}}),
        _served(3, 13.3, {"1": {"2": 4, "5": 1}}),
        _served(2, 14.0, {"0": {"0": 4, "1": 2}, "1": {"3": 3}}),
    ]
    # Training begins at 10 s.
    points = _over_time(events)
    assert [point.seconds for point in points] == pytest.approx([1.3, 2.2, 3.3, 4.0])
    assert [point.staleness.counts for point in points] == [{0: 4, 2: 4}, {1: 2, 3: 2}, {5: 1}, {3: 1}]


def test_evaluations_take_no_time_and_a_resumed_run_begins_to_count_anew():
    first = [_step(0, 1.0 + second, second) for second in range(3)]
    again = [_step(0, 21.0 + second, 2 + second) for second in range(2)]
    events = [
        _started(),
        *first,
        _served(2, 2.0, {"0": {"1": 10}}),
        _served(2, 3.0, {"0": {"1": 19}}),
        _started(20.0, resumed=2),
        *again,
        _served(2, 21.5, {"0": {"4": 7}}),
    ]
    # Of the first attempt two steps count, from 0 to 2 s; of the second both, from 20 to 22 s.
    points = _over_time(events)
    assert sum(point.staleness.updates for point in points) == 26
    assert points[-1].staleness.counts == {4: 7}
    assert points[-1].seconds == pytest.approx(3.5)
    evaluated = Evaluated(0, 1.9, 1, 0, 5, {"loss": 1.0}, 0.8)
    shorter = _over_time([*events[:4], evaluated, *events[4:]])
    assert shorter[-1].seconds == pytest.approx(2.7)


def test_a_long_run_has_no_more_points_than_can_be_seen():
    events = [_started(), *(_step(0, 1.0 + second, second) for second in range(5000))]
    events += [_served(2, 1.0 + second, {"0": {"1": second}}) for second in range(1, 5000)]
    points = _over_time(events)
    assert 150 < len(points) <= 201
    assert sum(point.staleness.updates for point in points) == 4999
    assert all(one.seconds < two.seconds for one, two in itertools.pairwise(points))
