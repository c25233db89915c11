"""One worker's part of a run's state: taken for a checkpoint, and put back from one."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import datetime
from typing import Any

import torch
from torch import Tensor

from headrace.collectives.base import ProcessGroup
from headrace.training.batch_norm import averaged_buffers
from headrace.training.exchange import Replica
from headrace.training.update import AVERAGE
from headrace.worker.evaluation import EarlyStopper, average
from headrace.worker.loaded_checkpoint import (
    LoadedCheckpoint,
    making_sense,
    model_tensors,
    own_pieces,
    owned_pieces,
    random_states,
    restore_random_states,
)
from headrace.worker.run_spec import RunSpec


class WorkerState:
    """Args:
    order: the run.
    rank: of this worker.
    replica: of this worker.
    group: the workers.
    stopper: what evaluations have said so far.
    rounds_per_epoch: of the training data.
    """

    def __init__(
        self,
        order: RunSpec,
        rank: int,
        replica: Replica,
        group: ProcessGroup,
        stopper: EarlyStopper,
        rounds_per_epoch: int,
    ) -> None:
        self._order = order
        self._rank = rank
        self._replica = replica
        self._group = group
        self._stopper = stopper
        self._rounds_per_epoch = rounds_per_epoch
        self._model = replica.compute.module
        self._mates = replica.compute.mates or group
        self._device = torch.device(order.plan.role(rank).device)

    def take(self, done: int, weight: float) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Returns copies of this worker's part, and what is said of the whole; all workers do it together.

        Args:
            done: rounds.
            weight: of this worker's running statistics in their mean.
        """
        exchange, rank, meetings = self._replica.exchange, self._group.rank, self._replica.meetings
        tensors = {**owned_pieces(exchange.state(), self._order.plan, rank), **random_states(self._device)}
        if meetings:
            tensors |= own_pieces(meetings.own())
        with meetings.swapped_weights() if meetings else nullcontext():
            averaged = {id(buffer): buffer.detach().clone() for buffer in averaged_buffers(self._model)}
            average(list(averaged.values()), self._mates, weight)
            leads = self._order.plan.leads(rank)
            tensors |= model_tensors(self._replica.compute, leads, self._mates.world, averaged)
        description = {
            **self._order.description,
            "epoch": done // self._rounds_per_epoch,
            "round_of_epoch": done % self._rounds_per_epoch,
            "settings": exchange.settings(),
            "early_stopping": self._stopper.state(),
            "saved_at": datetime.now().astimezone().isoformat(timespec="seconds"),
        }
        return tensors, description

    def load(self, stored: LoadedCheckpoint) -> None:
        """Takes up what a checkpoint says of this worker."""
        resume = self._order.resume
        assert resume is not None
        with making_sense(stored.path):
            # Whoever comes in another's place is alone, and no part of the checkpoint is its own.
            at_home = resume.same and stored.ranks == self._group.world
            pieces = stored.pieces(self._rank if at_home else None)
            if resume.reset_optimizer:
                # The averages are weights, and go on with the weights.
                self._replica.exchange.load([piece for piece in pieces if piece.key == AVERAGE])
            else:
                self._replica.exchange.load(pieces, stored.description["settings"])
                self._stopper.load(stored.description["early_stopping"])
            if at_home:
                stored.load_buffers(self._model, self._rank, self._group.world)
                restore_random_states(stored.random(self._rank), self._device)

    def bring_back(self, stored: LoadedCheckpoint) -> None:
        """Makes everything what a checkpoint of this history says; the data goes on."""
        self._replica.exchange.load([*stored.pieces(), *stored.parameter_pieces()])
        stored.load_buffers(self._model, self._rank, self._group.world)
