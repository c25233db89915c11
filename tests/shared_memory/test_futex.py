"""Sleeping on a word."""

from __future__ import annotations

import ctypes
import threading
from time import monotonic

from headrace.shared_memory import futex

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
