"""Reads a worker's losses, each or many at a time, and handles those that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import monotonic

import torch
from torch import Tensor

from headrace.errors import NonFiniteGradient, NonFiniteLoss
from headrace.spec.events import NonFinite
from headrace.spec.plan import sums_lie_in_host_memory
from headrace.training.clipping import StepDecision
from headrace.worker.session import WorkerSession

_READ_EVERY_S = 0.25

_Head = tuple[int, int, int, float | Tensor, int, tuple[int, ...], str]
"""Step, epoch, examples, weight, lease, versions of the parameters taken over before it, set of parameters."""


class LossReader:
    """Reads losses at once on a CPU, or if an option needs them; otherwise a few times a second.

    With them it reads the decisions that were left on the device, and gives them to `decided`, which may raise, in the
    order of rounds: what is wrong in a round is found before anything that comes after it is saved.

    Attributes:
        defers: whether decisions are left on the device.
    """

    def __init__(self, session: WorkerSession) -> None:
        options, plan, exchange = session.run.job.options, session.run.plan, session.replica.exchange
        self.decided: Callable[[StepDecision, int, float | None], None] = lambda decision, step, loss: None
        # What is summed in host memory has waited for the device already.
        waits = plan.role(session.rank).device == "cpu" or sums_lie_in_host_memory(plan)
        needs = options.on_nonfinite != "raise" or options.precision == "fp16"
        self._at_once = waits or (needs and not exchange.defers)
        self.defers = exchange.defers and not waits
        self._scaled = options.precision == "fp16"
        self._rank = session.rank
        self._page = session.page
        self._events = session.events
        self._unread: list[tuple[_Head, Tensor | None, Tensor | None, list[float]]] = []
        self._read = monotonic()

    def now(self, loss: Tensor | None) -> float | None:
        """Returns the loss as a number where losses are read at once."""
        return loss.item() if loss is not None and self._at_once else None

    def finite(self, loss: Tensor | None, number: float | None, device: torch.device) -> bool | Tensor:
        """Returns whether a loss is finite; on the device, where decisions stay there. No loss is."""
        if self.defers:
            return torch.ones((), dtype=torch.bool, device=device) if loss is None else loss.isfinite().to(device)
        return number is None or math.isfinite(number)

    def note(
        self, head: _Head, loss: Tensor | None, number: float | None, record: Tensor | None, times_s: list[float]
    ) -> None:
        """Writes the event of a step, now or when its loss is read; raises NonFiniteLoss for NaN or infinity.

        `record` is that of a decision that was left on the device.
        """
        there = any(isinstance(each, Tensor) for each in (head[3], loss, record))
        if self._at_once or not there:
            self._write(head, number, float(head[3]), times_s)
            return
        self._unread.append((head, loss, record, times_s[:]))
        if monotonic() - self._read > _READ_EVERY_S:
            self.read()

    def read(self) -> None:
        """Reads the losses and the decisions that have not been read yet, in one copy."""
        unread, self._unread = self._unread, []
        there = [each for (*_, weight, _, _, _), loss, record, _ in unread for each in (weight, loss, record)]
        tensors = [each.detach().double().view(-1) for each in there if isinstance(each, Tensor)]
        # A loss of the user's own may lie elsewhere.
        numbers = iter(torch.cat([each.to(tensors[-1].device) for each in tensors]).tolist() if tensors else ())
        for head, loss, record, times_s in unread:
            weight = next(numbers) if isinstance(head[3], Tensor) else head[3]
            # The mean over a share that weighs nothing is none.
            number = next(numbers) if loss is not None else None
            number = number if weight else None
            if record is not None:
                bad, broken, scale = (next(numbers) for _ in range(3))
                decision = StepDecision.of(bad, broken, scale if self._scaled else None)
                self.decided(decision, head[0], number)
                number = number if number is not None and math.isfinite(number) else None
            self._write(head, number, weight, times_s)
        self._read = monotonic()

    def _write(self, head: _Head, number: float | None, weight: float, times_s: list[float]) -> None:
        step, epoch, examples, _, lease, pulled, turn = head
        if number is not None:
            if not math.isfinite(number):
                raise NonFiniteLoss(self._rank, step, number)
            self._page.ranks[self._rank].heartbeat.loss = number
        self._events.stepped(step, epoch, examples, number, weight, lease, *times_s, pulled=pulled, turn=turn)


MOST_IN_A_ROW = {"skip": 10, "rollback": 3}
"""The run ends after so many consecutive bad rounds: it would never make progress."""


class NonFiniteHandler:
    """Skips, rolls back, or raises, after a round whose loss or gradient is not finite; rank `reporter` tells."""

    def __init__(self, session: WorkerSession, roll_back: Callable[[], None], reporter: int) -> None:
        self._action = session.run.job.options.on_nonfinite
        self._scaled = session.run.job.options.precision == "fp16"
        self._rank = session.rank
        self._group = session.group
        self._page = session.page
        self._events = session.events
        self._roll_back = roll_back
        self._reporter = reporter
        self._row = 0
        # A bad forward pass may have changed buffers.
        self._buffers = list(session.replica.compute.module.buffers()) if self._action != "raise" else []
        self._kept: list[Tensor] = []

    def before(self) -> None:
        """Copies the state that a forward pass may change besides the gradients."""
        # Anew after a bad round, too: a synchronization may have changed them since.
        with torch.no_grad():
            self._kept = [buffer.clone() for buffer in self._buffers]

    def restore(self, decision: StepDecision) -> None:
        """Undoes what the forward pass of a bad round has changed besides the gradients."""
        if decision.overflow:
            return
        with torch.no_grad():
            for buffer, kept in zip(self._buffers, self._kept, strict=True):
                buffer.copy_(kept)

    @torch.no_grad()
    def restore_there(self, record: Tensor) -> None:
        """Does so on the device, which alone knows whether the round was bad."""
        if not self._buffers:
            return
        bad = record[:2].sum() > 0
        if self._scaled:
            # Not where the gradients overflowed because of the loss scale.
            bad &= (record[0] > 0) | (record[2] < 1.0)
        for buffer, kept in zip(self._buffers, self._kept, strict=True):
            buffer.copy_(torch.where(bad, kept, buffer))

    def later(self, decision: StepDecision, step: int, loss: float | None) -> None:
        """Does what `good` and `bad` do, when the decision about a round is read."""
        if decision.apply:
            self.good()
            return
        if loss is not None:
            self.tell(self._rank, loss)
        self.bad(decision, step, at_once=False)

    def good(self) -> None:
        """Resets the count of bad rounds after a round with an update."""
        self._row = 0

    def bad(self, decision: StepDecision, step: int, at_once: bool = True) -> None:
        """Skips or rolls back, or raises if the option is "raise" or there were too many bad rounds in a row.

        Decisions that are not read `at_once` are read by each rank when it does, and one rank raises.
        """
        if decision.overflow:
            return
        self._row += 1
        gives_up = self._row > MOST_IN_A_ROW.get(self._action, 0)
        rank, members = self._group.rank, self._group.members
        reporter = decision.bad_losses[0] if gives_up and decision.bad_losses else self._reporter
        if rank == reporter:
            action = "raise" if gives_up else self._action
            # Members that have changed have other numbers in the run.
            bad = decision.bad_losses if self._group.fixed else tuple(members[each] for each in decision.bad_losses)
            self._events.write(NonFinite(self._events.rank, self._events.now(), step, bad, action))
        if gives_up:
            if rank != reporter and not at_once:
                return
            if rank != reporter:
                # One rank raises; the others end because of it.
                self._group.barrier()
            if decision.bad_losses:
                named = reporter if self._group.fixed else members[reporter]
                raise NonFiniteLoss(named, step, self._page.ranks[named].heartbeat.loss, self._row)
            raise NonFiniteGradient(step, self._row)
        if self._action == "rollback":
            self._roll_back()

    def tell(self, rank: int, loss: float) -> None:
        """Publishes a loss that is not finite, before the other ranks look for the rank that had it."""
        if not math.isfinite(loss):
            self._page.ranks[rank].heartbeat.loss = loss
