"""Layers of which something is said or done before the start: random, sparse, lazy, normalising, in eval mode."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from headrace.api.probes.finding import Finding, Scope, names_of
from headrace.api.probes.parts.reads import reads_of
from headrace.api.probes.parts.sample import Sample
from headrace.batches import call
from headrace.data.given import as_pipeline
from headrace.data.loading.loader import Loader
from headrace.devices import HOST
from headrace.errors import JobError, UsageError
from headrace.internals import SPARSE_ARGUMENTS, BatchNorm, DropoutNd
from headrace.modules import frozen_until
from headrace.policies.roles import pieces_of
from headrace.report.format import plural
from headrace.spec.job import Job
from headrace.spec.model import ModelSpec
from headrace.spec.options import Options
from headrace.spec.plan import Plan
from headrace.strategies import Strategy
from headrace.training.embeddings.layer import sparse_layers
from headrace.training.embeddings.local import LocalRows
from headrace.training.shared_buffers.batch_norm import NO_STATISTICS
from headrace.training.user_code.trial import drawn, loss_of, trial
from headrace.training.user_code.watching import Operations
from headrace.worker.evaluations.loss import LOSS


def probe_draws_and_reads(sample: Sample) -> Sequence[Finding]:
    """Tells whether forward or loss draws random numbers, and which lines read numbers of the batch."""
    with trial(sample.module):
        before = drawn()
        with reads_of(sample.batch) as lines:
            loss_of(sample.module, sample.batch, sample.objective)
        draws = drawn() != before
    layers = sample.module.named_modules()
    dropouts = [name for name, layer in layers if isinstance(layer, DropoutNd) and layer.training and layer.p]
    reading = Finding(
        f"Python reads a number of the batch ({names_of(lines)}): each worker reads its share's, each micro-batch its "
        "own, and where it decides for several examples, the result is not that of one device",
        "forward or loss",
        "decide for each example by itself (torch.where), or use one_device",
        Scope.SHARES,
    )
    drawing = Finding(
        "forward draws random numbers, others on each worker, so no number equals one device's exactly",
        names_of(dropouts) if dropouts else "the model",
        "set them to 0 to compare strategies to the last digit",
        Scope.EQUALITY,
    )
    return [finding for finding, is_found in ((reading, lines), (drawing, draws)) if is_found]


def probe_rows(sample: Sample) -> Sequence[Finding]:
    """Tells which sparse embeddings begin with other random numbers than torch would draw for them."""
    found = [
        layer.spec.name
        for layer in sparse_layers(sample.module)
        if isinstance(layer.source, LocalRows) and not len(layer.source.table) and layer.spec.init.kind != "constant"
    ]
    if not found:
        return ()
    what = "a row of this sparse embedding begins with numbers of the job's seed and its index, not with torch's draws"
    remedy = "give the job a model that is built (model=Model()) where it must begin as in plain PyTorch"
    return (Finding(what, names_of(found), remedy, Scope.START),)


def require_same_parameters(before: Collection[str], module: nn.Module) -> None:
    """Raises a JobError where a forward has made parameters or buffers that were not there before."""
    if new := [name for name, _ in module.named_parameters() if name not in before]:
        raise JobError(
            f"forward makes {names_of(new)}, which the model did not have before, so that no optimizer trains it; make "
            "the layer in the constructor, or a lazy one, nn.LazyLinear, that gets its shape from the first examples"
        )
    if new := [name for name, _ in module.named_buffers() if name not in before]:
        raise JobError(
            f"forward makes the buffer {names_of(new)}, which the model did not have before, so that each worker would "
            "have its own and no checkpoint it; register it in the constructor, and let forward fill it"
        )


def refuse_share_of_one(job: Job, module: nn.Module, plan: Plan, examples: int, strategy: Strategy) -> None:
    """Raises a UsageError where a share or micro-batch will have one example, which BatchNorm in train mode refuses."""
    if job.options.batch_norm == "sync" or not any(isinstance(each, BatchNorm) for each in module.modules()):
        return
    batch = min(job.global_batch_size, examples)
    last = examples % batch if job.steps is None or job.steps >= -(-examples // batch) else 0
    pieces = {size: pieces_of(plan, size, job.options.accumulate) for size in (batch, last) if size}
    ones = [size for size, found in pieces.items() if 1 in found]
    pipeline, _ = as_pipeline(job.data)
    loader = Loader(pipeline, job.seed, 1, (1,), 0, ordered=True)
    # How many examples a filter leaves is not known before.
    if not ones or pipeline.hosts is not None or loader.drops:
        return
    with trial(module):
        try:
            call(module, next(share.batch for share in loader.sweep(alone=True)), job.inputs)
            return
        except ValueError as error:
            # Not of layers whose channels have more than one value, as of pictures.
            if NO_STATISTICS not in str(error):
                return
    parts = pieces[ones[0]]
    # Not beside micro-batches, which have no layer of the whole batch.
    synced = replace(job.options, batch_norm="sync", accumulate=1)
    refused = job.options.accumulate > 1 or any(refusal.text(synced) for refusal in strategy.refusals())
    sync = ", or Options(batch_norm='sync')" if len(parts) > 1 and not refused else ""
    which = "each batch" if ones[0] == batch else "the last batch of an epoch"
    raise UsageError(
        f"{which} has {plural(ones[0], 'example')}, in parts of {' + '.join(map(str, parts))}, and BatchNorm "
        f"computes no statistics of one; use another global_batch_size, leave examples out (of {examples}), use fewer "
        f"workers or micro-batches{sync}"
    )


def probe_batch_norm(module: nn.Module, pieces: Sequence[int]) -> tuple[Finding, ...]:
    """Tells of layers that normalise pieces of a batch by themselves, of so many examples."""
    layers = [name for name, each in module.named_modules() if isinstance(each, BatchNorm) and each.training]
    if not layers or len(pieces) < 2:
        return ()
    sizes = " or ".join(map(str, sorted(set(pieces))))
    return (
        Finding(
            f"BatchNorm normalises {len(pieces)} parts of a batch, of {sizes} examples, each by itself, as other "
            "systems do, so the result is not that of one device",
            names_of(layers),
            "Options(batch_norm='sync') normalises over the whole batch, under mirrored, central_storage and "
            "fully_sharded, where workers have one part each",
            Scope.SHARES,
        ),
    )


def modes_text(module: nn.Module, came_in_eval: bool) -> tuple[str, ...]:
    """Returns lines on the modes that layers train in: `came_in_eval` is that of the whole model."""
    lines = []
    if came_in_eval:
        lines.append(
            "the model came in eval mode and trains in train mode, with dropout and BatchNorm at work; to keep a "
            "submodule in eval mode, give the model in train mode and that submodule in eval mode"
        )
    kept = [
        f"{name}.{below}" if name else below
        for name, layer in module.named_modules()
        if layer.training
        for below, child in layer.named_children()
        if not child.training
    ]
    if kept:
        lines.append(f"in eval mode during training, as the model has it: {names_of(kept)}")
    return tuple(lines)


def refuse_sparse_layers(module: nn.Module) -> None:
    """Raises JobError for classes of one's own, derived from embeddings, whose gradients are sparse."""
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            raise JobError(
                f"the layer {name!r} is a {type(layer).__name__} with sparse gradients, and only those of nn.Embedding "
                "and nn.EmbeddingBag themselves travel as rows; use one of these, or sparse=False"
            )
    for name, parameter in module.named_parameters():
        if parameter.layout is not torch.strided and parameter.requires_grad:
            raise JobError(
                f"the parameter {name!r} is sparse ({parameter.layout}), and its gradients are not exchanged; make it "
                "dense, or a buffer, which is not trained"
            )


def no_sparse_gradients(module: nn.Module) -> Operations:
    """Refuses, while a model runs, the functions that make sparse gradients of its parameters."""
    names = {id(each): name for name, each in module.named_parameters() if each.requires_grad}

    def require_dense(func: Any, args: Any, kwargs: Any, _: object) -> None:
        place = SPARSE_ARGUMENTS.get(func.name())
        sparse = place is not None and (args[place] if len(args) > place else kwargs.get("sparse", False))
        if sparse and id(args[0]) in names:
            raise JobError(
                f"forward makes sparse gradients of the parameter {names[id(args[0])]!r} "
                f"({func.overloadpacket.__name__} with sparse=True), which are not exchanged; use sparse=False"
            )

    return Operations(require_dense)


def lazy_tensors(module: nn.Module) -> list[str]:
    """Returns the names of the parameters and buffers that get their shapes from the first batch."""
    return [name for name, each in (*module.named_parameters(), *module.named_buffers()) if is_lazy(each)]


def refuse_composed(module: nn.Module) -> None:
    """Raises JobError for tensors that hold several (`__tensor_flatten__`), and 8 bits of bitsandbytes on CPUs."""
    for name, each in (*module.named_parameters(), *module.named_buffers()):
        if getattr(type(each), "__tensor_flatten__", None) is not None:
            raise JobError(
                f"{name!r} is a {type(each).__name__} of {type(each).__module__.partition('.')[0]}, which holds "
                "several tensors, and workers and checkpoints carry one a parameter; quantise a frozen base by "
                "bitsandbytes (load_in_4bit=True), or leave it as it is"
            )
        if type(each).__name__ == "Int8Params" and each.dtype == torch.int8 and each.device.type == HOST:
            raise JobError(
                f"{name!r} is in 8 bits of bitsandbytes on a CPU: its first forward takes the scales from the "
                "parameter, and what is tried before a run cannot put them back, so that its numbers would be read "
                "without scales; load the base in 4 bits (load_in_4bit=True), or as it is"
            )


def check_trained(module: nn.Module) -> None:
    """Raises JobError for a model without a dense parameter that is trained."""
    if any(parameter.requires_grad for parameter in module.parameters()):
        return
    if tables := [layer.spec.name for layer in sparse_layers(module)]:
        raise JobError(
            f"the model trains nothing but sparse embeddings ({names_of(tables)}), and the workers exchange the "
            "gradient of at least one dense parameter; give it a dense layer, or one of the embeddings sparse=False"
        )
    raise JobError("the model has no parameter to train: all are frozen, or there is none")


def check_frozen(module: nn.Module) -> None:
    """Raises UsageError where `hr.frozen` holds what is never trained, or all that is."""
    until = frozen_until(module)
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name in until.keys() - trained:
        raise UsageError(
            f"{name!r} is frozen until epoch {until[name]}, and is no dense parameter that is trained: it is frozen "
            "for good too, or of a sparse embedding; leave it out of the patterns"
        )
    if until and trained <= until.keys():
        raise UsageError(
            f"all parameters are frozen until epoch {min(until.values())}, so nothing would be trained before; leave "
            "some out of the patterns of hr.frozen(..., until_epoch=...)"
        )


def check_precision(options: Options, module: nn.Module) -> None:
    """Raises UsageError for a precision that changes nothing, as no parameter is float32."""
    types = {parameter.dtype for parameter in module.parameters()}
    if options.precision != "fp32" and torch.float32 not in types:
        named = " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in types))
        raise UsageError(
            f"precision={options.precision!r} changes how float32 parameters are computed with, and the model's are "
            f"{named}; use precision='fp32', which leaves all types as they are, or make the model of float32"
        )


def check_weights(job: Job, module: nn.Module, model: ModelSpec) -> Job:
    """Refuses stored values that are not the model's; returns the job with their place from the root of this machine.

    A worker may run in another folder.
    """
    if job.weights is None:
        return job
    from headrace.spec.weights import Weights
    from headrace.weights.files import absolute
    from headrace.weights.fitting import find_weights

    weights = Weights.of(job.weights)
    find_weights(weights, module, f"{LOSS}.", [each.name for each in model.tables])
    return replace(job, weights=replace(weights, where=absolute(weights.where)))
