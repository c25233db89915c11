"""What strategies compute that differ from one device by definition: plain loops in one process, a model a worker."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from headrace.aggregation.gradients import WorkerGroup
from headrace.aggregation.robust import WorkerMean
from headrace.aggregation.table import aggregation_of, worker_mean
from headrace.api.verification.plain_loop import PlainLoop
from headrace.api.verification.plain_worker import pieces_of
from headrace.api.verification.recording import (
    Trained,
    Workers,
    adopt_averages,
    examine,
    own_objective,
    tensors_in,
    tensors_of,
)
from headrace.averaging.outer_steps import Elastic, MeanStep, Momentum, Nesterov, OuterStep, outer_step
from headrace.checkpoint.forms import extra_states, load_extra_states
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.data.given import as_pipeline
from headrace.data.loading.loader import Loader
from headrace.modules import copy_module, frozen_until
from headrace.spec.job import Job
from headrace.strategies import Aggregated, Gossip, ParameterAveraging, Strategy
from headrace.strategies.gossip import neighbours
from headrace.strategies.strategy import describe_options
from headrace.training.shared_buffers.batch_norm import averaged_buffers

Reference = Callable[[Job, Callable[[], nn.Module], Sequence[int]], Trained]
"""Takes a job, what builds its model, and the shares of the workers."""


_SGD = (MeanStep, Momentum, Nesterov)
"""Outer steps that are torch's SGD with other options."""


class Copies:
    """A plain loop for each worker, over its share of every global batch, all from the same weights.

    Attributes:
        models, loops: of each worker.
        weights: of each worker's part of the current round's loss: its examples, or what an `hr.Mean` says.
        rate: the learning rate of the current round's updates.
    """

    def __init__(self, job: Job, build: Callable[[], nn.Module], shares: Sequence[int]) -> None:
        self._job, self.recording = job, Trained()
        pipeline = as_pipeline(job.data)[0]
        self.models = [build() for _ in shares]
        lent = [Workers(model, job.seed, [rank], apart=True) for rank, model in enumerate(self.models)]
        loaders = [Loader(pipeline, job.seed, job.global_batch_size, shares, rank) for rank in range(len(shares))]
        epoch = loaders[0].rounds_per_epoch
        self.loops = [
            PlainLoop(job, model, own_objective(job, model), epoch, workers.lend)
            for model, workers in zip(self.models, lent, strict=True)
        ]
        self._shares = zip(*(loader.rounds(0, job.steps) for loader in loaders), strict=True)
        self.mean = copy_module(self.models[0])
        self.recording.rounds[0] = tensors_of(self.mean)
        self.weights, self.rate = [0.0] * len(shares), 0.0

    def rounds(self, mixed: Callable[[int], None] = lambda done: None) -> Iterator[int]:
        """Does every worker's step of each round; yields how many rounds are done.

        `mixed` is called when all gradients of a round are there, before the updates.
        """
        for done, shares in enumerate(self._shares, 1):
            active = [loop for loop, share in zip(self.loops, shares, strict=True) if share.examples]
            for loop, share in zip(self.loops, shares, strict=True):
                loop.begin(pieces_of([share], self._job.options.accumulate))
            for loop in active:
                loop.differentiate()
            self.rate = self.loops[0].optimizer.param_groups[0]["lr"] * min(
                1.0, done / max(1, self._job.options.warmup)
            )
            mixed(done)
            for loop in active:
                loop.update()
            self.weights = [loop.weight for loop in self.loops]
            total = sum(float(loop.loss) * loop.weight for loop in self.loops)
            self.recording.losses.append(total / (sum(self.weights) or 1.0))
            yield done

    def average(self, weights: Sequence[float], rule: WorkerMean | None = None) -> None:
        """Puts the weighted mean of the workers' parameters, or another, into `mean`, and that of their statistics."""
        with torch.no_grad():
            for target, *every in zip(*map(nn.Module.parameters, [self.mean, *self.models]), strict=True):
                weighted = sum(w * each for w, each in zip(weights, every, strict=True)) / sum(weights)
                target.copy_(rule.mean(every, [w / sum(weights) for w in weights]) if rule else weighted)
        self.average_buffers(self.mean)

    @torch.no_grad()
    def take(self, model: nn.Module) -> None:
        """Puts a worker's parameters into `mean`, with the mean of all workers' running statistics."""
        for target, source in zip(self.mean.parameters(), model.parameters(), strict=True):
            target.copy_(source)
        self.average_buffers(self.mean)

    @torch.no_grad()
    def average_buffers(self, model: nn.Module, weights: Sequence[float] = ()) -> None:
        """Gives a model the mean of the workers' running statistics, and the first worker's other buffers and state."""
        load_extra_states(model, extra_states(self.models[0]))
        parts = torch.tensor(weights or [1.0] * len(self.models), dtype=torch.float64)
        for target, buffer in zip(model.buffers(), self.models[0].buffers(), strict=True):
            target.copy_(buffer)
        for target, *every in zip(*map(averaged_buffers, [model, *self.models]), strict=True):
            target.copy_(torch.tensordot(parts / parts.sum(), torch.stack(every).double(), 1))

    def note(self, done: int, model: nn.Module) -> None:
        """Notes the trained model as it is after so many rounds."""
        self.recording.rounds[done] = tensors_of(model)

    def result(self, model: nn.Module) -> Trained:
        """Returns the recording of a training whose result is such a model."""
        self.recording.model = tensors_in(model)
        examine(self._job, model, self.recording)
        return self.recording


def averaging(strategy: ParameterAveraging, job: Job, build: Callable[[], nn.Module], shares: Sequence[int]) -> Trained:
    """Local SGD (Stich, 2019): all go on from the mean, weighted by the examples of each since the last time.

    DiLoCo (Douillard et al., 2023): how far the mean has moved is a gradient for SGD with Nesterov momentum. EASGD
    (Zhang et al., 2015): workers are pulled towards a center, and the center towards them. FedProx (Li et al., 2020):
    the squared distance from the center is a part of each worker's loss.
    """
    copies, since, synced = Copies(job, build, shares), [0.0] * len(shares), 0
    outer = outer_step(strategy.outer)
    center = copy_module(copies.models[0])
    alpha = outer.beta / len(shares) if isinstance(outer, Elastic) else 0.0
    move = _by_optimizer(outer, center) if isinstance(outer, _SGD) else _by_itself(outer, center)

    def hold(done: int) -> None:
        for loop in copies.loops if strategy.proximal else ():
            if loop.weight:
                for own, begun in zip(loop.model.parameters(), center.parameters(), strict=True):
                    if own.requires_grad:
                        way = strategy.proximal * (own - begun).detach()
                        own.grad = way if own.grad is None else own.grad + way

    for done in copies.rounds(hold):
        since = [before + now for before, now in zip(since, copies.weights, strict=True)]
        due = done >= synced + (1 if synced < strategy.post_local else strategy.period)  # type: ignore[operator]
        if not due and done != job.steps:
            continue
        synced = done
        weights = since if any(since) and outer.weighted else [1.0] * len(shares)
        copies.average_buffers(center, weights)
        for model in copies.models:
            for one, other in zip(averaged_buffers(center), averaged_buffers(model), strict=True):
                other.copy_(one)
        if isinstance(outer, Elastic):
            # The center is the model: nothing is pulled for the sake of the end.
            _pull(center, copies.models, alpha if due else 0.0)
        else:
            copies.average(weights, worker_mean(strategy.mean))
            move(copies)
        for loop in copies.loops if strategy.reset_optimizer_state else ():
            loop.optimizer.state.clear()
        since = [0.0] * len(shares)
        copies.note(done, center)
    return copies.result(center)


def _by_optimizer(outer: OuterStep, center: nn.Module) -> Callable[[Copies], None]:
    """Returns what has torch's SGD move the center by the way of the mean, and gives it to all."""
    step = torch.optim.SGD(center.parameters(), **(outer.sgd() or {}))

    def move(copies: Copies) -> None:
        for pulled, mean in zip(center.parameters(), copies.mean.parameters(), strict=True):
            pulled.grad = pulled.detach() - mean.detach()
        step.step()
        with torch.no_grad():
            for every in zip(*map(nn.Module.parameters, [center, *copies.models]), strict=True):
                for each in every[1:]:
                    each.copy_(every[0])

    return move


def _by_itself(outer: OuterStep, center: nn.Module) -> Callable[[Copies], None]:
    """Returns what has an outer step that is no optimizer's move each parameter by itself, all copies in one place."""
    kept = [
        [each.detach().clone(), *map(torch.zeros_like, [each.detach()] * (outer.copies_kept - 1))][: outer.copies_kept]
        for each in center.parameters()
    ]

    @torch.no_grad()
    def move(copies: Copies) -> None:
        every = zip(*map(nn.Module.parameters, [center, copies.mean, *copies.models]), strict=True)
        now = outer.at_rate(copies.rate)
        for state, (pulled, mean, *own) in zip(kept, every, strict=True):
            pulled.copy_(now.model(state, mean))
            now.step(state, mean, own, len(own))

    return move


def _pull(center: nn.Module, models: Sequence[nn.Module], alpha: float) -> None:
    with torch.no_grad():
        for pulled, *every in zip(*map(nn.Module.parameters, [center, *models]), strict=True):
            apart = [each - pulled for each in every]
            for each, distance in zip(every, apart, strict=True):
                each -= alpha * distance
            pulled += alpha * torch.stack(apart).sum(0)


def gossip(strategy: Gossip, job: Job, build: Callable[[], nn.Module], shares: Sequence[int]) -> Trained:
    """Lian et al., 2017, algorithm 1: a gradient at the own parameters, the mean of the neighbourhood, the step.

    Or the mean after the step (Chen and Sayed, 2012).
    """
    world = len(shares)
    copies = Copies(job, build, shares)

    def mix(done: int) -> None:
        if done % strategy.period:
            return
        groups = [[rank, *neighbours(strategy.topology, rank, world, job.seed, done - 1)] for rank in range(world)]
        for every in zip(*([*each.parameters(), *averaged_buffers(each)] for each in copies.models), strict=True):
            before = torch.stack([each.detach() for each in every])
            for each, group in zip(every, groups, strict=True):
                each.data.copy_(before[sorted(set(group))].mean(0))

    after = strategy.mix == "after"
    for done in copies.rounds() if after else copies.rounds(mix):
        if after:
            mix(done)
        copies.average([1.0] * world)
        copies.note(done, copies.mean)
    return copies.result(copies.mean)


def aggregated(strategy: Aggregated, job: Job, build: Callable[[], nn.Module], shares: Sequence[int]) -> Trained:
    """One model: the rule makes one gradient of those of all shares, in as many threads as there are workers."""
    copies = Copies(job, build, shares)
    rule, threads = aggregation_of(strategy.by), ThreadGroup(len(shares))
    groups = [ThreadCollective(threads, rank) for rank in range(len(shares))]
    workers = [WorkerGroup(group, group, torch.device("cpu")) for group in groups]
    states: list[dict[str, dict[str, Tensor]]] = []
    for model in copies.models:
        generator = torch.Generator().manual_seed(job.seed)
        named = {name: each for name, each in model.named_parameters() if each.requires_grad}
        states.append({name: dict(rule.begin(torch.zeros_like(each), generator)) for name, each in named.items()})

    def aggregate(rank: int, present: Sequence[str], parts: Sequence[float]) -> Sequence[Tensor]:
        workers[rank].idle, parameters = not copies.loops[rank].weight, dict(copies.models[rank].named_parameters())
        found = [parameters[name].grad for name in present]
        gradients = [
            torch.zeros_like(parameters[name]) if each is None else each * parts[rank]
            for name, each in zip(present, found, strict=True)
        ]
        with torch.no_grad():
            return rule.aggregate(gradients, [states[rank][name] for name in present], workers[rank])

    def combine(done: int) -> None:
        total = sum(loop.weight for loop in copies.loops) or 1.0
        parts = [loop.weight / total for loop in copies.loops]
        until, epoch = frozen_until(copies.models[0]), copies.loops[0].pieces[0][1].epoch
        trained = [name for name in states[0] if until.get(name, 0) <= epoch]
        present = [name for name in trained if any(each.get_parameter(name).grad is not None for each in copies.models)]
        with ThreadPoolExecutor(len(shares)) as pool:
            made = list(pool.map(lambda rank: aggregate(rank, present, parts), range(len(shares))))
        for loop, gradients in zip(copies.loops, made, strict=True):
            for name, gradient in zip(present, gradients, strict=True):
                loop.model.get_parameter(name).grad = gradient
            if not loop.weight:
                # One without examples makes the same step as the others, which make theirs later.
                loop.update()

    for done in copies.rounds(combine):
        copies.take(copies.models[0])
        copies.note(done, copies.mean)
    adopt_averages(copies.loops[:1])
    copies.take(copies.models[0])
    return copies.result(copies.mean)


def unconnected(strategy: Strategy, job: Job, build: Callable[[], nn.Module], shares: Sequence[int]) -> Trained:
    """Each worker trains a model on its share; the first one's is the result."""
    copies = Copies(job, build, shares)
    for done in copies.rounds():
        copies.note(done, copies.models[0])
    return copies.result(copies.models[0])


_DEFINED: Mapping[str, Callable[..., Trained]] = {
    "aggregated": aggregated,
    "gossip": gossip,
    "parameter_averaging": averaging,
    "unconnected": unconnected,
}
"""What strategies do, by their names, for `_PLAIN` options."""
DEFINITIONS = {
    "ad_psgd": "each worker averages with another that goes on meanwhile, in an order that the machine decides",
    "aggregated": "a rule makes one gradient of all workers'",
    "hogwild": "workers write to one copy of the parameters in an order that the machine decides",
    "parameter_averaging": "each worker steps alone between two averages",
    "gossip": "each worker steps alone, and averages with its neighbours",
    "unconnected": "each worker trains a model of its own",
}
"""The same in words."""

_PLAIN = {"via": "all_reduce", "codec": "plain", "average_optimizer_state": False}


def reference_of(strategy: Strategy) -> Reference | None:
    """Returns the plain loops of a strategy that has such; None for another."""
    defined, options = _DEFINED.get(strategy.name), describe_options(strategy)
    plain = all(options.get(name, value) == value for name, value in _PLAIN.items())
    # A period that adapts follows what workers measure.
    if defined is None or not plain or not isinstance(options.get("period", 1), int):
        return None
    return functools.partial(defined, strategy)
