"""The processes of one run on this host: started, and started again in the place of those that were lost."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING

from headrace.engine.local.fork_server import ForkServer
from headrace.worker.run_spec import RunSpec

if TYPE_CHECKING:
    # For the type alone: it imports torch, and an engine starts before that.
    from headrace.spec.plan import Role


class ProcessLauncher:
    """Args:
    order: the run.
    nursery: that starts processes.
    control: descriptor of the run's control page.
    seats: how many processes that page has room for.
    lifeline: descriptor whose other end closes with the launcher.
    """

    def __init__(self, order: RunSpec, nursery: ForkServer, control: int, seats: int, lifeline: int) -> None:
        # Not before, because it imports torch.
        from headrace.engine.local.process import log_path
        from headrace.engine.shipping import pack

        self._order = order
        self._nursery = nursery
        self._descriptors = [control, lifeline]
        self._seats = seats
        self._code, self._memory, self._length = pack(order)
        self._log_path = log_path
        log_path(order.run_dir, 0).parent.mkdir(parents=True, exist_ok=True)

    def start(self, role: Role) -> None:
        """Starts a process; how many there were in its place before stands in the control page."""
        read_end, write_end = os.pipe()
        message = {
            "ranks": self._seats,
            "threads": role.threads,
            "directory": os.getcwd(),
            "path": sys.path,
            "log": str(self._log_path(self._order.run_dir, role.rank)),
            "data_bytes": self._length,
        }
        # The lock is not read there; it holds the run's directory until the last worker has ended.
        further = [descriptor for descriptor in (self._memory, self._order.attempt.lock) if descriptor >= 0]
        try:
            self._nursery.spawn(role.rank, message, [*self._descriptors, read_end, *further])
        finally:
            os.close(read_end)
        # One thread each: a worker that dies before it has read must not hold up the others.
        threading.Thread(target=_pour, args=(write_end, self._code), daemon=True).start()

    def close(self) -> None:
        """Lets go of what new processes would be given."""
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1


def _pour(pipe: int, code: bytes) -> None:
    try:
        with os.fdopen(pipe, "wb") as stream:
            stream.write(code)
    except BrokenPipeError:
        pass  # the worker has died, which whoever watches it will see
