"""How long to look is learnt from what came of it."""

from __future__ import annotations

from headrace.shared_memory.futex import Spin, look

MOST_S = 0.001


def test_looks_in_vain_become_short_and_short_waits_bring_them_back() -> None:
    spin = Spin(MOST_S)
    for _ in range(20):
        spin.slept(10 * MOST_S)
    least = spin.seconds
    assert 0 < least < MOST_S / 100
    spin.slept(MOST_S / 2)
    assert spin.seconds == 2 * least
    for _ in range(100):
        spin.met()
    assert spin.seconds == MOST_S


def test_what_is_there_is_returned_at_once_and_sleep_comes_last() -> None:
    asked: list[float] = []

    def poll(timeout_s: float) -> list[str]:
        asked.append(timeout_s)
        return ["late"] if timeout_s else []

    spin = Spin(MOST_S)
    assert look(lambda _: ["there"], spin, 1.0) == ["there"]
    assert look(poll, spin, 0.0) == []
    assert asked == [0.0], "who does not wait does not spin"
    assert look(poll, spin, 5.0) == ["late"]
    assert asked[-1] == 5.0
    assert asked.count(0.0) > 2


def test_what_comes_while_it_looks_is_no_sleep() -> None:
    answers = iter([[], [], ["soon"]])
    spin = Spin(MOST_S)
    assert look(lambda _: next(answers), spin, 1.0) == ["soon"]
    assert spin.seconds == MOST_S
