"""A worker's losses on their way from its device to the events: at once, or many at a time."""

from __future__ import annotations

import math
from time import monotonic

import torch
from torch import Tensor

from headrace.errors import NonFiniteLoss
from headrace.shared_memory.control_page import ControlPage
from headrace.worker.events import EventWriter

_READ_EVERY_S = 0.25

_Head = tuple[int, int, int, float, int]
"""Step, epoch, examples, weight, lease."""


class LossReader:
    """Args:
    rank: of this worker.
    at_once: whether a loss is read where it is noted.
    page: where the last is shown.
    journal: of this process.
    """

    def __init__(self, rank: int, at_once: bool, page: ControlPage, journal: EventWriter) -> None:
        self._rank = rank
        self._at_once = at_once
        self._page = page
        self._journal = journal
        self._unread: list[tuple[_Head, Tensor, list[float]]] = []
        self._read = monotonic()

    def now(self, loss: Tensor | None) -> float | None:
        """Returns the loss as a number where losses are read at once."""
        return loss.item() if loss is not None and self._at_once else None

    def note(self, head: _Head, loss: Tensor | None, number: float | None, times_s: list[float]) -> None:
        """Writes a step down, now or when its loss is read.

        Raises:
            NonFiniteLoss: a loss that was read is none.
        """
        if loss is None or self._at_once:
            self._write(head, number, times_s)
            return
        self._unread.append((head, loss, times_s[:]))
        if monotonic() - self._read > _READ_EVERY_S:
            self.read()

    def read(self) -> None:
        """Reads what has not been read yet."""
        if self._unread:
            numbers = torch.stack([loss for _, loss, _ in self._unread]).tolist()
            for (head, _, times_s), number in zip(self._unread, numbers, strict=True):
                self._write(head, number, times_s)
            self._unread.clear()
        self._read = monotonic()

    def _write(self, head: _Head, number: float | None, times_s: list[float]) -> None:
        step, epoch, examples, weight, lease = head
        if number is not None:
            if not math.isfinite(number):
                raise NonFiniteLoss(self._rank, step, number)
            self._page.ranks[self._rank].heartbeat.loss = number
        self._journal.stepped(step, epoch, examples, number, weight, lease, *times_s)
