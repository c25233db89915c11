"""Is the loss that a loop of the user's own gives to `worker.backward` a mean over this worker's share?"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor

from headrace.hooks import OwnHook
from headrace.spec.events.run import Notice
from headrace.spec.job import Share
from headrace.training.user_code.loss_graph import LastOutput, MeanCheck, ShareFactors, findings_of, require_mean
from headrace.trees import map_tensors
from headrace.worker.session import WorkerSession

_PASSES = 6
"""Losses that are looked at: turns of several models may each have one of their own."""
_REMEDY = "give worker.backward the mean over the share, or hr.Mean(total, weight)"
_COUNTED = "give worker.backward hr.Mean(total, number)"


def _first_dims(batch: Any) -> set[int]:
    found = set[int]()
    map_tensors(lambda tensor: found.add(len(tensor)) if tensor.dim() else None, batch)
    return found


class LossGuard:
    """Looks at the first losses of a loop on one of several shares; a sum over examples raises a UsageError.

    Until then, or until the worker ends, it keeps outputs with their graph.
    """

    def __init__(self, session: WorkerSession, closing: ExitStack) -> None:
        self._session = session
        self._divides = session.group.world > 1
        self._left = _PASSES if self._divides else 0
        self._last = LastOutput()
        self._factors = ShareFactors()
        self._said: set[str] = set()
        self._has_seen_others = False
        if self._left:
            self._handle = session.replica.compute.module.register_forward_hook(OwnHook(self._last.keep))
            closing.callback(self._end)

    def look(self, loss: Any, share: Share) -> None:
        """Looks at a loss, before it is differentiated."""
        is_one = isinstance(loss, Tensor) and loss.numel() == 1 and loss.grad_fn is not None and share.examples > 0
        if is_one and self._divides and (line := self._factors.look(loss, share.examples)):
            self._say(line)
        if not self._left:
            return
        self._left -= 1
        if is_one:
            require_mean(MeanCheck(self._say, _REMEDY, _COUNTED), loss, share.examples, share.of)
            outputs = self._last.take(share.examples)
            for line in () if outputs is None else findings_of(loss, outputs, share.examples):
                self._say(line)
        if not self._left:
            self._end()

    def _end(self) -> None:
        self._handle.remove()
        self.forget()

    def forget(self) -> None:
        """Lets go of the last output: whole steps look at its loss elsewhere."""
        # A graph of FullySharded refers to its module, in ways that Python's collector does not see.
        self._last.outputs = None

    def look_at(self, batch: Any, share: Share) -> None:
        """Says that a step is not of this worker's share, by whose number of examples it is weighted."""
        if self._has_seen_others or share.examples >= share.of:
            return
        given, lent = _first_dims(batch), _first_dims(share.batch)
        self._has_seen_others = bool(given) and share.examples in lent - given
        if self._has_seen_others:
            self._say(
                f"worker.step got {min(given)} of the examples, and this worker's share has {share.examples} of "
                f"{share.of}, by which gradients are weighted: where workers take unequal parts, the result is not "
                f"that of one process; for what is chosen, {_COUNTED}"
            )

    def _say(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            events = self._session.events
            events.write(Notice(self._session.rank, events.now(), f"rank {self._session.rank}: {line}"))
