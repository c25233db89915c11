"""Measures how fast each worker computes, and splits the batch of the next rounds by that."""

from __future__ import annotations

from statistics import median
from time import perf_counter

import torch

from headrace.devices import synchronize
from headrace.policies.balance import balanced_sizes
from headrace.policies.roles import split
from headrace.spec.events import SharesBalanced
from headrace.worker.session import WorkerSession

_FIRST_WINDOW, _LONGEST_WINDOW = 8, 128


class ShareBalancer:
    """Compares, after a window of rounds, how long the workers' shares took them.

    A window is 8 rounds after a change, and twice as long each time that nothing changes, up to 128.
    """

    def __init__(self, session: WorkerSession) -> None:
        self._session = session
        self._sizes = split(session.loader.full_batch, session.run.plan.shares)
        self._window = _FIRST_WINDOW
        self._seconds: list[float] = []
        self._device = torch.device(session.run.plan.role(session.rank).device)

    def note(self, began: float) -> None:
        """Notes that this worker has computed its share of a round, which began so on the clock of `perf_counter`."""
        # The last batch of an epoch is short.
        if 2 * self._session.progress.share.of <= self._session.loader.full_batch:
            return
        synchronize(self._device)
        self._seconds.append(perf_counter() - began)

    def reassigns(self) -> bool:
        """Gives the loader new shares where that makes steps shorter; all workers call it, after the same round."""
        if len(self._seconds) < self._window:
            return False
        session, group = self._session, self._session.group
        own, self._seconds = median(self._seconds), []
        seconds = group.sum([own * (rank == group.rank) for rank in range(group.world)])
        sizes = balanced_sizes(self._sizes, seconds)
        if sizes == self._sizes:
            self._window = min(2 * self._window, _LONGEST_WINDOW)
            return False
        self._sizes, self._window = sizes, _FIRST_WINDOW
        session.loader.assign(sizes)
        if group.rank == 0:
            now = session.events.now()
            session.events.write(SharesBalanced(session.rank, now, session.progress.done, sizes, tuple(seconds)))
        return True
