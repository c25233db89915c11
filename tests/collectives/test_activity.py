"""What a thread does, as its stack tells it."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from headrace import internals
from headrace.collectives.watchdog.activity import activity_of


class Pause:
    """Code of a user's that waits until a test has looked."""

    def __init__(self) -> None:
        self.begun, self.over = threading.Event(), threading.Event()

    def __call__(self, *_: object) -> None:
        self.begun.set()
        self.over.wait(10)


@contextmanager
def paused(act: Callable[[Pause], object]) -> Iterator[int]:
    """Yields the ident of a thread that does something, while the pause in it lasts."""
    pause = Pause()
    thread = threading.Thread(target=act, args=(pause,))
    thread.start()
    assert pause.begun.wait(10)
    assert thread.ident
    yield thread.ident
    pause.over.set()
    thread.join()


def differentiate(pause: Pause) -> None:
    weight = torch.ones(1, requires_grad=True)
    weight.register_hook(pause)
    weight.sum().backward()


def test_code_of_a_users_own_has_its_line() -> None:
    with paused(lambda pause: pause()) as ident:
        assert re.fullmatch(r"runs code of its own \(test_activity.py, line \d+, in __call__\)", activity_of(ident))


def test_backward_is_backward() -> None:
    with paused(differentiate) as ident:
        assert activity_of(ident).startswith("is in backward")


def test_a_thread_that_has_ended_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert activity_of(0) == ""
    monkeypatch.setattr(internals, "frames_of_threads", dict)
    assert activity_of(threading.get_ident()) == ""
