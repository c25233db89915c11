"""Other forms of a job: a few rounds of it, in double precision, without what is random, without a suspect."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from headrace.batches import call
from headrace.data.given import as_pipeline
from headrace.data.loading.loader import Loader
from headrace.data.pipeline.pipeline import InputPipeline, from_arrays
from headrace.internals import BatchNorm
from headrace.modules import copy_module, restore, same_values, set_train_modes
from headrace.spec.job import Job
from headrace.spec.options import Options
from headrace.spec.parameter_sets import ParameterSet
from headrace.training.embeddings.layer import sparse_layers
from headrace.training.user_code.untouched import untouched
from headrace.trees import map_leaves, tensors_of
from headrace.worker.attributes import attributes_of, copied, same
from headrace.worker.evaluations.loss import with_loss
from headrace.worker.session import build_module, seed_torch

Change = Callable[[nn.Module], nn.Module]
_TIMED = 8
"""Examples by which a round's time is estimated."""

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def shorten(job: Job, rounds: int, batch: int | None = None, examples: int | None = None) -> Job:
    """Returns the job's first rounds.

    Of a large data set only the first examples: two epochs of them fit into the rounds, and the last batch of each is
    short and odd.
    """
    data = as_pipeline(job.data)[0]
    batch = batch or job.global_batch_size
    wanted = examples or max(1, (rounds + 1) // 2 - 1) * batch + batch // 2 + 1 - batch // 2 % 2
    most = 2 * batch + 1
    options = replace(job.options, early_stopping=None, eval_every=None)
    return replace(
        job,
        data=data.take(wanted) if len(data) > wanted and data.hosts is None else data,
        eval_data=_each_set(job, lambda each: each.take(min(len(each), most)) if each.hosts is None else each),
        global_batch_size=batch,
        epochs=None,
        steps=rounds,
        options=options,
    )


def _build_changed(build: Callable[[], nn.Module], change: Change) -> nn.Module:
    return change(build())


def with_model(job: Job, change: Change) -> Job:
    """Returns the job whose model is changed when it is built; of one that is given, it is a copy."""
    if isinstance(job.model, nn.Module):
        return replace(job, model=change(copy_module(job.model)))
    return replace(job, model=partial(_build_changed, job.model, change))


def doubled(job: Job) -> Job:
    """Returns the job in double precision: its model, and the floating-point numbers of its data."""
    made = replace(job, data=_in_double(job.data), eval_data=_each_set(job, _in_double))
    # A given model is put into double precision where it is, by `doubling`.
    return made if isinstance(job.model, nn.Module) else with_model(made, nn.Module.double)


@contextmanager
def doubling(job: Job, double: bool) -> Iterator[None]:
    """Puts a job's given model into double precision meanwhile: it stays the user's own object."""
    if not double or not isinstance(job.model, nn.Module):
        yield
        return
    kept = [(tensor, tensor.data) for tensor in (*job.model.parameters(), *job.model.buffers())]
    buffers = [(part, name, each) for part in job.model.modules() for name, each in part.named_buffers(recurse=False)]
    job.model.double()
    try:
        yield
    finally:
        for tensor, data in kept:
            tensor.data = data
        for part, name, buffer in buffers:
            setattr(part, name, buffer)


def _each_set(job: Job, change: Callable[[InputPipeline], InputPipeline]) -> Any:
    """Returns the sets to evaluate on, changed; the only one as it is, several by their names."""
    sets = {name: change(as_pipeline(data)[0]) for name, data in job.eval_sets.items()}
    return sets.get("") if len(sets) < 2 else {name.removesuffix("/") or "first": each for name, each in sets.items()}


def _in_double(data: Any) -> InputPipeline:
    pipeline = as_pipeline(data)[0].map(_widened)
    collator = pipeline.batching.collate
    if collator is None or isinstance(collator.function, _Keeps):
        return pipeline
    wide = replace(collator, function=partial(_collate_widened, collator.function))
    return replace(pipeline, batching=replace(pipeline.batching, collate=wide))


def _collate_widened(function: Callable[..., Any], examples: Any, **given: Any) -> Any:
    return _widened(function(examples, **given))


@runtime_checkable
class _Keeps(Protocol):
    """A collator with a generator of its own, as those of transformers that mask tokens: it makes whole numbers."""

    generator: Any


def _widened(tree: Any) -> Any:
    def wide(_: str, leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf.double()
        return leaf.astype(np.float64) if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f" else leaf

    return map_leaves(wide, tree)


def frozen_data(job: Job) -> Job:
    """Returns the job on the examples as they are read once, so that every reader gets the same."""
    pipeline = as_pipeline(job.data)[0]
    loader = Loader(pipeline, job.seed, job.global_batch_size, (1,), 0, ordered=True)
    batches = [share.batch for share in loader.sweep(alone=True) if share.examples]
    whole = _joined(batches)
    made = from_arrays(*whole) if isinstance(whole, tuple) else from_arrays(whole)
    return replace(job, data=made.shuffle(pipeline.seed) if pipeline.shuffled else made)


def _joined(batches: Sequence[Any]) -> Any:
    first = batches[0]
    if isinstance(first, Mapping):
        return {name: _joined([batch[name] for batch in batches]) for name in first}
    if isinstance(first, tuple | list):
        return tuple(_joined(list(parts)) for parts in zip(*batches, strict=True))
    return torch.cat(list(batches))


def reads_alike(job: Job) -> bool:
    """Returns whether the first batches are the same when they are read again."""
    pipeline = as_pipeline(job.data)[0]
    loaders = [Loader(pipeline, job.seed, job.global_batch_size, (1,), 0) for _ in range(2)]
    pairs = zip(*(loader.rounds(0, 2) for loader in loaders), strict=True)
    return all(_same(one.batch, two.batch) for one, two in pairs)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return same_values(one, other)
    if isinstance(one, Mapping):
        return all(_same(one[name], other[name]) for name in one)
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def affordable_batch(job: Job, module: nn.Module, seconds: float) -> int:
    """Returns the global batch size, or so few examples that forward and backward take about so many seconds."""
    data = as_pipeline(job.data)[0]
    loader = Loader(data, job.seed, min(_TIMED, len(data)), (1,), 0, ordered=True)
    share = next(share for share in loader.sweep(alone=True) if share.examples)
    with torch.random.fork_rng(devices=[]):
        began = perf_counter()
        output = call(module, share.batch, job.inputs)
        tensors = [each for each in tensors_of(output) if each.requires_grad]
        torch.autograd.backward([each.sum() for each in tensors])
        each_s = (perf_counter() - began) / share.examples
    return min(job.global_batch_size, max(_TIMED, int(seconds / each_s)))


def random_layers(module: nn.Module) -> str:
    """Returns the kinds of layers by which N workers differ from one by definition; "" for none."""
    kinds = {type(part).__name__ for part in module.modules() if isinstance(part, (*_DROPOUT, BatchNorm))}
    return ", ".join(sorted(kinds))


def without_random_layers(module: nn.Module) -> nn.Module:
    """Puts dropout and BatchNorm layers into eval mode for good."""
    for part in module.modules():
        if isinstance(part, (*_DROPOUT, BatchNorm)):
            part.eval()
        elif isinstance(getattr(part, "dropout", None), float):
            part.dropout = 0.0  # type: ignore[assignment]
    return module


def without_hooks(module: nn.Module) -> nn.Module:
    """Returns a copy whose parameters and modules have no hooks."""
    # torch copies parameters without their hooks.
    made = copy.deepcopy(module)
    for part in made.modules():
        for name, hooks in vars(part).items():
            if name.endswith("_hooks") and isinstance(hooks, dict):
                hooks.clear()
    return made


def _sgd(optimizer: Any) -> Any:
    made = partial(torch.optim.SGD, lr=0.05)
    return replace(optimizer, optimizer=made) if isinstance(optimizer, ParameterSet) else made


def _without_optimizer(job: Job) -> Job:
    chosen = job.optimizer
    if isinstance(chosen, Mapping):
        return replace(job, optimizer={name: _sgd(each) for name, each in chosen.items()})
    return replace(job, optimizer=_sgd(chosen))


def _mean_square(output: Any, target: Any) -> Tensor:
    """A loss without a state, a mean over examples: of the squares of every number that the model returns."""
    return torch.stack([each.square().mean() for each in tensors_of(output) if each.is_floating_point()]).sum()


def _pin(values: Mapping[str, Mapping[str, Any]], module: nn.Module, inputs: Any, output: Any) -> None:
    """Gives modules, after each forward, the attributes that they had at the start."""
    parts = dict(module.named_modules())
    for name, own in values.items():
        parts[name].__dict__.update(copy.deepcopy(own))


def with_pinned_attributes(module: nn.Module) -> nn.Module:
    """Lets forward change no number, tensor or array that a module has as an attribute."""
    known = vars(nn.Module()).keys()
    values = {
        name: {
            key: copy.deepcopy(value)
            for key, value in vars(part).items()
            if key not in known and isinstance(value, int | float | Tensor | np.ndarray)
        }
        for name, part in module.named_modules()
    }
    module.register_forward_hook(partial(_pin, values))
    return module


def changed_attributes(job: Job, batch: Any) -> list[str]:
    """Returns the numbers, arrays and tensors in attributes of the model that a forward changes."""
    with keeping(job), torch.random.fork_rng(devices=[]):
        module = own_module(job)
        before = {path: copied(each.value) for path, each in attributes_of(module).items()}
        call(module, batch, job.inputs)
        after = attributes_of(module)
        return [path for path, value in before.items() if path not in after or not same(after[path].value, value)]


SUSPECTS: Mapping[str, tuple[str, Callable[[Job], Job]]] = {
    "hooks": ("hooks on the model's parameters and modules", lambda job: with_model(job, without_hooks)),
    "options": ("the job's options (clipping, schedule, averages ...)", lambda job: replace(job, options=Options())),
    "optimizer": ("the job's optimizer: with plain SGD they are equal", _without_optimizer),
    "loss": (
        "the job's loss: with the mean of the squared outputs they are equal",
        lambda job: replace(job, task=None, loss=_mean_square, metrics=None, eval_data=None),
    ),
    "attributes": (
        "attributes that forward changes: with those of the start they are equal",
        lambda job: with_model(job, with_pinned_attributes),
    ),
    "the data": ("the data: on examples that are read once they are equal", frozen_data),
    "random layers": (
        "BatchNorm or dropout layers: in eval mode they are equal",
        lambda job: with_model(job, without_random_layers),
    ),
}
"""What may be the cause of a difference: the words that say so, and the job without it."""


@contextmanager
def keeping(job: Job) -> Iterator[None]:
    """Puts back, at the end, what a job's own objects hold now: its model, if it is one, its loss and what they reach.

    Training changes them where they are: the plain loop copies nothing.
    """
    losses = list(job.loss.values()) if isinstance(job.loss, Mapping) else [job.loss]
    given = [each for each in (job.model, *losses) if isinstance(each, nn.Module)]
    tensors = [tensor for module in given for tensor in (*module.parameters(), *module.buffers())]
    kept = [(tensor, tensor.detach().clone(), tensor.requires_grad) for tensor in tensors]
    with untouched(job.model, *losses, job.optimizer, but=tensors):
        try:
            yield
        finally:
            for tensor, value, trained in kept:
                tensor.grad = None
                restore(tensor.detach(), value)
                tensor.requires_grad_(trained)


def own_module(job: Job) -> nn.Module:
    """Returns the model that the plain loop trains: the user's own object, or what the user's function builds."""
    if isinstance(job.model, nn.Module):
        seed_torch(job.seed)
        module = with_loss(job.model, job.loss)
        set_train_modes(module)
        return module
    return build_module(job)


def has_tables(job: Job) -> bool:
    """Tells whether a job's model has sparse embeddings."""
    with keeping(job):
        return any(sparse_layers(own_module(job)))
