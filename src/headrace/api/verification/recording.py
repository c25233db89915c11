"""What is compared of a training: losses, and after each round parameters, buffers and optimizer state, by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from headrace import internals
from headrace.api.verification.plain_loop import PlainLoop
from headrace.api.verification.plain_worker import PlainWorker
from headrace.batches import call, select_target
from headrace.checkpoint.forms import extra_states, load_extra_states
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.data.given import as_pipeline
from headrace.data.loading.loader import Loader
from headrace.metrics import Mean, weigh
from headrace.modules import evaluating, names_of_sets, parameters_and_buffers, parts_of
from headrace.spec.job import Job
from headrace.spec.parameter_sets import loss_name
from headrace.training.shared_buffers.batch_norm import averaged_buffers
from headrace.training.update import HasModes
from headrace.training.user_code.objective import Objective
from headrace.trees import from_json
from headrace.worker.evaluations.accumulated import Accumulated, accumulates
from headrace.worker.evaluations.loss import LOSS
from headrace.worker.session import alone
from headrace.worker.state import random_states, restore_random_states, seed_worker

KINDS = ("parameters", "buffers", "extra state", "optimizer state")

OF_RANKS = "of ranks"
"""The kind of what a checkpoint has beside these: settings, and what each rank keeps for itself."""

Tensors = dict[str, Tensor]


@dataclass
class Trained:
    """One training, in numbers.

    Attributes:
        losses: of each round, the mean over the global batch.
        rounds: after so many rounds, by kind: tensors by name; optimizer state by parameter and key.
        metrics: of the evaluation at the end.
        model: parameters and buffers of the model that is returned, with averaged weights if there are any.
        outputs: of that model for the first examples.
        drew: whether forward drew random numbers.
        same_draws: whether two workers draw the same ones.
        rounded: the names of the numbers that were computed in less than double precision; "losses" is one.
    """

    losses: list[float] = field(default_factory=list)
    rounds: dict[int, dict[str, Tensors]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    model: Tensors = field(default_factory=dict)
    outputs: Tensors = field(default_factory=dict)
    drew: bool = False
    same_draws: bool = False
    rounded: set[str] = field(default_factory=set)

    def note(self, name: str, value: Any) -> None:
        """Notes whether a number was computed in less than double precision, as some losses are in any model."""
        if isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64:
            self.rounded.add(name)

    @property
    def last(self) -> int:
        """Rounds that are done after the last one."""
        return max(self.rounds)

    @property
    def changes_own(self) -> bool:
        """Whether these are others than the running statistics of BatchNorm, which are averaged where they are used."""
        if not self.rounds:
            return False  # of a replay
        # A run has recorded its rounds from the end of the first.
        first, last = (self.rounds[each]["buffers"] for each in (min(self.rounds), max(self.rounds)))
        names = [name for name in first if not name.endswith(("running_mean", "running_var"))]
        return any(first[name].is_floating_point() and not torch.equal(first[name], last[name]) for name in names)

    @property
    def changes(self) -> bool:
        """Whether forward changes buffers that are no whole numbers, or extra state."""
        first, last = self.rounds[0], self.rounds[self.last]
        buffers = {name: each for name, each in first["buffers"].items() if each.is_floating_point()}
        pairs = [*((each, last["buffers"][name]) for name, each in buffers.items())]
        pairs += [(each, last["extra state"].get(name, each)) for name, each in first["extra state"].items()]
        return any(not torch.equal(one, other) for one, other in pairs)


class Workers:
    """Buffers and random numbers of each worker, of one model in one process.

    Args:
        seed: of the job.
        ranks: of the workers. Where there is one, its random numbers are the process's own, unless `apart`,
            with a model of its own.
    """

    def __init__(self, module: nn.Module, seed: int, ranks: Sequence[int], apart: bool = False) -> None:
        self._module, self._one, self._apart = module, len(ranks) == 1 and not apart, apart
        self._device = torch.device("cpu")
        self._states: list[tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]] = []
        self.drew = False
        for rank in reversed(ranks):
            seed_worker(seed, rank)
            self._states.insert(0, ([], {}, {}) if self._one else self._now())

    @property
    def same_draws(self) -> bool:
        """Whether two workers draw the same random numbers."""
        states = [random["random/torch"].numpy().tobytes() for _, _, random in self._states if random]
        return len(set(states)) < len(states)

    def _now(self) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
        buffers = [buffer.clone() for buffer in self._module.buffers()]
        return buffers, extra_states(self._module), random_states(self._device)

    @contextmanager
    def lend(self, worker: int) -> Iterator[None]:
        """Meanwhile the model has a worker's buffers and extra state, and the process its random numbers."""
        if self._one:
            before = torch.get_rng_state()
            yield
            self.drew = self.drew or not torch.equal(before, torch.get_rng_state())
            return
        buffers, extra, random = self._states[worker]
        if not self._apart:
            self._put(buffers, extra)
        restore_random_states(random, self._device)
        yield
        self._states[worker] = self._now()

    def combined(self, weights: Sequence[float]) -> None:
        """Leaves the mean of the workers' running statistics in the model; other buffers are the first worker's."""
        if self._one:
            return
        self._put(*self._states[0][:2])
        means = {id(each) for each in averaged_buffers(self._module)}
        every = zip(*(buffers for buffers, *_ in self._states), strict=True)
        with torch.no_grad():
            for buffer, values in zip(self._module.buffers(), every, strict=True):
                if id(buffer) in means:
                    parts = torch.tensor(weights, dtype=torch.float64) / sum(weights)
                    buffer.copy_(torch.tensordot(parts, torch.stack(values).double(), 1))

    def synchronized(self, weights: Sequence[float] | None) -> None:
        """Gives all workers one value of the buffers that are saved: the weighted mean, or the first worker's.

        Running statistics, which are averaged where they are used, stay each worker's own, and numbers that are no
        fractions are the first worker's.
        """
        own = {id(each) for each in averaged_buffers(self._module)}
        saved = {id(each) for each in self._module.state_dict(keep_vars=True).values()}
        for index, buffer in enumerate(self._module.buffers() if not self._one else ()):
            if id(buffer) in own or id(buffer) not in saved:
                continue
            values = [buffers[index] for buffers, *_ in self._states]
            value = values[0]
            if weights is not None and buffer.is_floating_point():
                parts = torch.tensor(weights, dtype=torch.float64) / sum(weights)
                value = torch.tensordot(parts, torch.stack(values).double(), 1)
            for each in values:
                each.copy_(value)

    def _put(self, values: Sequence[Tensor], extra: Mapping[str, Tensor]) -> None:
        load_extra_states(self._module, extra)
        with torch.no_grad():
            for buffer, value in zip(self._module.buffers(), values, strict=True):
                buffer.copy_(value)


def train_plainly(
    job: Job,
    module: nn.Module,
    shares: Sequence[int] = (1,),
    by_examples: bool = False,
    train: Callable[[Any], None] | None = None,
) -> Trained:
    """Trains a job by the plain loop, the shares of a global batch one after the other.

    Args:
        by_examples: weighs the workers' running statistics by how many examples each has had.
        train: a loop of the user's own.
    """
    found, count = Trained(), job.steps or 0
    pipeline = as_pipeline(job.data)[0]
    loaders = [Loader(pipeline, job.seed, job.global_batch_size, shares, rank) for rank in range(len(shares))]
    rounds = zip(*(islice(loader.rounds(), count) for loader in loaders), strict=True)
    workers = Workers(module, job.seed, range(len(shares)))
    found.same_draws = workers.same_draws
    loops = loops_of(job, module, loaders[0].rounds_per_epoch, workers)
    found.rounds[0] = {**tensors_of(module), "optimizer state": {}}
    seen = [float(not by_examples)] * len(shares)

    def note(worker: PlainWorker) -> None:
        for rank, share in enumerate(worker.shares):
            seen[rank] += share.examples * by_examples
        if job.options.sync_buffers != "local":
            means = job.options.sync_buffers == "mean"
            workers.synchronized([share.examples for share in worker.shares] if means else None)
        workers.combined(seen)
        found.note("losses", worker.loop.loss)
        found.losses.append(float(worker.loop.loss))
        found.rounds[worker.round + 1] = {**tensors_of(module), "optimizer state": dict(_states(loops.values()))}

    def measure() -> dict[str, float]:
        examine(job, module, found)
        return found.metrics

    worker = PlainWorker(job, module, loops, rounds, loaders[0].rounds_per_epoch, note, measure)
    if train is not None:
        train(worker)
    else:
        for batch in worker.batches():
            worker.step(batch)
    adopt_averages(loops.values())
    found.model = tensors_in(module)
    found.drew = workers.drew
    examine(job, module, found)
    return found


def loops_of(job: Job, module: nn.Module, epoch: int, workers: Workers) -> dict[str, PlainLoop]:
    """Returns the plain loop, or one for each set of parameters that takes turns."""
    loops = {} if job.sets else {"": PlainLoop(job, module, own_objective(job, module), epoch, workers.lend)}
    for name, part in parts_of(module, names_of_sets(module, job.sets)).items() if job.sets else ():
        own = alone(job, name)
        loops[name] = PlainLoop(own, part, replace(own_objective(own, module), model=module), epoch, workers.lend)
    for optimizer in (loop.optimizer for loop in loops.values()):
        if isinstance(optimizer, HasModes) and not all(group.get("train_mode") for group in optimizer.param_groups):
            optimizer.train()
    return loops


def own_objective(job: Job, module: nn.Module) -> Objective:
    """Returns the job's loss: the user's own, or where it is trained, the part of the model that it is."""
    loss: Any = job.task.loss if job.task else internals.children(module).get(LOSS, job.loss)
    return Objective(loss, job.inputs, job.target)


@torch.no_grad()
def adopt_averages(loops: Iterable[PlainLoop]) -> None:
    """Gives the models the weights that are evaluated: averages, or those of an optimizer's eval mode."""
    for loop in loops:
        if isinstance(loop.optimizer, HasModes) and not loop.averages:
            loop.optimizer.eval()
        for name, average in loop.averages.items():
            loop.model.get_parameter(name).copy_(average)


def tensors_in(module: nn.Module) -> Tensors:
    """Returns copies of the tensors of a model's state."""
    state = {name: each for name, each in module.state_dict().items() if not name.startswith(f"{LOSS}.")}
    return {name: each.detach().clone() for name, each in state.items() if isinstance(each, Tensor)}


def tensors_of(module: nn.Module) -> dict[str, Tensors]:
    """Returns copies of a model's parameters, of the buffers that belong to its state, and of its extra state."""
    copies = {name: tensor.detach().clone() for name, tensor in parameters_and_buffers(module)}
    return {**by_kind(copies), "extra state": numbers_in(extra_states(module))}


def by_kind(tensors: Mapping[str, Tensor]) -> dict[str, Tensors]:
    """Returns the parameters and the buffers among tensors that are named as checkpoints name them."""
    found: dict[str, Tensors] = {"parameters": {}, "buffers": {}}
    for name, tensor in tensors.items():
        kind, _, own = name.partition("/")
        if kind in ("parameter", "buffer"):
            found[f"{kind}s"][own] = tensor
    return found


def _states(loops: Iterable[PlainLoop]) -> Iterator[tuple[str, Tensor]]:
    for loop in loops:
        for parameter, tensor in loop.model.named_parameters():
            for key, value in loop.optimizer.state.get(tensor, {}).items():
                if isinstance(value, Tensor | bool | int | float):
                    yield f"{parameter}/{key}", torch.as_tensor(value).detach().clone().flatten()


def numbers_in(saved: Mapping[str, Tensor]) -> Tensors:
    """Returns the tensors and numbers in the extra state that a checkpoint has of modules."""
    found: Tensors = {}
    for name, text in saved.items():
        if name.startswith("extra/") and name.endswith("|json"):
            owner = name.removesuffix("|json")
            tensors = [saved[f"{owner}|{index}"] for index in range(len(saved)) if f"{owner}|{index}" in saved]
            tree = from_json(json.loads(bytes(text.tolist())), tensors.__getitem__)
            found |= flat(tree, owner.removeprefix("extra/"))
    return found


def examine(job: Job, module: nn.Module, found: Trained) -> None:
    """Notes what a trained model gives: metrics of the evaluation data, and the outputs of the first examples."""
    with evaluating(module), torch.no_grad():
        output = call(module, first_batch(job), job.inputs)
        found.outputs = flat(job.task.activation(output) if job.task else output)
        evaluate_sets(job, module, found)


def evaluate_sets(job: Job, module: nn.Module, found: Trained) -> None:
    """Notes loss and metrics over each of the job's sets to evaluate on."""
    for name, data in job.eval_sets.items():
        values = evaluate(job, module, _examined(job, data), found.note)
        found.metrics |= {f"{name}{metric}": value for metric, value in values.items()}


def first_batch(job: Job) -> Any:
    """Returns a batch of the first examples of the evaluation data, or else of the training data."""
    return next(
        share.batch for share in _examined(job, job.eval_sets.get("", job.data)).sweep(alone=True) if share.examples
    )


def _examined(job: Job, data: Any) -> Loader:
    data = as_pipeline(data)[0]
    return Loader(data, job.seed, min(job.global_batch_size, len(data)), (1,), 0, ordered=True)


def evaluate(job: Job, module: nn.Module, loader: Loader, note: Callable[[str, Any], None]) -> dict[str, float]:
    """Returns loss and metrics over the evaluation data, each example once; gives each value to `note`."""
    losses = {loss_name(name): loss for name, loss in job.loss.items()} if isinstance(job.loss, Mapping) else {}
    measures: dict[str, Any] = {} if losses else {"loss": own_objective(job, module).loss}
    measures |= {**(job.task.metrics if job.task else {}), **(job.metrics or {})}
    joined = {name: Accumulated(name, each, job.task) for name, each in measures.items() if accumulates(each)}
    sums: dict[str, tuple[float, float]] = {}
    for share in loader.sweep():
        output, target = call(module, share.batch, job.inputs), select_target(share.batch, job.target)
        values = {name: loss(module, share.batch) for name, loss in losses.items()}
        values |= {name: each(output, target) for name, each in measures.items() if name not in joined}
        for name, value in values.items():
            total, weight = weigh(value, share.examples, name)
            note(name, value.total if isinstance(value, Mean) else value)
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + float(total.detach()), before[1] + float(weight)
        for each in joined.values():
            each.add(output, target)
    alone = ThreadCollective(ThreadGroup(1), 0)
    return {name: total / weight for name, (total, weight) in sums.items() if weight} | {
        name: each.total(alone) for name, each in joined.items()
    }


def flat(tree: Any, name: str = "output") -> Tensors:
    """Returns the tensors and numbers of a tree by their place in it."""
    if isinstance(tree, Tensor | bool | int | float):
        return {name: torch.as_tensor(tree).detach().clone()}
    if isinstance(tree, Mapping):
        items: Sequence[tuple[Any, Any]] = list(tree.items())
    else:
        items = list(enumerate(tree)) if isinstance(tree, tuple | list) else []
    return {key: each for place, child in items for key, each in flat(child, f"{name}.{place}").items()}
