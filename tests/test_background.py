"""A thread that runs one task at a time."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headrace.machine.background import BackgroundThread


@contextmanager
def held(background: BackgroundThread) -> Iterator[None]:
    """Lets a task run until the block ends."""
    gate = threading.Event()
    background.start(gate.wait)
    try:
        yield
    finally:
        gate.set()


def fail() -> None:
    raise ValueError("no")


def test_tasks_run_one_after_the_other() -> None:
    done: list[int] = []
    background = BackgroundThread("test")
    for number in range(20):
        background.start(lambda number=number: done.append(number))
    assert background.wait()
    assert done == list(range(20))
    assert not background.wait()


def test_it_is_busy_until_the_task_has_ended() -> None:
    background = BackgroundThread("test")
    assert not background.busy
    with held(background):
        assert background.busy
        assert not background.done()
    assert background.wait()
    assert not background.busy
    assert not background.done()


@pytest.mark.parametrize("ask", ["wait", "check", "done", "start"])
def test_an_error_is_raised_once(ask: str) -> None:
    background = BackgroundThread("test")
    background.start(fail)
    background.waiter()()
    with pytest.raises(ValueError, match="no"):
        getattr(background, ask)(*[fail] * (ask == "start"))
    assert not background.wait()


def test_a_waiter_waits_for_the_task_of_its_time() -> None:
    background = BackgroundThread("test")
    background.waiter()()
    with held(background):
        waiter = background.waiter()
        other = threading.Thread(target=waiter)
        other.start()
        other.join(0.05)
        assert other.is_alive()
    other.join(10)
    assert not other.is_alive()


def test_a_thread_that_has_ended_in_a_task_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where memory is short: what ends a task cannot be noted."""
    monkeypatch.setattr("headrace.machine.background._LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr("headrace.machine.background._Task.run", _out_of_memory)
    background = BackgroundThread("test")
    background.start(fail)
    with pytest.raises(RuntimeError, match="the thread headrace-test has ended in the middle of a task"):
        background.wait()


def _out_of_memory(*_: object) -> None:
    raise MemoryError


def test_the_thread_ends_with_the_object() -> None:
    background = BackgroundThread("ends")
    background.start(lambda: None)
    background.wait()
    (thread,) = [each for each in threading.enumerate() if each.name == "headrace-ends"]
    del background
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_closing_drops_an_error_and_ends_the_thread() -> None:
    background = BackgroundThread("closed")
    background.start(fail)
    background.close()
    assert not any(each.name == "headrace-closed" for each in threading.enumerate())
    background.check()
    assert not background.wait()


def test_the_thread_is_there_before_the_first_task() -> None:
    """One that starts later may not come up where the process has reached a limit."""
    background = BackgroundThread("there")
    assert any(each.name == "headrace-there" for each in threading.enumerate())
    assert not background.busy
