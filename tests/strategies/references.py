"""What each kind of strategy must compute: plain loops in one process, one worker's copy of the model after the other.

A reference takes a job and a number of workers. It uses headrace for the order of the examples alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import headrace as hr
from headrace.data import Loader, as_pipeline
from headrace.strategies.gossip import matching
from strategies.contract_runs import Outcome, by_hand

Reference = Callable[[hr.Job, int], Outcome]
Batch = tuple[Tensor, Tensor]


class Copies:
    """A model and an optimizer for each worker; every global batch is cut into a share for each of them.

    Attributes:
        losses: of each round so far, the mean over the global batch.
    """

    def __init__(self, job: hr.Job, workers: int) -> None:
        self.models: list[nn.Module] = [copy.deepcopy(job.model) for _ in range(workers)]  # type: ignore[misc]
        self.optimizers = [job.optimizer(list(model.named_parameters())) for model in self.models]
        self.losses: list[float] = []
        self._job = job

    def rounds(self) -> Iterator[tuple[int, list[Batch]]]:
        """Yields the number of rounds that are done after this one, and every worker's share of its batch."""
        job = self._job
        loader = Loader(as_pipeline(job.data)[0], job.seed, job.global_batch_size, (1,), 0)
        count = (job.epochs or 0) * loader.rounds_per_epoch
        for done, share in enumerate(loader.rounds(0, count), 1):
            inputs, target = (each.tensor_split(len(self.models)) for each in share.batch)
            self.losses.append(0.0)
            yield done, [(x, y) for x, y in zip(inputs, target, strict=True)]

    def differentiate(self, worker: int, share: Batch, of: int = 0) -> bool:
        """Leaves the gradient of a worker's mean loss in `.grad`; returns whether it had an example.

        `of` is the number of examples of the global batch, if its loss is weighed by its part of it.
        """
        inputs, target = share
        self.optimizers[worker].zero_grad()
        if not len(inputs):
            return False
        assert self._job.loss is not None
        loss = self._job.loss(self.models[worker](inputs), target)
        (loss * len(inputs) / of if of else loss).backward()
        self.losses[-1] += loss.item() * len(inputs)
        return True

    def step(self, worker: int, share: Batch) -> None:
        """Makes a step of a worker's own optimizer, if it has an example."""
        if self.differentiate(worker, share):
            self.optimizers[worker].step()

    def parameters(self) -> Iterator[tuple[nn.Parameter, ...]]:
        """Yields all workers' copies of each parameter."""
        return zip(*(list(model.parameters()) for model in self.models), strict=True)

    def outcome(self, model: nn.Module) -> Outcome:
        """Returns what a run with such a model reports."""
        sizes = [sum(len(x) for x, _ in shares) for _, shares in Copies(self._job, 1).rounds()]
        losses = [total / size for total, size in zip(self.losses, sizes, strict=True)]
        return Outcome(model.state_dict(), losses, evaluated(self._job, model))


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
        return {"loss": job.loss(model(inputs), target).item()}


def mean_of(models: Sequence[nn.Module], weights: Sequence[float] | None = None) -> nn.Module:
    """Returns a model with the mean of all parameters."""
    weights = weights or [1.0] * len(models)
    mean = copy.deepcopy(models[0])
    with torch.no_grad():
        for target, *each in zip(mean.parameters(), *(model.parameters() for model in models), strict=True):
            target.copy_(sum(w * x for w, x in zip(weights, each, strict=True)) / sum(weights))
    return mean


def one_device(job: hr.Job, workers: int) -> Outcome:
    """One model, one optimizer, the whole batch."""
    outcome = by_hand(job)
    model = copy.deepcopy(job.model)
    assert isinstance(model, nn.Module)
    model.load_state_dict(dict(outcome.tensors))
    return Outcome(outcome.tensors, outcome.losses, evaluated(job, model))


def unconnected(job: hr.Job, workers: int) -> Outcome:
    """Each worker trains a model on its share; the first one's is the result."""
    copies = Copies(job, workers)
    average = Average(job, copies.models[0])
    for _, shares in copies.rounds():
        for worker, share in enumerate(shares):
            copies.step(worker, share)
        average.update()
    return copies.outcome(average.model)


def local_sgd(job: hr.Job, workers: int, period: int = 3) -> Outcome:
    """Stich, 2019: all go on from the mean, weighted by the examples of each since the last time."""
    copies, since = Copies(job, workers), [0] * workers
    for done, shares in copies.rounds():
        for worker, share in enumerate(shares):
            copies.step(worker, share)
            since[worker] += len(share[0])
        if done % period == 0:
            mean = mean_of(copies.models, since)
            for model in copies.models:
                model.load_state_dict(mean.state_dict())
            since = [0] * workers
    return copies.outcome(mean_of(copies.models, since if any(since) else None))


def diloco(job: hr.Job, workers: int, period: int = 3, lr: float = 0.7, momentum: float = 0.9) -> Outcome:
    """Douillard et al., 2023: how far the mean has moved is a gradient for SGD with Nesterov momentum."""
    copies, since = Copies(job, workers), [0] * workers
    model = copy.deepcopy(copies.models[0])
    outer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, nesterov=True)
    for done, shares in copies.rounds():
        for worker, share in enumerate(shares):
            copies.step(worker, share)
            since[worker] += len(share[0])
        if done % period == 0:
            mean = mean_of(copies.models, since)
            for parameter, moved in zip(model.parameters(), mean.parameters(), strict=True):
                parameter.grad = parameter.detach() - moved.detach()
            outer.step()
            for each in copies.models:
                each.load_state_dict(model.state_dict())
            since = [0] * workers
    return copies.outcome(model)


def easgd(job: hr.Job, workers: int, period: int = 3, beta: float = 0.9) -> Outcome:
    """Zhang et al., 2015: workers are pulled towards a center, and the center towards them."""
    copies, alpha = Copies(job, workers), beta / workers
    center = copy.deepcopy(copies.models[0])
    for done, shares in copies.rounds():
        for worker, share in enumerate(shares):
            copies.step(worker, share)
        for pulled, own in zip(center.parameters(), copies.parameters(), strict=True):
            if done % period == 0:
                apart = [each.detach() - pulled.detach() for each in own]
                for each, distance in zip(own, apart, strict=True):
                    each.data -= alpha * distance
                pulled.data += alpha * sum(apart)
    return copies.outcome(center)


def ring(workers: int, seed: int, round_: int) -> list[set[int]]:
    """Returns each worker and its neighbours."""
    return [{(i - 1) % workers, i, (i + 1) % workers} for i in range(workers)]


def cube(workers: int, seed: int, round_: int) -> list[set[int]]:
    """Returns each worker and those whose number differs in one binary digit."""
    return [{j for j in range(workers) if (i ^ j).bit_count() <= 1} for i in range(workers)]


def pairs(workers: int, seed: int, round_: int) -> list[set[int]]:
    """Returns each worker and its partner in the round, whom all ranks draw alike."""
    partner = matching(workers, seed, round_)
    return [{i, partner.get(i, i)} for i in range(workers)]


def gossip(
    job: hr.Job, workers: int, near: Callable[[int, int, int], list[set[int]]] = ring, period: int = 1
) -> Outcome:
    """Lian et al., 2017, algorithm 1: a gradient at the own parameters, the mean of the neighbourhood, the step."""
    copies = Copies(job, workers)
    for done, shares in copies.rounds():
        active = [copies.differentiate(worker, share) for worker, share in enumerate(shares)]
        if done % period == 0:
            groups = near(workers, job.seed, done - 1)
            for own in copies.parameters():
                before = torch.stack([each.detach() for each in own])
                for each, group in zip(own, groups, strict=True):
                    each.data.copy_(before[sorted(group)].mean(0))
        for optimizer, has_example in zip(copies.optimizers, active, strict=True):
            if has_example:
                optimizer.step()
    return copies.outcome(mean_of(copies.models))


def majority_vote(job: hr.Job, workers: int, rate: float = 0.01) -> Outcome:
    """Bernstein et al., 2018: each worker votes with the sign of its gradient, and every element goes with the most."""
    copies = Copies(job, workers)
    for _, shares in copies.rounds():
        active = [copies.differentiate(worker, share) for worker, share in enumerate(shares)]
        for own in copies.parameters():
            signs = [each.grad.sign() for each, votes in zip(own, active, strict=True) if votes]  # type: ignore[union-attr]
            for each in own:
                each.data -= rate * torch.stack(signs).sum(0).sign()
    return copies.outcome(copies.models[0])


def downpour(job: hr.Job, workers: int, fetch_every: int = 2, push_every: int = 2, meet: int = 3) -> Outcome:
    """Dean et al., 2012, algorithm 7.1, of one worker that waits, and begins anew after `meet` rounds (an epoch)."""
    copies = Copies(job, 1)
    (worker,) = copies.models
    server = copy.deepcopy(worker)
    optimizer = job.optimizer(list(server.named_parameters()))
    average = Average(job, server)
    accrued: dict[str, Tensor] = {}
    behind = 0
    for done, (share,) in copies.rounds():
        if (done - 1) % meet % fetch_every == 0:
            worker.load_state_dict(server.state_dict())
        copies.differentiate(0, share)
        for name, parameter in worker.named_parameters():
            assert parameter.grad is not None
            accrued[name] = accrued.get(name, 0.0) + parameter.grad
            parameter.data -= copies.optimizers[0].param_groups[0]["lr"] * parameter.grad
        behind += 1
        if ((done - 1) % meet + 1) % push_every == 0 or done % meet == 0:
            for name, parameter in server.named_parameters():
                parameter.grad = accrued.pop(name)
            optimizer.step()
            average.update(behind)
            behind = 0
    return copies.outcome(average.model)


GOSSIPS: Mapping[str, Any] = {
    "ring": partial(gossip, near=ring),
    "hypercube": partial(gossip, near=cube),
    "random": partial(gossip, near=pairs, period=2),
}


def sandblaster(job: hr.Job, workers: int) -> Outcome:
    """One device's L-BFGS, that sums loss and gradient over 8 portions a worker in the order of a binary tree."""
    model, parts = copy.deepcopy(job.model), 8 * workers
    assert isinstance(model, nn.Module)
    loader = Loader(as_pipeline(job.data)[0], job.seed, job.global_batch_size, (1,), 0)
    optimizer, losses = job.optimizer(list(model.named_parameters())), []

    def evaluate(round_: int) -> Tensor:
        portions = [share for part in range(parts) if (share := loader.portion(round_, part, parts)).examples]
        own: list[tuple[Tensor, ...]] = []
        for share in portions:
            assert job.loss is not None
            loss = job.loss(model(share.batch[0]), share.batch[1]) * share.examples
            own.append((loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))))
        while len(own) > 1:
            pairs = [own[index : index + 2] for index in range(0, len(own), 2)]
            own = [tuple(map(torch.add, *pair)) if len(pair) == 2 else pair[0] for pair in pairs]
        count = sum(share.examples for share in portions)
        for parameter, gradient in zip(model.parameters(), own[0][1:], strict=True):
            parameter.grad = gradient / count
        return own[0][0] / count

    for round_ in range((job.epochs or 0) * loader.rounds_per_epoch):
        losses.append(optimizer.step(partial(evaluate, round_)).item())
    return Outcome(model.state_dict(), losses, evaluated(job, model))
