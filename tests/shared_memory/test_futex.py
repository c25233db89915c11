"""Sleeping on a word."""

from __future__ import annotations

import ctypes
import threading
from time import monotonic

from headrace.shared_memory import futex
from headrace.shared_memory.futex import Spin, look

LONG_S = 60.0


def test_a_word_that_has_changed_is_not_waited_for() -> None:
    word = ctypes.c_int32(5)
    began = monotonic()
    futex.wait(ctypes.addressof(word), 4, LONG_S)
    assert monotonic() - began < LONG_S / 2


def test_a_wait_ends_with_its_time() -> None:
    word = ctypes.c_int32(-1)
    began = monotonic()
    futex.wait(ctypes.addressof(word), -1, 0.02)
    assert 0.02 <= monotonic() - began < LONG_S / 2


def test_everybody_who_sleeps_is_woken() -> None:
    word = ctypes.c_int32(7)
    address = ctypes.addressof(word)
    sleepers = [threading.Thread(target=futex.wait, args=(address, 7, LONG_S)) for _ in range(3)]
    began = monotonic()
    for sleeper in sleepers:
        sleeper.start()
    while any(sleeper.is_alive() for sleeper in sleepers) and monotonic() - began < LONG_S:
        # The word stays what they saw, so that nothing but this ends their sleep.
        futex.wake(address)
    assert monotonic() - began < LONG_S / 2


def test_sleepers_let_the_interpreter_go_on() -> None:
    word = ctypes.c_int32(7)
    sleeper = threading.Thread(target=futex.wait, args=(ctypes.addressof(word), 7, LONG_S))
    began = monotonic()
    sleeper.start()
    counted = sum(range(100_000))
    word.value = 8
    while sleeper.is_alive() and monotonic() - began < LONG_S:
        futex.wake(ctypes.addressof(word))
    assert counted == 4_999_950_000
    assert monotonic() - began < LONG_S / 2


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
    # So long that three looks fit in on a busy machine, too.
    spin = Spin(60.0)
    assert look(lambda _: next(answers), spin, 1.0) == ["soon"]
    assert spin.seconds == 60.0
