"""What each of headrace's own strategies must compute, as plain loops; see `headrace.testing.references`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import headrace as hr
from headrace.data import Loader, as_pipeline
from headrace.strategies.gossip import matching
from headrace.testing.references import (
    Average,
    Reference,
    evaluated,
    mean_of,
    one_device,
    unconnected,
)
from headrace.testing.references import ReferenceResult as Outcome
from headrace.testing.references import WorkerCopies as Copies

__all__ = ["GOSSIPS", "Reference", "one_device", "unconnected"]


def local_sgd(
    job: hr.Job, workers: int, period: int = 3, proximal: float = 0.0, reset: bool = False, adam: bool = False
) -> Outcome:
    """Stich, 2019: all go on from the mean, weighted by the examples of each since the last time.

    With `proximal`, FedProx (Li et al., 2020): the loss of each has half of the squared distance from that mean. With
    `reset` each optimizer begins anew there, with `adam` its moments are averaged, too.
    """
    copies, since = Copies(job, workers), [0.0] * workers
    begun = copy.deepcopy(copies.models[0])
    for done, shares in copies.rounds():
        for worker, share in enumerate(shares):
            model = copies.models[worker]
            if copies.differentiate(worker, share):
                for x, x0 in zip(model.parameters(), begun.parameters(), strict=True):
                    if proximal and x.requires_grad:
                        (proximal / 2 * (x - x0.detach()).square().sum()).backward()
                copies.optimizers[worker].step()
            since[worker] += copies.weights[worker]
        if done % period == 0:
            begun = mean_of(copies.models, since)
            for model in copies.models:
                model.load_state_dict(begun.state_dict())
            if reset:
                copies.optimizers = [job.optimizer(list(model.named_parameters())) for model in copies.models]
            if adam:
                average_moments(copies, since)
            since = [0.0] * workers
    return copies.outcome(mean_of(copies.models, since if any(since) else None))


def average_moments(copies: Copies, weights: list[float]) -> None:
    """Gives all workers' Adam the mean of their moments; one that has made no step yet has zeros."""
    for every in copies.parameters():
        states = [optimizer.state[each] for optimizer, each in zip(copies.optimizers, every, strict=True)]
        full = next((state for state in states if state), None)
        if full is None:
            continue
        for state in states:
            if not state:
                state.update({key: torch.zeros_like(value) for key, value in full.items()})
        for key in full:
            mean = sum(weight * state[key] for weight, state in zip(weights, states, strict=True)) / sum(weights)
            for state in states:
                state[key] = mean.clone()


def slow_mo(job: hr.Job, workers: int, period: int = 3, lr: float = 0.9, momentum: float = 0.6) -> Outcome:
    """Wang et al., 2020, algorithm 1, with the learning rate that the job's schedule gives to the last round."""
    copies, since = Copies(job, workers), [0.0] * workers
    model = copy.deepcopy(copies.models[0])
    velocity = [torch.zeros_like(each) for each in model.parameters()]
    schedules = [job.options.schedule(each) for each in copies.optimizers] if job.options.schedule else []
    for done, shares in copies.rounds():
        rate = copies.optimizers[0].param_groups[0]["lr"]
        for worker, share in enumerate(shares):
            copies.step(worker, share)
            since[worker] += copies.weights[worker]
        for schedule in schedules:
            schedule.step()
        if done % period == 0 or done == copies.last:
            mean = mean_of(copies.models, since)
            for x, u, moved in zip(model.parameters(), velocity, mean.parameters(), strict=True):
                u.copy_(momentum * u + (x - moved).detach() / rate)
                x.data -= lr * rate * u
            take_buffers(model, mean)
            for each in copies.models:
                each.load_state_dict(model.state_dict())
            since = [0.0] * workers
    return copies.outcome(model)


def diloco(job: hr.Job, workers: int, period: int = 3, lr: float = 0.7, momentum: float = 0.9) -> Outcome:
    """Douillard et al., 2023: how far the mean has moved is a gradient for SGD with Nesterov momentum."""
    copies, since = Copies(job, workers), [0.0] * workers
    model = copy.deepcopy(copies.models[0])
    outer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, nesterov=True)
    for done, shares in copies.rounds():
        for worker, share in enumerate(shares):
            copies.step(worker, share)
            since[worker] += copies.weights[worker]
        if done % period == 0 or done == copies.last:
            mean = mean_of(copies.models, since)
            for parameter, moved in zip(model.parameters(), mean.parameters(), strict=True):
                parameter.grad = parameter.detach() - moved.detach()
            outer.step()
            take_buffers(model, mean)
            for each in copies.models:
                each.load_state_dict(model.state_dict())
            since = [0.0] * workers
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


def take_buffers(model: nn.Module, other: nn.Module) -> None:
    """Gives a model another one's running statistics."""
    for buffer, own in zip(model.buffers(), other.buffers(), strict=True):
        buffer.copy_(own)


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
    job: hr.Job,
    workers: int,
    near: Callable[[int, int, int], list[set[int]]] = ring,
    period: int = 1,
    after: bool = False,
) -> Outcome:
    """Lian et al., 2017, algorithm 1: a gradient at the own parameters, the mean of the neighbourhood, the step.

    Or the mean `after` the step: Chen and Sayed, 2012.
    """
    copies = Copies(job, workers)

    def mix(done: int) -> None:
        if done % period == 0:
            groups = near(workers, job.seed, done - 1)
            for own in (*copies.parameters(), *copies.statistics()):
                before = torch.stack([each.detach() for each in own])
                for each, group in zip(own, groups, strict=True):
                    each.data.copy_(before[sorted(group)].mean(0))

    for done, shares in copies.rounds():
        active = [copies.differentiate(worker, share) for worker, share in enumerate(shares)]
        if not after:
            mix(done)
        for optimizer, has_example in zip(copies.optimizers, active, strict=True):
            if has_example:
                optimizer.step()
        if after:
            mix(done)
    return copies.outcome(mean_of(copies.models))


def majority_vote(job: hr.Job, workers: int, rate: float = 0.01) -> Outcome:
    """Bernstein et al., 2018: each worker votes with the sign of its gradient, and every element goes with the most."""
    copies = Copies(job, workers)
    for _, shares in copies.rounds():
        for worker, share in enumerate(shares):
            copies.differentiate(worker, share)
        for own in copies.parameters():
            signs = [each.grad.sign() for each in own if each.grad is not None]
            for each in own if signs else ():
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


Rule = Callable[[list[Tensor], list[dict[str, Tensor]], list[int]], Tensor]
"""All workers' gradients of one parameter, what each keeps of it, and who has examples, to the one gradient."""


def aggregated(job: hr.Job, workers: int, rule: Rule, rank: int = 0) -> Outcome:
    """One model, whose gradient is what a rule makes of those of all shares; `rank` is that of PowerSGD's factors."""
    copies, generator = Copies(job, workers), torch.Generator().manual_seed(job.seed)
    model = copies.models[0]
    average = Average(job, model)
    kept: list[list[dict[str, Tensor]]] = []
    for each in model.parameters():
        kept.append([{} for _ in copies.models])
        if rank and each.dim() > 1 and rank * (len(each) + each[0].numel()) < each.numel():
            factor = torch.randn(each[0].numel(), rank, generator=generator, dtype=torch.float64)
            kept[-1] = [{"factor": factor} for _ in copies.models]
    for _, shares in copies.rounds():
        for worker, share in enumerate(shares):
            copies.differentiate(worker, share, 1)
        total = sum(copies.weights) or 1.0
        busy = [worker for worker, (inputs, _) in enumerate(shares) if len(inputs)]
        for every, state in zip(copies.parameters(), kept, strict=True):
            if any(each.grad is not None for each in every):
                gradients = [torch.zeros_like(each) if each.grad is None else each.grad / total for each in every]
                every[0].grad = rule(gradients, state, busy).reshape(every[0].shape)
        copies.optimizers[0].step()
        average.update()
        for every in copies.parameters():
            for each in every[1:]:
                each.data.copy_(every[0].data)
    return copies.outcome(average.model)


def top_k(gradients: list[Tensor], kept: list[dict[str, Tensor]], busy: list[int], share: float = 0.2) -> Tensor:
    """Stich et al., 2018: the largest of gradient and memory; the memory is what was not sent."""
    total = torch.zeros_like(gradients[0])
    for gradient, state in zip(gradients, kept, strict=True):
        wanted = gradient + state.get("memory", 0.0)
        order = wanted.abs().flatten().argsort(descending=True)
        mask = torch.zeros(wanted.numel(), dtype=torch.bool)
        mask[order[: max(1, round(share * wanted.numel()))]] = True
        sent = torch.where(mask.view(wanted.shape), wanted, 0.0)
        state["memory"] = wanted - sent
        total += sent
    return total


def signum(gradients: list[Tensor], kept: list[dict[str, Tensor]], busy: list[int], momentum: float = 0.5) -> Tensor:
    """Bernstein et al., 2018, algorithm 3: the sign of the sum of the signs of moving averages."""
    votes = torch.zeros_like(gradients[0])
    for worker in busy:
        before = kept[worker].get("average", 0.0)
        kept[worker]["average"] = momentum * before + (1 - momentum) * gradients[worker]
        votes += torch.where(kept[worker]["average"] >= 0, 1.0, -1.0)
    return votes.sign()


def median(gradients: list[Tensor], kept: list[dict[str, Tensor]], busy: list[int]) -> Tensor:
    """Yin et al., 2018, definition 1, times the number of workers."""
    return torch.stack([gradients[worker] for worker in busy]).quantile(0.5, dim=0) * len(busy)


def power_sgd(gradients: list[Tensor], kept: list[dict[str, Tensor]], busy: list[int]) -> Tensor:
    """Vogels et al., 2019, algorithms 1 and 2, by the Gram-Schmidt process."""
    if "factor" not in kept[0]:
        return torch.stack(gradients).sum(0)
    wanted = [(g + state.get("error", 0.0)).flatten(1) for g, state in zip(gradients, kept, strict=True)]
    columns: list[Tensor] = []
    for column in (torch.stack(wanted).sum(0) @ kept[0]["factor"]).T:
        for before in columns:
            column = column - before * (before @ column)
        columns.append(column / column.norm())
    base = torch.stack(columns, 1)
    factor = torch.stack([each.T @ base for each in wanted]).sum(0)
    for each, state in zip(wanted, kept, strict=True):
        state["factor"] = factor
        state["error"] = (each - base @ (base.T @ each)).view(gradients[0].shape)
    return base @ factor.T


def one_model(job: hr.Job, workers: int) -> Outcome:
    """The sum of all shares' gradients, which is that of the whole batch."""
    return one_device(job, workers)
