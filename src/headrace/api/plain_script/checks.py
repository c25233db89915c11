"""What is checked of a script's model, optimizer and loader before the first step."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Subset, TensorDataset
from torch.utils.hooks import RemovableHandle

from headrace import internals
from headrace.api.plain_script.meeting import Meeting
from headrace.api.plain_script.shares import ShareLoader
from headrace.api.probes.finding import names_of
from headrace.api.probes.parts.hooks import problems_of_hooks
from headrace.collectives.digest import digests
from headrace.data.cache.fingerprint import fingerprint
from headrace.errors import UsageError
from headrace.hooks import OwnHook
from headrace.internals import BatchNorm
from headrace.policies.roles import split

_COLUMNS = (Tensor, np.ndarray, list, tuple)
_SAMPLED = 64
"""Examples of which a digest is compared."""

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def refuse_wrappers() -> None:
    """Refuses, from now on, what divides batches or averages gradients as hr.setup does."""
    for kind in _WRAPPERS:

        def refuse(*_: object, kind: type[nn.Module] = kind, **__: object) -> None:
            caller = traceback.extract_stack(limit=2)[0]
            raise UsageError(f"{caller.filename}, line {caller.lineno}, has {_why(kind)}; take it out")

        setattr(kind, "__init__", refuse)  # noqa: B010


def _why(kind: type[nn.Module]) -> str:
    does = "divides each batch" if kind is nn.DataParallel else "averages gradients, whatever the sizes of shares,"
    return f"{kind.__name__}, which {does} itself, and hr.setup does that"


def check_parts(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Raises a UsageError for a model or an optimizer that several processes cannot train."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"the model is a {type(model).__name__}; hr.setup takes a torch.nn.Module, one in each call")
    for name, part in model.named_modules():
        if isinstance(part, _WRAPPERS):
            raise UsageError(f"{name or 'the model'} is in {_why(type(part))}; give hr.setup its .module")
    lazy = [name for name, each in model.named_parameters() if isinstance(each, nn.parameter.UninitializedParameter)]
    if lazy:
        raise UsageError(f"{lazy[0]} has no shape yet; run the model on an example before hr.setup (lazy layers)")
    for problem, names in problems_of_hooks(model).items():
        raise UsageError(
            f"a hook of {names_of(names)} {problem}; change .grad between loss.backward() and optimizer.step(), where "
            "it is that of the whole batch (torch.nn.utils.clip_grad_value_, clip_grad_norm_)"
        )
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"the optimizer is a {type(optimizer).__name__}; give hr.setup the torch.optim.Optimizer inside, or None "
            "where the script updates its parameters itself"
        )
    known = {id(parameter) for parameter in model.parameters()}
    strange = sum(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"])
    if strange:
        raise UsageError(
            f"{strange} of the optimizer's parameters are not the model's (a loss with parameters, a second model?): "
            "give hr.setup all that it trains, as in hr.setup(torch.nn.ModuleList([model, loss]), optimizer, loader)"
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise UsageError("SparseAdam takes sparse gradients, and setup sums dense ones; use Adam")


def say_hooks(model: nn.Module, meeting: Meeting) -> None:
    """Says that backward hooks of modules see the gradients of a share."""
    hooked = [name for name, part in model.named_modules() if internals.backward_hooks(part)]
    hooked += [name for name, part in model.named_modules() if internals.backward_pre_hooks(part)]
    if hooked:
        meeting.say(
            f"the backward hooks of modules ({names_of(hooked)}) see gradients of each process's share, which are the "
            "batch's only for what they make of single examples"
        )


def facts_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, loader: DataLoader[Any] | ShareLoader | None
) -> dict[str, str]:
    """Returns what must be the same in all processes, by name: else they go through different batches."""
    shapes = [(name, tuple(each.shape), str(each.dtype)) for name, each in model.named_parameters()]
    facts = {"the model": f"{len(shapes)} parameters with digest {fingerprint(shapes)[:12]}"}
    if optimizer is not None:
        facts["the optimizer"] = f"{type(optimizer).__name__} of {len(optimizer.param_groups)} parameter groups"
    if loader is None:
        return facts
    generator: torch.Generator | None = loader.generator
    dataset = loader.dataset
    seed = "none" if generator is None else str(generator.initial_seed())
    return facts | {
        "batch_size": str(loader.batch_size),
        "drop_last": str(loader.drop_last),
        "the sampler": f"{type(loader.batch_sampler).__name__} of {type(loader.sampler).__name__}",
        "the seed of the loader's generator": seed,
        "the data": (f"{len(dataset):,} examples" if isinstance(dataset, Sized) else "of no length") + _sample(dataset),
    }


def _sample(dataset: Any) -> str:
    """Returns a digest of some examples, of data in tensors, arrays and lists: they may have been drawn unseeded."""
    chosen: list[int] | None = None
    while isinstance(dataset, Subset):
        chosen = list(dataset.indices) if chosen is None else [dataset.indices[index] for index in chosen]
        dataset = dataset.dataset
    values = [] if chosen is None else [torch.tensor(chosen)]
    columns: Iterable[Any] = (dataset,)
    if not isinstance(dataset, _COLUMNS):
        # Of a TensorDataset, its tensors in the place of their tuple.
        held = {**vars(type(dataset)), **getattr(dataset, "__dict__", {})}
        columns = (*held.pop("tensors", ()), *held.values()) if type(dataset) is TensorDataset else held.values()
    texts = [text for column in columns for text in _rows(column, chosen)]
    return f" with digest {fingerprint(digests(values), texts)[:12]}" if values or texts else ""


def _rows(column: Any, chosen: Sequence[int] | None) -> Iterator[str]:
    """Yields some of the rows of a tensor, an array or a list, as texts."""
    if not isinstance(column, _COLUMNS) or (isinstance(column, Tensor | np.ndarray) and not column.ndim):
        return
    count = len(column) if chosen is None else len(chosen)
    for part in range(min(count, _SAMPLED)):
        row = count * part // min(count, _SAMPLED)
        place = row if chosen is None else chosen[row]
        if place < len(column):
            yield _text(column[place])


def _text(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray) and not (isinstance(value, np.ndarray) and value.dtype.hasobject):
        return str(fingerprint(torch.as_tensor(value)))
    if isinstance(value, list | tuple | dict):
        return f"({','.join(map(_text, value.values() if isinstance(value, dict) else value))})"
    # What else there is may have its address in its text.
    return repr(value) if isinstance(value, str | int | float | np.generic) else type(value).__name__


def guard_batch_norm(model: nn.Module, shares: ShareLoader | None, meeting: Meeting) -> None:
    """Says what BatchNorm does in several processes, and refuses shares that it cannot normalise when it first runs."""
    layers = [module for module in model.modules() if isinstance(module, BatchNorm) and module.training]
    if not layers:
        return
    meeting.say(
        "BatchNorm normalises each process's share of a batch by itself, as other systems do, so the result is not "
        "that of one process; its running statistics are averaged after each backward pass. hr.fit with "
        "hr.Options(batch_norm='sync') normalises over the whole batch"
    )
    sizes = _last_shares(shares, meeting.world) if shares is not None else None
    if sizes is None:
        return
    whole, last = sizes
    handles: dict[nn.Module, RemovableHandle] = {}

    def check(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        handles.pop(layer).remove()
        # Of an image, each pixel is a value.
        values = inputs[0].numel() // max(1, inputs[0].shape[1] * len(inputs[0]))
        if min(last) * values < 2:
            raise UsageError(
                f"the last batch of {sum(last)} examples is divided into {' + '.join(map(str, last))}, and BatchNorm "
                f"needs two values a channel in each process; give the loader drop_last=True, or a batch size other "
                f"than {sum(whole)}"
            )

    handles |= {layer: layer.register_forward_pre_hook(OwnHook(check)) for layer in layers}


def _last_shares(shares: ShareLoader, world: int) -> tuple[Sequence[int], Sequence[int]] | None:
    """Returns how a whole batch and the last one are divided; None where that is not known."""
    batches: Any = shares.batch_sampler
    if type(batches) is not BatchSampler or not isinstance(batches.sampler, Sized):
        return None
    left = len(batches.sampler) % batches.batch_size
    last = batches.batch_size if batches.drop_last or not left else left
    return split(batches.batch_size, (1,) * world), split(last, (1,) * world)
