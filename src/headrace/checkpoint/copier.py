"""A thread that copies a run's checkpoints to another file system, when they are complete on the run's own disk."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

from headrace.checkpoint.folder import CheckpointFolder
from headrace.checkpoint.remote import RemoteFolder
from headrace.errors import CorruptCheckpoint, HeadraceError


class CheckpointCopier:
    """Copies the newest checkpoint; those that were saved while an older one was copied are left out.

    A service that fails costs a line: the next checkpoint is tried again. If the last one fails, the end says so.
    """

    def __init__(self, folder: CheckpointFolder, remote: RemoteFolder, keep: int) -> None:
        self._folder = folder
        self._remote = remote
        self._keep = keep
        self._wanted = threading.Event()
        self._is_over = False
        self._lines: deque[str] = deque()
        self._copied: int | None = None
        self._problem = ""
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="headrace-copier", daemon=True)

    def start(self) -> None:
        """Starts the thread; it begins with what an earlier attempt could not copy."""
        self._thread.start()
        self.wake()

    def wake(self) -> None:
        """Says that there may be a new checkpoint."""
        self._wanted.set()

    def finish(self) -> None:
        """Says that there will be no newer checkpoint."""
        self._is_over = True
        self.wake()

    def wait(self, timeout_s: float) -> bool:
        """Blocks until the last checkpoint is copied, or could not be; returns whether that is so."""
        self._thread.join(timeout_s)
        if self._failure:
            raise self._failure
        return not self._thread.is_alive()

    def lines(self) -> Iterator[str]:
        """Yields what there is to say since the last call."""
        while self._lines:
            yield self._lines.popleft()

    def _work(self) -> None:
        try:
            over = False
            while not over:
                self._wanted.wait()
                # In this order: nothing is saved after the end was told.
                over = self._is_over
                self._wanted.clear()
                while not self._copy_newest():
                    pass
            if self._problem:
                self._lines.append(
                    f"THE LAST CHECKPOINT IS NOT AT {self._remote.url}: {self._problem}. It is in {self._folder.path}; "
                    "copy it from there, or go on with resume=True (--resume), which tries again"
                )
            elif self._copied is not None:
                self._lines.append(f"the checkpoint of step {self._copied} is at {self._remote.url}, too")
        except Exception as failure:  # a fault of ours: raised again by `wait`, when the run has ended
            self._failure = failure

    def _copy_newest(self) -> bool:
        """Copies the newest checkpoint; returns False if it was deleted meanwhile, so that there is a newer one."""
        step = None
        try:
            step = next(iter(self._folder.steps()[-1:]), None)
            if step is None:
                return True
            self._remote.send(self._folder.open(step))
            self._remote.prune(step, self._keep)
        except (HeadraceError, OSError) as error:
            if isinstance(error, CorruptCheckpoint) and step is not None and self._is_gone(step):
                return False
            if not self._problem and not self._is_over:
                self._lines.append(
                    f"the checkpoint of step {step} was not copied: {error}. Training goes on, and the next checkpoint "
                    "is tried again"
                )
            self._problem = str(error)
            return True
        if self._problem and not self._is_over:
            self._lines.append(f"checkpoints are copied to {self._remote.url} again, from step {step} on")
        self._copied, self._problem = step, ""
        return True

    def _is_gone(self, step: int) -> bool:
        try:
            return step not in self._folder.steps()
        except (HeadraceError, OSError):
            return False
