"""What training is: PyTorch's own steps, in one process, over whole global batches. `headrace verify` compares runs
with what this file computes, so read it: the user's model, loss, optimizer and hooks as they are, and no strategy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from headrace.metrics import Mean, weigh
from headrace.modules import frozen_until
from headrace.spec.job import Job, Share
from headrace.training.user_code.objective import Objective
from headrace.training.whole_model import HALF

Lend = Callable[[int], AbstractContextManager[None]]


class PlainLoop:
    """Trains parameters of `model` in rounds: `begin`, `differentiate` or `backward`, `update`. A round has one
    piece, the whole global batch, or the job's micro-batches; or, in references of strategies, the workers' shares, and
    `lend(worker)` lends a worker's buffers and random numbers to a forward pass."""

    def __init__(self, job: Job, model: nn.Module, objective: Objective, epoch: int, lend: Lend) -> None:
        self.options, self.model, self.objective, self.lend = job.options, model, objective, lend
        self.optimizer: torch.optim.Optimizer = job.optimizer(list(model.named_parameters()))  # type: ignore[operator]
        self.schedule = self.options.schedule(self.optimizer) if self.options.schedule else None
        self.schedule_every = epoch if self.options.schedule_every == "epoch" else 1
        self.done, self.loss, self.weight, self.averages = 0, torch.zeros(()), 0.0, dict[str, Tensor]()

    def begin(self, pieces: Sequence[tuple[int, Share]]) -> None:
        self.pieces, self.loss, self.weight = pieces, torch.zeros(()), 0.0
        (self.objective.model or self.model).zero_grad()

    def differentiate(self) -> None:
        half, self.loss, self.weight = HALF.get(self.options.precision), torch.zeros(()), 0.0
        examples = sum(piece.examples for _, piece in self.pieces)
        for worker, piece in self.pieces:
            with self.lend(worker), torch.autocast("cpu", half, enabled=half is not None):
                loss = self.objective.of(self.model, piece.batch)
            if len(self.pieces) == 1:
                return self.backward(loss)
            total, weight = weigh(loss, piece.examples)
            (total if isinstance(loss, Mean) else loss * (piece.examples / examples)).backward()
            self.loss, self.weight = self.loss + total.detach(), self.weight + float(weight)
        self.loss /= self.weight or 1.0
        for parameter in self.model.parameters() if isinstance(loss, Mean) else ():
            if parameter.grad is not None:
                parameter.grad /= self.weight or 1.0

    def backward(self, loss: Tensor | Mean) -> None:
        mean = (loss.total / loss.weight if loss.weight else loss.total * 0) if isinstance(loss, Mean) else loss
        mean.backward()
        self.loss = self.loss + mean.detach()
        self.weight = float(weigh(loss, sum(piece.examples for _, piece in self.pieces))[1])

    def update(self) -> None:
        for name, epoch in frozen_until(self.model).items():
            if self.pieces[0][1].epoch < epoch:
                self.model.get_parameter(name).grad = None
        if self.options.clip_value is not None:
            nn.utils.clip_grad_value_(self.model.parameters(), self.options.clip_value)
        if self.options.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip_norm)
        self.done += 1
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] *= min(1.0, self.done / max(1, self.options.warmup))
        self.optimizer.step()
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        if self.schedule and self.done % self.schedule_every == 0:
            self.schedule.step()
        if self.options.ema_decay is not None:
            for name, parameter in self.model.named_parameters():
                average = self.averages.setdefault(name, parameter.detach().clone())
                average.lerp_(parameter.detach(), 1 - self.options.ema_decay)
