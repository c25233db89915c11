"""What goes on while a worker computes: one thing at a time, in a thread with links of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

from headrace.parameter_server.client.client import Client


class Background:
    """Args:
    name: of the thread.
    client: used by that thread alone.

    Attributes:
        client: see there.
    """

    def __init__(self, name: str, client: Client) -> None:
        self.client = client
        self._name = f"headrace-{name}"
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, task: Callable[[], object]) -> None:
        """Does something; waits for what was begun before."""
        self.wait()

        def run() -> None:
            try:
                task()
            except BaseException as error:  # raised again by whoever waits
                self._error = error

        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()

    def wait(self) -> bool:
        """Returns when nothing is going on any more: whether anything was; raises what went wrong."""
        begun = self._join()
        self.check()
        return begun

    def done(self) -> bool:
        """Whether what was begun has just come to its end; it says so once, and raises what went wrong."""
        return self._thread is not None and not self._thread.is_alive() and self.wait()

    def check(self) -> None:
        """Raises what went wrong, if anything did; for whoever waits for what would never come then."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Waits for the thread, and ends the links; an error of the thread is the end's, not its cause."""
        self._join()
        self.client.close()

    def _join(self) -> bool:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        return thread is not None
