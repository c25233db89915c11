"""A thread beside another: what a task held is let go of when it has ended, and a late one runs where it is awaited."""

from __future__ import annotations

import threading
import weakref

import pytest

from headrace.machine.background import BackgroundThread


class Held:
    """Something that a task holds."""

    def use(self) -> None:
        """Is what the task does."""


@pytest.mark.parametrize("late", [False, True])
def test_a_task_that_has_ended_holds_nothing(late: bool) -> None:
    thread, held = BackgroundThread("held", late), Held()
    gone = weakref.ref(held)
    thread.start(held.use)
    del held
    # Which does not take the task.
    thread.waiter()()
    assert thread.wait()
    assert gone() is None
    thread.close()


def test_a_late_task_runs_where_it_is_awaited() -> None:
    thread, ran = BackgroundThread("late", late=True), list[threading.Thread]()
    thread.start(lambda: ran.append(threading.current_thread()))
    assert thread.busy
    assert not thread.done()
    assert not ran
    thread.start(lambda: ran.append(threading.current_thread()))
    assert ran == [threading.current_thread()]
    thread.close()
    assert len(ran) == 2


@pytest.mark.parametrize("late", [False, True])
def test_the_error_of_a_task_is_raised_where_it_is_awaited(late: bool) -> None:
    def fail() -> None:
        raise ValueError("of the task")

    thread = BackgroundThread("fails", late)
    thread.start(fail)
    with pytest.raises(ValueError, match="of the task"):
        thread.wait()
    thread.close()
