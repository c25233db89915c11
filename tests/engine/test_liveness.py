"""A process is alive while it computes or its beat goes on, and silent when it does neither."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from engine.conftest import state, until
from headrace.engine.base import LivenessProbe

pytestmark = pytest.mark.usefixtures("real_python")


@contextmanager
def process(code: str) -> Iterator[int]:
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield child.pid
    finally:
        child.kill()
        child.wait()


@pytest.mark.slow
def test_a_process_that_computes_is_not_silent() -> None:
    with process("while True: pass") as pid:
        probe = LivenessProbe(pid)
        probe.silent_s(0)
        # However seldom it gets the processor, it shows itself again and again.
        for _ in range(5):
            time.sleep(0.02)
            assert until(lambda: probe.silent_s(0) == 0.0, 30)


@pytest.mark.slow
def test_a_process_that_sleeps_shows_itself_by_its_beat() -> None:
    clock = itertools.count(step=0.25)
    with process("import time; time.sleep(600)") as pid:
        probe = LivenessProbe(pid, lambda: next(clock))
        # It computes until it has begun to sleep.
        assert until(lambda: probe.silent_s(0) > 1.0, 30)
        assert probe.silent_s(1) == 0.0
        assert probe.silent_s(1) == 0.25


@pytest.mark.slow
def test_a_stopped_process_is_silent() -> None:
    with process("while True: pass") as pid:
        assert not LivenessProbe(pid).is_stopped()
        os.kill(pid, signal.SIGSTOP)
        probe = LivenessProbe(pid)
        assert until(probe.is_stopped, 30)
        assert until(lambda: probe.silent_s(0) > 0.4, 30)
        assert not probe.is_gone()


@pytest.mark.slow
def test_a_process_that_ended_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    probe = LivenessProbe(child.pid)
    assert until(probe.is_gone, 30), "a zombie has gone"
    assert state(child.pid) == "Z"
    child.wait()
    assert probe.is_gone()
    assert not probe.is_stopped()


def test_who_has_not_said_its_id_is_silent() -> None:
    clock = [100.0]
    probe = LivenessProbe(0, lambda: clock[0])
    first = probe.silent_s(0)
    clock[0] += 0.25
    assert (first, probe.silent_s(0)) == (0.0, 0.25)


def test_a_watcher_that_stood_still_reports_no_loss() -> None:
    clock = [100.0]
    probe = LivenessProbe(0, lambda: clock[0])
    probe.silent_s(0)
    clock[0] += 3600
    # The watched has stood still, too; there is time for its next beat before the shortest timeout, of 1 s, is over.
    assert probe.silent_s(0) <= 0.5


def test_two_threads_that_ask_at_once_count_no_time_twice() -> None:
    class Moment(float):
        """A time from which another thread asks before it is used."""

        def __sub__(self, other: float) -> float:
            passed = float(self) - other
            if not others:
                others.append(threading.Thread(target=probe.silent_s, args=(0,)))
                others[0].start()
                # Where it does not wait for this one, it is done within this time.
                others[0].join(0.1)
            return passed

    clock: list[float] = [100.0]
    others: list[threading.Thread] = []
    probe = LivenessProbe(0, lambda: clock[0])
    probe.silent_s(0)
    clock[0] = Moment(100.4)
    probe.silent_s(0)
    others[0].join()
    assert probe.silent_s(0) == pytest.approx(0.4)
