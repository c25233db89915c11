"""What a training loop holds in its hands, under every strategy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import monotonic, perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from headrace.comm.collective import SharedCollective
from headrace.comm.control import ControlPage
from headrace.data import Loader
from headrace.engine.journal import Journal
from headrace.engine.order import Order
from headrace.errors import NonFiniteLoss, UsageError
from headrace.metrics import Mean, weigh
from headrace.replica.batch_norm import averaged_buffers
from headrace.replica.compute import Computed
from headrace.replica.exchange import Replica
from headrace.replica.selection import select_target
from headrace.replica.whole_model import WholeModel
from headrace.spec.event import Evaluated
from headrace.spec.share import Share

__all__ = ["Worker", "train"]

_READ_LOSSES_EVERY_S = 0.25


def train(worker: Worker) -> None:
    """The usual loop."""
    for batch in worker.batches():
        worker.step(batch)
        if worker.epoch_ended:
            worker.evaluate()


class Worker:
    """One process that computes.

    Args:
        order: the run.
        rank: index in the run.
        replica: the model and its three verbs.
        loader: of the training data.
        eval_loader: of the evaluation data, if there is any.
        host: the workers of this host.
        page: the run's signals.
        journal: of this process.

    Attributes:
        rank, world: index in the run, and how many workers there are.
        model: this worker's copy.
        device: where it lives.
        rounds: how many there are in the whole run.
        round: the one that is being done, from 0.
    """

    def __init__(
        self,
        order: Order,
        rank: int,
        replica: Replica,
        loader: Loader,
        eval_loader: Loader | None,
        host: SharedCollective,
        page: ControlPage,
        journal: Journal,
    ) -> None:
        self.rank = rank
        self.world = host.world
        self.model: nn.Module = replica.compute.module
        self.device = next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
        self.rounds = order.job.steps or (order.job.epochs or 0) * loader.rounds_per_epoch
        self.round = -1
        options = order.job.options
        self._reads_at_once = (
            self.device.type == "cpu" or options.on_nonfinite != "raise" or options.precision == "fp16"
        )
        self._order = order
        self._replica = replica
        self._loader = loader
        self._eval_loader = eval_loader
        self._host = host
        self._page = page
        self._journal = journal
        self._share = Share(None, 0, 0, 0)
        self._computed: Computed | None = None
        self._times = [0.0, 0.0, 0.0, 0.0]
        self._unread: list[tuple[tuple[Any, ...], Tensor, list[float]]] = []
        self._read = monotonic()
        self._examples = 0
        self._deadline = math.inf if order.seconds is None else monotonic() + order.seconds

    @property
    def epoch_ended(self) -> bool:
        """Whether the round just done was the last of its epoch or of the run."""
        return (self.round + 1) % self._loader.rounds_per_epoch == 0 or self._is_last()

    def batches(self) -> Iterator[Any]:
        """Yields this worker's share of every global batch of the run, on its device."""
        shares = self._loader.rounds()
        try:
            for round_ in range(self.rounds):
                self.round = round_
                self._ask_for_stop()
                began = perf_counter()
                self._share = next(shares)
                batch = self._replica.compute.place(self._share.batch)
                self._times[0] = perf_counter() - began
                yield batch
                if self._is_last():
                    return
        finally:
            shares.close()
            self._read_losses()
            self._journal.flush()

    def step(self, batch: Any) -> float | None:
        """Computes, synchronizes, updates; returns this worker's mean loss.

        None where this worker had no part of the last batch, and on devices whose losses are read later, many
        at a time, so as not to wait for each.
        """
        share = self._share
        began = perf_counter()
        self._replica.exchange.begin(self.round)
        self._computed = self._replica.compute.run(Share(batch, share.examples, share.of, share.epoch))
        self._times[1] = perf_counter() - began
        return self.update()

    def backward(self, loss: Tensor | Mean) -> None:
        """Differentiates a loss of one's own, the mean over this worker's share: the first half of `step`."""
        compute = self._replica.compute
        if not isinstance(compute, WholeModel):
            raise UsageError(f"{self._order.plan.strategy} computes whole steps; use worker.step(batch)")
        began = perf_counter()
        self._replica.exchange.begin(self.round)
        self._computed = compute.backward(loss, self._share)
        self._times[1] = perf_counter() - began

    def update(self) -> float | None:
        """Synchronizes and updates: the second half of `step`."""
        if self._computed is None:
            raise UsageError("worker.update() without a worker.backward(loss) before it")
        began = perf_counter()
        computed, self._computed = self._computed, None
        loss = computed.loss.item() if computed.loss is not None and self._reads_at_once else None
        verdict = self._replica.exchange.synchronize(loss is None or math.isfinite(loss))
        synchronized = perf_counter()
        if verdict.apply:
            self._replica.exchange.update(self.round)
        else:
            self._replica.exchange.skip(self.round)
        updated = perf_counter()
        self._times[2:] = synchronized - began, updated - synchronized
        if self._share.of < self.world and self._order.strategy.synchronous:
            self._catch_up()
        return self._record(computed, loss)

    def evaluate(self) -> dict[str, float]:
        """Computes the loss and the metrics over the whole evaluation set, each example once.

        Every worker calls it and gets the same numbers; {} where the job has no evaluation data.
        """
        if self._eval_loader is None:
            return {}
        began = monotonic()
        job = self._order.job
        task = job.task
        measures = {"loss": task.loss if task else job.loss, **(task.metrics if task else {}), **(job.metrics or {})}
        sums = [0.0] * (2 * len(measures) + 1)
        training = self.model.training
        with self._averaged_statistics():
            self.model.eval()
            for share in self._eval_loader.sweep():
                if share.examples:
                    self._measure(share, measures, sums)
        self.model.train(training)
        totals = self._host.sum(sums)
        metrics = {name: totals[2 * i] / totals[2 * i + 1] for i, name in enumerate(measures) if totals[2 * i + 1]}
        if self.rank == 0:
            done = self.round + 1
            epochs = done // self._loader.rounds_per_epoch
            took = monotonic() - began
            now = self._journal.now()
            self._journal.write(Evaluated(0, now, done, epochs, int(totals[-1]), metrics, took))
        return metrics

    def finish(self) -> None:
        """Averages what a checkpoint holds as a mean over workers."""
        self._average(averaged_buffers(self.model))

    def _catch_up(self) -> None:
        """Brings rank 0's buffers to workers that had no example, so that what forward moves does not fall behind."""
        own = {id(buffer) for buffer in averaged_buffers(self.model)}
        for buffer in self.model.buffers():
            if id(buffer) not in own:
                near = buffer.cpu()
                self._host.broadcast(near)
                buffer.copy_(near)

    def _measure(self, share: Share, measures: Mapping[str, Any], sums: list[float]) -> None:
        output = self._replica.compute.predict(share.batch)
        target = self._replica.compute.place(select_target(share.batch, self._order.job.target))
        for index, (name, measure) in enumerate(measures.items()):
            total, weight = weigh(measure(output, target), share.examples, name)
            sums[2 * index] += float(total)
            sums[2 * index + 1] += float(weight)
        sums[-1] += share.examples

    @contextmanager
    def _averaged_statistics(self) -> Iterator[None]:
        buffers = averaged_buffers(self.model) if self.world > 1 else []
        own = [buffer.clone() for buffer in buffers]
        self._average(buffers)
        yield
        for buffer, saved in zip(buffers, own, strict=True):
            buffer.copy_(saved)

    def _average(self, buffers: list[Tensor]) -> None:
        for buffer in buffers if self.world > 1 else ():
            near = buffer.cpu()
            self._host.all_reduce(near)
            buffer.copy_(near / self.world)

    def _is_last(self) -> bool:
        return self.round + 1 >= self.rounds or 0 < self._page.stop_after <= self.round + 1

    def _ask_for_stop(self) -> None:
        # Rank 0 decides before this round's first barrier, so that everybody knows after it.
        if self.rank == 0 and (self._page.stop or monotonic() > self._deadline) and not self._page.stop_after:
            self._page.stop_after = self.round + 1

    def _record(self, computed: Computed, loss: float | None) -> float | None:
        self._examples += self._share.examples
        beat = self._page.beats[self.rank]
        beat[1], beat[2] = self.round + 1, self._examples
        head = (self.round, self._share.epoch, self._share.examples)
        if computed.loss is not None and loss is None:
            self._unread.append(((*head, computed.weight), computed.loss, self._times[:]))
            if monotonic() - self._read > _READ_LOSSES_EVERY_S:
                self._read_losses()
            return None
        self._note(*head, loss, computed.weight, self._times)
        return loss

    def _read_losses(self) -> None:
        if self._unread:
            losses = torch.stack([loss for _, loss, _ in self._unread]).tolist()
            for ((step, epoch, examples, weight), _, times), loss in zip(self._unread, losses, strict=True):
                self._note(step, epoch, examples, loss, weight, times)
            self._unread.clear()
        self._read = monotonic()

    def _note(
        self, step: int, epoch: int, examples: int, loss: float | None, weight: float, times: list[float]
    ) -> None:
        if loss is not None:
            if not math.isfinite(loss):
                raise NonFiniteLoss(self.rank, step, loss)
            self._page.losses[self.rank][0] = loss
        self._journal.stepped(step, epoch, examples, loss, weight, *times)
