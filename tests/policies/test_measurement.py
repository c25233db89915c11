from __future__ import annotations

import dataclasses
import math

import pytest

from headrace.policies.measurement import Learning, MachineLoad, Measurement, doubts, shortfall, spread_of

CALM = MachineLoad(cores=4, used=4, others=0.1, stolen=0.01, average=1.0)
PLAIN = Measurement(rate=190.0, workers=2, spread=0.1, machine=CALM)


@pytest.mark.parametrize("one", [None, 0.0, 95.0, 100.0])
def test_a_measurement_that_is_believed(one: float | None) -> None:
    assert doubts(PLAIN, one) == ()
    assert doubts(Measurement(None, 2), one) == ()


def test_one_worker_is_no_faster_than_itself() -> None:
    assert doubts(dataclasses.replace(PLAIN, workers=1), 1.0) == ()


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ({"rate": 201.0}, "2.01 x one device with 2 workers is impossible"),
        ({"spread": 0.21}, "its rate varied by 21 %"),
        ({"machine": dataclasses.replace(CALM, others=0.5)}, "other programs kept 0.5 of 4 cores busy"),
        ({"machine": dataclasses.replace(CALM, average=2.1)}, "the load average was 2.1 before it"),
        ({"machine": dataclasses.replace(CALM, stolen=0.06)}, "6 % of the processor time was stolen"),
    ],
)
def test_what_is_planted_is_found_and_nothing_else(planted: dict[str, object], said: str) -> None:
    assert doubts(dataclasses.replace(PLAIN, **planted), 100.0) == (said,)  # type: ignore[arg-type]


def test_cores_that_the_run_does_not_use_may_be_busy() -> None:
    half = dataclasses.replace(CALM, used=2, others=2.1, average=2.9)
    assert doubts(dataclasses.replace(PLAIN, machine=half), 100.0) == ()
    busy = dataclasses.replace(half, others=2.3, average=3.1)
    assert len(doubts(dataclasses.replace(PLAIN, machine=busy), 100.0)) == 2


ONE = Learning(((0.0, 2.3), (1.0, 1.3), (2.0, 0.3)))


@pytest.mark.parametrize(
    ("last", "ends"),
    [(0.3, None), (0.1, None), (0.49, None), (0.51, "far above"), (2.0, "far above"), (2.11, "at chance"),
     (9.0, "at chance"), (math.nan, "at chance"), (math.inf, "at chance")],
)  # fmt: skip
def test_a_loss_that_falls_short(last: float, ends: str | None) -> None:
    assert shortfall(Learning(((0.0, 2.3), (2.0, last))), ONE) == ends


def test_where_one_device_learns_nothing_no_loss_falls_short() -> None:
    assert shortfall(ONE, Learning(((0.0, 1.0), (1.0, 1.0)))) is None


def test_the_epochs_to_a_loss_lie_on_straight_lines() -> None:
    assert ONE.target == pytest.approx(0.5)
    assert ONE.epochs_to(1.3) == pytest.approx(1.0)
    assert ONE.epochs_to(0.8) == pytest.approx(1.5)
    assert ONE.epochs_to(3.0) == 0.0
    assert ONE.epochs_to(0.2) is None
    assert Learning(((0.0, 2.0), (1.0, math.nan), (2.0, 0.5))).epochs_to(0.5) == 2.0


def test_the_spread_between_parts() -> None:
    assert spread_of([90.0, 100.0, 110.0]) == pytest.approx(0.2)
    assert spread_of([100.0]) is None
    assert spread_of([]) is None
    assert spread_of([0.0, 0.0]) is None
