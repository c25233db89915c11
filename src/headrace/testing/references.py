"""Plain loops in one process, one worker's copy of the model after the other: what a strategy must compute.

A reference takes a job and a number of workers, and returns `ReferenceResult`. It uses headrace for the order of the
examples alone. That of a strategy that equals one device is `one_device`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import headrace as hr
from headrace.api.verification.left import losses_of
from headrace.data import Loader, as_pipeline
from headrace.modules import frozen_until

Batch = tuple[Tensor, Tensor]
_FIRST: ContextVar[int] = ContextVar("first", default=0)


@dataclass(frozen=True)
class ReferenceResult:
    """What came out of a training.

    Attributes:
        tensors: the trained model's parameters and buffers.
        losses: of each round, the mean over the global batch.
        metrics: of the last evaluation.
    """

    tensors: Mapping[str, Tensor]
    losses: Sequence[float]
    metrics: Mapping[str, float]


Reference = Callable[[hr.Job, int], ReferenceResult]
"""A job and a number of workers to what they train."""


@contextmanager
def rounds_from(first: int) -> Iterator[None]:
    """Lets references begin with round `first`, as a run does that goes back to its beginning after the one before."""
    token = _FIRST.set(first)
    try:
        yield
    finally:
        _FIRST.reset(token)


def call(function: Any, *arguments: Any) -> Any:
    """Calls a job's loss or optimizer, of which there is one here."""
    return function(*arguments)


def outcome_of(run: hr.Run) -> ReferenceResult:
    """Returns what came out of a run."""
    return ReferenceResult(run.model.state_dict(), losses_of(run), run.metrics)


def by_hand(job: hr.Job) -> ReferenceResult:
    """Trains with a loop of plain PyTorch, over the same global batches."""
    module = copy.deepcopy(job.model)
    assert isinstance(module, torch.nn.Module)
    assert job.loss is not None
    named = list(module.named_parameters())
    options = job.options
    optimizer = call(job.optimizer, named)
    scheduler = options.schedule(optimizer) if options.schedule else None
    averaged = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(options.ema_decay or 0))
    loader = Loader(as_pipeline(job.data)[0], job.seed, job.global_batch_size, (1,), 0)
    every = loader.rounds_per_epoch if options.schedule_every == "epoch" else 1
    losses = []
    count = (job.epochs or 0) * loader.rounds_per_epoch
    for round_, share in enumerate(loader.rounds(_FIRST.get(), count), _FIRST.get()):
        optimizer.zero_grad()
        losses.append(float(differentiated(job, module, *share.batch)))
        for name, epoch in frozen_until(module).items():
            if share.epoch < epoch:
                module.get_parameter(name).grad = None
        if options.clip_value is not None:
            torch.nn.utils.clip_grad_value_(module.parameters(), options.clip_value)
        if options.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), options.clip_norm)
        rates = [group["lr"] for group in optimizer.param_groups]
        if round_ < options.warmup:
            for group in optimizer.param_groups:
                group["lr"] *= (round_ + 1) / options.warmup
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        averaged.update_parameters(module)
        if scheduler and (round_ + 1) % every == 0:
            scheduler.step()
    return ReferenceResult((averaged.module if options.ema_decay else module).state_dict(), losses, {})


def differentiated(job: hr.Job, module: torch.nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
    """Leaves the gradients of one global batch in `.grad`, micro-batch by micro-batch; returns its mean loss."""
    assert job.loss is not None
    pieces = min(job.options.accumulate, len(inputs))
    totals: list[Tensor] = []
    weights: list[float] = []
    for x, y in zip(inputs.tensor_split(pieces), target.tensor_split(pieces), strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=job.options.precision == "bf16"):
            loss = call(job.loss, module(x), y)
        if not isinstance(loss, hr.Mean):
            if pieces == 1:
                loss.backward()
                found: Tensor = loss.detach()
                return found
            (loss * len(x) / len(inputs)).backward()
            totals.append(loss.detach() * len(x))
            weights.append(len(x))
            continue
        # What weighs nothing says nothing.
        part = loss.total / loss.weight if loss.weight else loss.total * 0
        (loss.total if pieces > 1 else part).backward()
        totals.append(loss.total.detach())
        weights.append(float(loss.weight))
    weight = sum(weights)
    if pieces == 1:
        return totals[0] / weight if weight else totals[0] * 0
    if isinstance(loss, hr.Mean):
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(weight).nan_to_num_()
    return torch.stack(totals).sum() / weight if weight else totals[0] * 0


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Returns the largest |a - b| / max(1, |b|) over all elements: absolute below 1, relative above."""
    assert one.keys() == other.keys()
    assert all(one[name].dtype == other[name].dtype and one[name].shape == other[name].shape for name in one)
    apart = [
        ((one[name].double() - b.double()).abs() / b.double().abs().clamp(min=1)).max()
        for name, b in other.items()
        if b.numel()
    ]
    # A NaN is no distance; torch's max keeps it and Python's might not.
    return float(torch.stack(apart).max())


class WorkerCopies:
    """A model and an optimizer for each worker; every global batch is cut into a share for each of them.

    Attributes:
        losses: of each round so far, the mean over the global batch.
        weights: of each worker's share of the last round: its examples, or what its `Mean` weighs.
        last: how many rounds are done when all are.
    """

    def __init__(self, job: hr.Job, workers: int) -> None:
        self.models: list[nn.Module] = [copy.deepcopy(job.model) for _ in range(workers)]  # type: ignore[misc]
        self.optimizers = [call(job.optimizer, list(model.named_parameters())) for model in self.models]
        self.losses: list[float] = []
        self.weights = [0.0] * workers
        self.last = 0
        self._totals: list[float] = []
        self._job = job

    def rounds(self) -> Iterator[tuple[int, list[Batch]]]:
        """Yields the number of rounds that are done after this one, and every worker's share of its batch."""
        job = self._job
        loader = Loader(as_pipeline(job.data)[0], job.seed, job.global_batch_size, (1,), 0)
        self.last = (job.epochs or 0) * loader.rounds_per_epoch
        for done, share in enumerate(loader.rounds(_FIRST.get(), self.last), _FIRST.get() + 1):
            inputs, target = (each.tensor_split(len(self.models)) for each in share.batch)
            self.losses.append(0.0)
            self._totals.append(0.0)
            yield done, [(x, y) for x, y in zip(inputs, target, strict=True)]

    def differentiate(self, worker: int, share: Batch, of: int = 0) -> bool:
        """Leaves the gradient of a worker's mean loss in `.grad`; returns whether it had one that weighs something.

        `of` is the number of examples of the global batch, if its loss is weighed by its part of it.
        """
        inputs, target = share
        self.optimizers[worker].zero_grad()
        self.weights[worker] = 0.0
        if not len(inputs):
            return False
        assert self._job.loss is not None
        loss = call(self._job.loss, self.models[worker](inputs), target)
        mean = loss if isinstance(loss, hr.Mean) else hr.Mean(loss * len(inputs), torch.tensor(len(inputs)))
        total, weight = mean.total, float(mean.weight)
        # What weighs nothing has a gradient of zeros.
        (total / (of or weight or 1)).backward()
        self.weights[worker] = weight
        self.losses[-1] += total.item()
        self._totals[-1] += weight
        return bool(weight)

    def step(self, worker: int, share: Batch) -> None:
        """Makes a step of a worker's own optimizer, if it has an example."""
        if self.differentiate(worker, share):
            self.optimizers[worker].step()

    def parameters(self) -> Iterator[tuple[nn.Parameter, ...]]:
        """Yields all workers' copies of each parameter."""
        return zip(*(list(model.parameters()) for model in self.models), strict=True)

    def statistics(self) -> Iterator[tuple[Tensor, ...]]:
        """Yields all workers' copies of each buffer that has a mean."""
        return zip(*(list(floating_buffers(model)) for model in self.models), strict=True)

    def outcome(self, model: nn.Module) -> ReferenceResult:
        """Returns what a run with such a model reports."""
        losses = [loss / total if total else 0.0 for loss, total in zip(self.losses, self._totals, strict=True)]
        return ReferenceResult(model.state_dict(), losses, evaluated(self._job, model))


class Average:
    """The moving average of a model's parameters if the job asks for it, else the model."""

    def __init__(self, job: hr.Job, model: nn.Module) -> None:
        self._decay = job.options.ema_decay
        self._of = model
        self._begun = False
        self.model = copy.deepcopy(model) if self._decay is not None else model

    @torch.no_grad()
    def update(self, steps: int = 1) -> None:
        """Moves it after so many steps; it begins as the parameters after the first."""
        for kept, now in zip(self.model.parameters(), self._of.parameters(), strict=True):
            if self._decay is not None:
                kept.lerp_(now, 1 - self._decay**steps if self._begun else 1.0)
        self._begun = True


def evaluated(job: hr.Job, model: nn.Module) -> dict[str, float]:
    """Returns the metrics of a model on the job's evaluation data."""
    assert job.loss is not None
    inputs, target = job.eval_data
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        loss = call(job.loss, model(inputs), target)
    return {"loss": float(loss.total / loss.weight if isinstance(loss, hr.Mean) else loss)}


def floating_buffers(model: nn.Module) -> Iterator[Tensor]:
    """Yields the buffers that have a mean, such as running statistics."""
    return (buffer for buffer in model.buffers() if buffer.is_floating_point())


def mean_of(models: Sequence[nn.Module], weights: Sequence[float] | None = None) -> nn.Module:
    """Returns a model with the mean of all parameters, and of buffers that have one."""
    weights = weights or [1.0] * len(models)
    mean = copy.deepcopy(models[0])
    tensors = ([*model.parameters(), *floating_buffers(model)] for model in models)
    with torch.no_grad():
        for target, *each in zip([*mean.parameters(), *floating_buffers(mean)], *tensors, strict=True):
            target.copy_(sum(w * x for w, x in zip(weights, each, strict=True)) / sum(weights))
    return mean


def one_device(job: hr.Job, workers: int) -> ReferenceResult:
    """One model, one optimizer, the whole batch."""
    outcome = by_hand(job)
    model = copy.deepcopy(job.model)
    assert isinstance(model, nn.Module)
    model.load_state_dict(dict(outcome.tensors))
    return ReferenceResult(outcome.tensors, outcome.losses, evaluated(job, model))


def unconnected(job: hr.Job, workers: int) -> ReferenceResult:
    """Each worker trains a model on its share; the first one's is the result."""
    copies = WorkerCopies(job, workers)
    average = Average(job, copies.models[0])
    for _, shares in copies.rounds():
        for worker, share in enumerate(shares):
            copies.differentiate(worker, share)
            # What weighs nothing has a gradient of zeros, and this worker's momentum goes on.
            if len(share[0]):
                copies.optimizers[worker].step()
        average.update()
    return copies.outcome(average.model)
