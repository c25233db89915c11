"""A thread beside the one that gives it tasks."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

_LOOK_EVERY_S = 1.0


class _Task:
    """A call, and its end."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call
        self.ended = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        """Makes the call, and lets go of it, with what it holds."""
        assert self._call is not None, "a task runs once"
        try:
            self._call()
        except BaseException as error:  # raised again by `wait`
            self.error = error
        self._call = None
        self.ended.set()


class BackgroundThread:
    """Runs one task at a time in a daemon thread, which is started at once, and ends by `close` or with this object.

    At once, because `Thread.start` blocks for ever if the new thread fails before it runs, which happens when a
    process reaches its memory limit in the middle of a run. With `late` there is no thread: a task runs where it is
    waited for, as if it took until then.
    """

    def __init__(self, name: str, late: bool = False) -> None:
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._task: _Task | None = None
        # The thread refers to the queue alone, so that it does not keep this object alive.
        self._thread = threading.Thread(target=_work, args=(self._tasks,), name=f"headrace-{name}", daemon=True)
        self._late = late
        if late:
            return
        self._thread.start()
        weakref.finalize(self, self._tasks.put, None)

    @property
    def busy(self) -> bool:
        """Whether a task runs."""
        return self._task is not None and not self._task.ended.is_set()

    def start(self, call: Callable[[], object]) -> None:
        """Starts a task when the one before has ended, whose error it raises."""
        self.wait()
        self._task = _Task(call)
        if not self._late:
            self._tasks.put(self._task)

    def wait(self) -> bool:
        """Blocks until no task runs, and raises its error; returns whether there was a task since the last call.

        Raises:
            RuntimeError: the thread has ended in the middle of a task.
        """
        task, self._task = self._task, None
        if task is None:
            return False
        self._await(task)
        if task.error is not None:
            raise task.error
        return True

    def done(self) -> bool:
        """Returns True once for every task that has ended, and raises its error; does not block."""
        return self._task is not None and self._task.ended.is_set() and self.wait()

    def close(self) -> None:
        """Ends the thread when its task has ended, whose error is dropped; blocks until then."""
        task, self._task = self._task, None
        if task is not None:
            self._await(task)
        self._tasks.put(None)
        if not self._late:
            self._thread.join()

    def check(self) -> None:
        """Raises the error of a task that has failed, for a thread that waits for what the task would have done."""
        if self._task is not None and self._task.ended.is_set() and self._task.error is not None:
            self.wait()

    def waiter(self) -> Callable[[], None]:
        """Returns a function for another thread, which blocks until the task that runs now has ended."""
        task = self._task
        return lambda: None if task is None else self._await(task)

    def _await(self, task: _Task) -> None:
        if self._late and not task.ended.is_set():
            task.run()
        while not task.ended.wait(_LOOK_EVERY_S):
            if not self._thread.is_alive() and not task.ended.is_set():
                raise RuntimeError(
                    f"the thread {self._thread.name} has ended in the middle of a task, as it may when memory is short"
                )


def _work(tasks: SimpleQueue[_Task | None]) -> None:
    while (task := tasks.get()) is not None:
        task.run()
        del task
