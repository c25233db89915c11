"""A guard against copies that drift apart: what a strategy holds equal on all ranks is compared from time to time.

A model that writes its own parameters, a hook or a loop that acts on one rank alone, or a fault of memory makes mirrors
unequal, and what they train then is no model of anybody's. Digests are compared after the first rounds, at every
evaluation and at every save.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from headrace.collectives.equality import find_difference
from headrace.errors import RanksDiffer
from headrace.training.shared_buffers.batch_norm import averaged_buffers
from headrace.training.shared_buffers.synced import synced_buffers
from headrace.training.synchronization import PeriodicSync
from headrace.worker.session import WorkerSession

_FIRST_ROUNDS = (1, 2, 4)
"""Numbers of done rounds after which copies are compared: state that an optimizer keeps shows in the second."""
_ROUNDING = 1e-3
"""Relative difference that mirrors may have on devices of several kinds, whose sums and products round differently."""


class EqualityGuard:
    """Compares this worker's tensors with those of the workers that hold the same part of the model."""

    def __init__(self, session: WorkerSession) -> None:
        run, compute = session.run, session.replica.compute
        self._session = session
        self._compute = compute
        self._strategy = run.strategy
        self._averages = isinstance(session.replica.sync, PeriodicSync)
        self._sync_buffers = run.job.options.sync_buffers != "local"
        workers = run.plan.roles[: run.plan.workers]
        alike = len({(role.host, torch.device(role.device).type) for role in workers}) == 1
        self._rounding = 0.0 if alike else _ROUNDING

    def after_round(self, done: int) -> None:
        """Compares after the first rounds, where workers go in lockstep; every worker calls it.

        Raises:
            RanksDiffer: a worker holds other values.
        """
        if done in _FIRST_ROUNDS and self._session.replica.sync is None and self._strategy.lock_step:
            self.compare(evaluates=False)

    def compare(self, evaluates: bool) -> None:
        """Compares now; every worker calls it.

        `evaluates` says that averaged weights and statistics are in their places.

        Raises:
            RanksDiffer: a worker holds other values.
        """
        group, done = self._session.mates, self._session.progress.done
        # Workers that average their parameters now and then are equal when the averages are in place.
        if group.world == 1 or not self._strategy.one_model or (self._averages and not evaluates):
            return
        difference = find_difference(list(self._tensors(evaluates)), group, self._rounding)
        if difference is None:
            return
        own = [float(self._session.rank) if rank == group.rank else 0.0 for rank in range(group.world)]
        ranks = [int(rank) for rank in group.sum(own)]
        odd, usual = (ranks[each] for each in (difference.rank, difference.reference))
        raise RanksDiffer(odd, usual, difference.name, str(difference), done, self._strategy.name)

    def _tensors(self, evaluates: bool) -> Iterator[tuple[str, Tensor]]:
        yield from self._compute.equal_parameters()
        module = self._compute.module
        equal = synced_buffers(module) if self._sync_buffers else []
        chosen = {id(buffer) for buffer in (*equal, *(averaged_buffers(module) if evaluates else ()))}
        yield from ((name, buffer) for name, buffer in module.named_buffers() if id(buffer) in chosen)
