"""A process is alive while it computes or its beat goes on, and silent when it does neither."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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
        vitals = LivenessProbe(pid)
        vitals.silent_s(0)
        # However seldom it gets the processor, it shows itself again and again.
        for _ in range(5):
            time.sleep(0.02)
            assert until(lambda: vitals.silent_s(0) == 0.0, 30)


@pytest.mark.slow
def test_a_process_that_sleeps_shows_itself_by_its_beat() -> None:
    with process("import time; time.sleep(600)") as pid:
        vitals = LivenessProbe(pid)
        # It computes until it has begun to sleep.
        assert until(lambda: vitals.silent_s(0) > 0.2, 30)
        assert vitals.silent_s(1) == 0.0
        assert until(lambda: vitals.silent_s(1) > 0.2, 30)


@pytest.mark.slow
def test_a_stopped_process_is_silent() -> None:
    with process("while True: pass") as pid:
        assert not LivenessProbe(pid).is_stopped()
        os.kill(pid, signal.SIGSTOP)
        vitals = LivenessProbe(pid)
        assert until(vitals.is_stopped, 30)
        assert until(lambda: vitals.silent_s(0) > 0.4, 30)
        assert not vitals.is_gone()


@pytest.mark.slow
def test_a_process_that_ended_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    vitals = LivenessProbe(child.pid)
    assert until(vitals.is_gone, 30), "a zombie has gone"
    assert state(child.pid) == "Z"
    child.wait()
    assert vitals.is_gone()
    assert not vitals.is_stopped()


def test_who_has_not_said_its_id_is_silent() -> None:
    vitals = LivenessProbe(0)
    first = vitals.silent_s(0)
    time.sleep(0.02)
    assert (first, vitals.silent_s(0) > 0.01) == (0.0, True)


def test_a_watcher_that_stood_still_accuses_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("headrace.engine.base.monotonic", lambda: clock[0])
    vitals = LivenessProbe(0)
    vitals.silent_s(0)
    clock[0] += 3600
    # The watched has stood still, too; there is time for its next beat before the shortest timeout, of 1 s, is over.
    assert vitals.silent_s(0) <= 0.5
