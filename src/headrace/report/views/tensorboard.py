"""A run's events as scalars for TensorBoard, while it runs."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Self

from headrace.errors import UnfitMachine
from headrace.report.model.training import STEPPED_PARTS
from headrace.report.views.live import non_finite_text
from headrace.spec.events import (
    Evaluated,
    Event,
    Failed,
    Lost,
    NonFinite,
    Notice,
    ParametersAveraged,
    RunStarted,
    Saved,
    SharesBalanced,
    Stepped,
)


class TensorBoard:
    """Takes events (`fit(..., on_event=TensorBoard("runs/a/tensorboard"))`) and writes them as scalars.

    `loss` by step is the weighted mean over the workers, written when as many of them have reported the step as there
    are, or, where workers do not go in step, when each of them is beyond it;
    `seconds/<part>/rank-<n>` where each worker's step went; `evaluation/<metric>`; `checkpoints/stall_s` and
    `checkpoints/bytes` by step; notices, failures and rounds that were not finite as text. A resumed run continues
    the same curves.

    Args:
        log_dir: where to; made if missing.

    Raises:
        UnfitMachine: the package tensorboard is not installed.
    """

    def __init__(self, log_dir: Path | str) -> None:
        try:
            # Inside, since this room is imported without torch and most users have no tensorboard.
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UnfitMachine(
                f"TensorBoard cannot be written ({error}); remedy: pip install headrace[tensorboard]"
            ) from error
        self._open_writer = partial(SummaryWriter, str(log_dir))
        self._writer = self._open_writer()
        self._workers = 1
        self._began = 0.0
        self._open_rounds: dict[int, list[Stepped]] = defaultdict(list)
        self._latest: dict[int, int] = {}
        self._first_open = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __call__(self, event: Event) -> None:
        """Writes the event; kinds without a value over time are ignored."""
        time_s = self._began + event.time_s
        match event:
            case RunStarted():
                self._workers = event.workers
                # A text that is no time leaves the axis "relative" right.
                with suppress(ValueError):
                    self._began = datetime.fromisoformat(event.started_at).timestamp() - event.time_s
                if event.resumed_step:
                    self._resume(event.resumed_step)
            case Stepped():
                for part in STEPPED_PARTS:
                    tag = f"seconds/{part.removesuffix('_s')}/rank-{event.rank}"
                    self._writer.add_scalar(tag, getattr(event, part), event.step, time_s)
                self._add_to_round(event)
            case Evaluated():
                for name, value in event.metrics.items():
                    self._writer.add_scalar(f"evaluation/{name}", value, event.step, time_s)
            case ParametersAveraged():
                self._writer.add_scalar("averaging/drift", event.drift, event.step, time_s)
                self._writer.add_scalar("averaging/period", event.period, event.step, time_s)
            case SharesBalanced():
                for rank, size in enumerate(event.sizes):
                    self._writer.add_scalar(f"shares/rank-{rank}", size, event.step, time_s)
            case Saved():
                self._writer.add_scalar("checkpoints/stall_s", event.stall_s, event.step, time_s)
                self._writer.add_scalar("checkpoints/bytes", event.bytes, event.step, time_s)
            case NonFinite():
                self._writer.add_text("not finite", f"{event.action}, {non_finite_text(event)}", event.step, time_s)
            case Lost():
                self._writer.add_text("lost", event.line, 0, time_s)
            case Notice():
                self._writer.add_text("notice", event.text, 0, time_s)
            case Failed():
                self._writer.add_text(f"failed/rank-{event.rank}", event.cause, event.step, time_s)

    def close(self) -> None:
        """Writes what is left, also the steps that not every worker has finished; may be called twice."""
        for step in sorted(self._open_rounds):
            self._write_loss(step)
        self._writer.close()

    def _resume(self, step: int) -> None:
        """Makes TensorBoard drop what an earlier attempt wrote of the rounds that are repeated."""
        self._open_rounds.clear()
        self._latest.clear()
        self._first_open = 0
        self._writer.close()
        # Not from `step` on: the evaluation after `step` rounds stays, and the loss of round `step` is the same again.
        self._writer = self._open_writer(purge_step=step + 1)

    def _add_to_round(self, event: Stepped) -> None:
        """Adds a worker's step to its round, and writes the rounds that are complete."""
        if event.step < self._first_open:
            return  # A repeated lease: the curve has this round already.
        self._open_rounds[event.step].append(event)
        self._latest[event.rank] = max(event.step, self._latest.get(event.rank, 0))
        if len(self._latest) == self._workers:
            self._first_open = min(self._latest.values())
        for step in sorted(self._open_rounds):
            if step < self._first_open or len(self._open_rounds[step]) == self._workers:
                self._write_loss(step)

    def _write_loss(self, step: int) -> None:
        parts = [event for event in self._open_rounds.pop(step) if event.loss is not None]
        weight = sum(event.weight for event in parts)
        if weight > 0:
            loss = sum((event.loss or 0.0) * event.weight for event in parts) / weight
            time_s = self._began + max(event.time_s for event in parts)
            self._writer.add_scalar("loss", loss, step, time_s)
