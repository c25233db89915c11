"""What a loss or gradient that is NaN or infinite leads to: the same on every rank, for all know the same."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from headrace.collectives.base import ProcessGroup
from headrace.errors import NonFiniteGradient, NonFiniteLoss
from headrace.shared_memory.control_page import ControlPage
from headrace.spec.events import NonFinite
from headrace.training.clipping import StepDecision
from headrace.worker.events import EventWriter

MOST_IN_A_ROW = {"skip": 10, "rollback": 3}
"""After so many bad rounds without a good one between them, the run ends: it would go on for ever."""


class NonFiniteHandler:
    """Args:
    action: "raise", "skip" or "rollback".
    module: whose buffers a bad forward pass may have spoilt.
    group: the workers.
    page: where losses are told.
    journal: of this process.
    roll_back: brings back the last checkpoint.
    place: of this rank among those of its replica, who find out for themselves while others go on; None where all
        find out together.
    """

    def __init__(
        self,
        action: str,
        module: nn.Module,
        group: ProcessGroup,
        page: ControlPage,
        journal: EventWriter,
        roll_back: Callable[[], None],
        place: int | None = None,
    ) -> None:
        self._action = action
        self._group = group
        self._page = page
        self._journal = journal
        self._roll_back = roll_back
        self._place = place
        self._row = 0
        self._buffers = list(module.buffers()) if action != "raise" else []
        self._kept: list[Tensor] = []

    def before(self) -> None:
        """Keeps what a round's forward pass may change beside the gradients."""
        if not self._buffers:
            return
        if self._row == 0 or not self._kept:
            with torch.no_grad():
                self._kept = [buffer.clone() for buffer in self._buffers]

    def good(self) -> None:
        """Notes a round whose update was made."""
        self._row = 0

    def bad(self, verdict: StepDecision, step: int) -> None:
        """Does what was asked for.

        Raises:
            NonFiniteLoss, NonFiniteGradient: that was to raise, or it has happened too often in a row.
        """
        if verdict.overflow:
            return
        self._row += 1
        gives_up = self._row > MOST_IN_A_ROW.get(self._action, 0)
        rank = self._group.rank
        first = 0 if self._place is None else rank - self._place
        speaker = verdict.bad_losses[0] if gives_up and verdict.bad_losses else first
        if rank == speaker:
            action = "raise" if gives_up else self._action
            self._journal.write(NonFinite(rank, self._journal.now(), step, verdict.bad_losses, action))
        if gives_up:
            if rank != speaker:
                # One error is enough; the others end with its rank.
                self._group.barrier()
            if verdict.bad_losses:
                raise NonFiniteLoss(speaker, step, self._page.ranks[speaker].heartbeat.loss, self._row)
            raise NonFiniteGradient(step, self._row)
        with torch.no_grad():
            for buffer, kept in zip(self._buffers, self._kept, strict=True):
                buffer.copy_(kept)
        if self._action == "rollback":
            self._roll_back()

    def tell(self, rank: int, loss: float) -> None:
        """Lets the others know a loss that is not finite, before they ask who it was."""
        if not math.isfinite(loss):
            self._page.ranks[rank].heartbeat.loss = loss
