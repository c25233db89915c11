"""What loops have in common whose workers all do every round."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator
from dataclasses import replace
from time import perf_counter

import torch

from headrace.collectives.base import ProcessGroup
from headrace.data import delivered
from headrace.errors import UsageError
from headrace.spec.job import Share
from headrace.worker.control import RunControl
from headrace.worker.loops.base import Loop
from headrace.worker.session import WorkerSession


class RoundLoop(Loop):
    """Round after round, a share of every global batch for each worker."""

    def __init__(self, session: WorkerSession, control: RunControl, reporter: int = 0) -> None:
        super().__init__(reporter)
        self._session = session
        self._control = control

    @abstractmethod
    def next_meeting(self) -> int:
        """Returns how many rounds are done at the workers' next meeting that is not before the current round's end."""

    @abstractmethod
    def count(self, share: Share) -> Share:
        """Returns the share with the number of examples that its weight refers to."""

    @property
    @abstractmethod
    def meets(self) -> bool:
        """Whether the workers' steps meet, so that none may leave one out."""

    def shares(self) -> Generator[Share, None, None]:
        session, progress, control = self._session, self._session.progress, self._control
        first = progress.done
        device = torch.device(session.run.plan.role(session.rank).device)
        shares = delivered(session.loader.rounds(first, progress.rounds), device)
        try:
            for round_ in range(first, progress.rounds):
                if control.stopper.over:
                    return
                progress.round = round_
                control.ask(self.next_meeting())
                began = perf_counter()
                progress.share = self.count(next(shares))
                progress.waited_s = perf_counter() - began
                yield progress.share
                self._require_step()
                control.save_if_due()
                if control.is_last():
                    return
        except GeneratorExit:
            # A batch that the loop leaves undone comes again when the run goes on.
            progress.round -= not self._has_stepped()
            raise
        finally:
            shares.close()

    def _has_stepped(self) -> bool:
        session = self._session
        return bool(session.page.ranks[session.rank].heartbeat.step == session.progress.done)

    def _require_step(self) -> None:
        # A worker that leaves out a round would take the others' next meeting for another one.
        if self._session.group.world > 1 and self.meets and not self._has_stepped():
            raise UsageError(
                f"the loop on rank {self._session.rank} went on without worker.step() or worker.update() in round "
                f"{self._session.progress.round}; every worker steps every batch, so that all meet in every round"
            )


def count_examples(share: Share, drops: bool, group: ProcessGroup, counts: bool = True) -> Share:
    """Returns a share that knows how many examples all workers have together; all workers call it.

    Args:
        drops: whether the data may leave examples out; if not, the share knows already.
        counts: whether this worker speaks for its replica, whose ranks all have the same share.
    """
    if not drops:
        return share
    (total,) = group.sum([float(share.examples * counts)])
    return replace(share, of=int(total))
