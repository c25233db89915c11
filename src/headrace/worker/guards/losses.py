"""Is the loss that a loop of the user's own gives to `worker.backward` a mean over this worker's share?"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headrace.spec.events.run import Notice
from headrace.spec.job import Share
from headrace.training.user_code.loss_graph import LastOutput, MeanCheck, findings_of, require_mean
from headrace.worker.session import WorkerSession

_PASSES = 6
"""Losses that are looked at: turns of several models may each have one of their own."""
_REMEDY = "give worker.backward the mean over the share, or hr.Mean(total, weight)"
_COUNTED = "give worker.backward hr.Mean(total, number)"


class LossGuard:
    """Looks at the first losses of a loop on one of several shares; a sum over examples raises a UsageError."""

    def __init__(self, session: WorkerSession) -> None:
        self._session = session
        self._left = _PASSES if session.group.world > 1 else 0
        self._last = LastOutput()
        self._said: set[str] = set()
        if self._left:
            self._handle = session.replica.compute.module.register_forward_hook(self._last.keep)

    def look(self, loss: Any, share: Share) -> None:
        """Looks at a loss, before it is differentiated."""
        if not self._left:
            return
        self._left -= 1
        if isinstance(loss, Tensor) and loss.numel() == 1 and loss.grad_fn is not None and share.examples:
            require_mean(MeanCheck(self._say, _REMEDY, _COUNTED), loss, share.examples, share.of)
            outputs = self._last.take(share.examples)
            for line in () if outputs is None else findings_of(loss, outputs):
                self._say(line)
        if not self._left:
            self._handle.remove()

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            events = self._session.events
            events.write(Notice(self._session.rank, events.now(), f"rank {self._session.rank}: {line}"))
