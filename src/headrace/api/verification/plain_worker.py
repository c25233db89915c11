"""The worker of a loop of the user's own, where that loop trains alone in one process, as plain PyTorch does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headrace.api.verification.plain_loop import PlainLoop
from headrace.metrics import Mean
from headrace.policies.roles import bounds
from headrace.spec.job import Job, Share
from headrace.training.whole_model import cut


class PlainWorker:
    """Has what `hr.Worker` has; `loops` has one for each set of parameters, `rounds` the shares of global batches."""

    rank, world = 0, 1

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        loops: Mapping[str, PlainLoop],
        rounds: Iterator[Sequence[Share]],
        epoch: int,
        round_ended: Callable[[PlainWorker], None],
        evaluate: Callable[[], dict[str, float]],
    ) -> None:
        self.model, self.device, self.rounds, self.evaluate = model, torch.device("cpu"), job.steps or 0, evaluate
        self.round, self.turn = -1, ""
        self._job, self._loops, self._rounds, self._epoch, self._ended = job, loops, rounds, epoch, round_ended

    @property
    def loop(self) -> PlainLoop:
        """The loop of the set that is trained in this round."""
        return self._loops[self.turn]

    @property
    def epoch_ended(self) -> bool:
        """Whether the round just done was the last of its epoch or of the run."""
        return (self.round + 1) % self._epoch == 0 or self.round + 1 >= self.rounds

    evaluation_due = epoch_ended

    def batches(self) -> Iterator[Any]:
        """Yields the global batches."""
        for self.round, self.shares in enumerate(self._rounds):  # noqa: B020
            self.turn = self._job.turns.at(self.round) if self._job.turns else ""
            self.loop.begin(pieces_of(self.shares, self.loop.options.accumulate))
            yield self.shares[0].batch

    def step(self, batch: Any) -> float:
        """Computes and updates; of several shares, with their own batches."""
        if batch is not self.shares[0].batch:
            share = replace(self.shares[0], batch=batch)
            self.loop.pieces = pieces_of([share], self.loop.options.accumulate)
        self.loop.differentiate()
        return self.update()

    def backward(self, loss: Tensor | Mean) -> None:
        """Differentiates a loss of the loop's own."""
        self.loop.backward(loss)

    def update(self) -> float:
        """Updates."""
        self.loop.update()
        self._ended(self)
        return float(self.loop.loss)


def pieces_of(shares: Sequence[Share], accumulate: int) -> list[tuple[int, Share]]:
    """Returns the micro-batches of the workers' shares of a global batch, each with its worker."""
    pieces = []
    for worker, share in enumerate(shares):
        ends = bounds(share.examples, (1,) * min(accumulate, share.examples))
        for start, stop in ends:
            batch = cut(share.batch, start, stop, share.examples) if len(ends) > 1 else share.batch
            pieces.append((worker, replace(share, batch=batch, examples=stop - start)))
    return pieces
