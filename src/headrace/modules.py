"""What a module holds: its parameters and buffers by name, their forms, and the modes of its parts."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain, combinations
from typing import Any

import torch
from torch import Tensor, nn

from headrace import internals
from headrace.errors import JobError, UsageError
from headrace.hooks import carry_hooks
from headrace.spec.model import ModelSpec, ParameterSpec
from headrace.spec.options import require_count
from headrace.spec.parameter_sets import ParameterSet, divide
from headrace.spec.patterns import require_matches
from headrace.spec.plan import Plan

EXTRA_STATE = "_extra_state"
"""The end of the key that a module's `get_extra_state` has in a state dict."""

TRACING = threading.RLock()
"""Of the thread that traces a model: `torch.fx` changes torch's classes for all threads of the process meanwhile."""

_REPACKS = "support_avx512bf16_for_cpu"
"""Whether a layer of bitsandbytes makes another form of its weight when it first runs in eval mode on a CPU."""


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Puts a module into eval mode; afterwards each part is in the mode that it was in."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        # Not train(), which would put parts into train mode that their owner keeps in eval mode.
        for part, mode in modes:
            part.training = mode


def set_train_modes(module: nn.Module) -> None:
    """Puts a module that is in eval mode as a whole into train mode; in one that is not, parts in eval mode stay so.

    A part whose `train` is its own decides what it keeps in eval mode. Weights in 4 bits stay as they are in eval mode,
    too: repacked for inference, their scales would be rounded, and no gradient would pass them.
    """
    for part in module.modules():
        if getattr(part, _REPACKS, False):
            setattr(part, _REPACKS, False)
    if not module.training:
        module.train()
        return
    kept = [part for part in module.modules() if not part.training]
    for part in list(module.modules()):
        if part.training and type(part).train is not nn.Module.train:
            part.train()
    for part in kept:
        part.training = False


def describe(module: nn.Module, sliceable: bool = True) -> ModelSpec:
    """Returns names, shapes and types of a model's parameters (tied ones once) and buffers."""
    return ModelSpec(
        parameters=tuple(_spec(name, tensor) for name, tensor in module.named_parameters()),
        buffers=tuple(_spec(name, tensor) for name, tensor in module.named_buffers()),
        sliceable=sliceable,
    )


def copy_module(module: nn.Module) -> nn.Module:
    """Returns a deep copy, with the hooks and the attributes of parameters, which `copy.deepcopy` leaves out."""
    # Of sparse tensors that are stored by row or column, torch makes no deep copies.
    compressed = (
        value
        for part in module.modules()
        for value in (*internals.buffers(part).values(), *vars(part).values())
        if isinstance(value, Tensor) and value.layout not in (torch.strided, torch.sparse_coo)
    )
    memo: dict[int, Any] = {id(tensor): tensor.clone() for tensor in compressed}
    copied = copy.deepcopy(module, memo)
    if not isinstance(module, torch.jit.ScriptModule):
        for parameter in module.parameters():
            if (attributes := vars(parameter)) and (other := memo.get(id(parameter))) is not None:
                vars(other).update(copy.deepcopy(attributes, memo))
        carry_hooks(module.parameters(), copied, memo)
    return copied


def own_copy(model: nn.Module) -> nn.Module:
    """Returns a copy of a job's model; raises JobError if it would not be the same."""
    refuse_overlapping(model, "a model that is given as an object is copied, where they are apart")
    return copy_module(model)


def frozen(
    model: Callable[[], nn.Module] | nn.Module, *patterns: str, until_epoch: int | None = None
) -> Callable[[], nn.Module]:
    """Returns a job's model whose parameters with such names are not trained: `model=hr.frozen(make, "encoder.*")`.

    Running statistics of frozen BatchNorm layers still follow the data, unless the model keeps them in eval mode.
    Parameters that are frozen for a time have no gradient until then: no update, no weight decay, no optimizer state.
    Calls can be nested, so that layers are unfrozen one after the other.

    Args:
        model: a function that builds the model, or a model, which is copied.
        patterns: of names as in `named_parameters()`, as in a shell: "encoder.*", "*.bias".
        until_epoch: the epoch, counted from 0, with which their training begins; None for never.

    Raises:
        UsageError: `until_epoch` is no whole number above 0.
        UnknownName: when the model is built, a pattern fits no parameter.

    Examples:
        >>> from dataclasses import replace
        >>> hr.fit(replace(job, model=hr.frozen(job.model, "0.*"))).status
        'ok'
    """
    if until_epoch is not None:
        require_count("until_epoch", until_epoch)
    return partial(_build_frozen, model, patterns, until_epoch)


_FROZEN_UNTIL = "headrace_frozen_until"
"""The attribute of a module with the epochs, by the names of its parameters."""


def _build_frozen(
    model: Callable[[], nn.Module] | nn.Module, patterns: Sequence[str], until_epoch: int | None
) -> nn.Module:
    module = own_copy(model) if isinstance(model, nn.Module) else model()
    require_matches(patterns, (name for name, _ in module.named_parameters()))
    chosen = {
        name: parameter
        for name, parameter in module.named_parameters()
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    }
    if until_epoch is None:
        for parameter in chosen.values():
            parameter.requires_grad_(False)
    elif isinstance(module, torch.jit.ScriptModule):
        raise UsageError("a TorchScript model cannot be frozen for a time; leave out until_epoch, and it is for good")
    else:
        vars(module)[_FROZEN_UNTIL] = {**vars(module).get(_FROZEN_UNTIL, {}), **dict.fromkeys(chosen, until_epoch)}
    return module


def frozen_until(module: nn.Module) -> dict[str, int]:
    """Returns the epochs with which the training of parameters begins that `frozen` has frozen for a time, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: epoch
        for prefix, part in module.named_modules()
        for name, epoch in vars(part).get(_FROZEN_UNTIL, {}).items()
    }


def names_of_sets(module: nn.Module, sets: Mapping[str, ParameterSet]) -> dict[str, tuple[str, ...]]:
    """Returns the names of the parameters of each set, of which every trained one must be in one; see `divide`."""
    aliases: dict[int, list[str]] = {}
    frozen = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            aliases.setdefault(id(parameter), []).append(name)
        else:
            frozen.append(name)
    return divide(sets, {own[0]: own for own in aliases.values()}, frozen)


def parts_of(module: nn.Module, names: Mapping[str, Sequence[str]]) -> dict[str, nn.Module]:
    """Returns, for each set of trained parameters, a module with these alone, in the same places under the same names.

    The first one also has all that is not trained. Modules whose parameters are all of one set are the module's own.
    """
    kept = {id(parameter): parameter for parameter in module.parameters() if not parameter.requires_grad}
    named = dict(module.named_parameters())
    parts = {}
    for index, (name, own) in enumerate(names.items()):
        chosen = {id(named[each]) for each in own} | (set() if index else kept.keys())
        parts[name] = _part(module, chosen, rest=index == 0) or nn.Module()
    return parts


def _part(module: nn.Module, chosen: Container[int], rest: bool) -> nn.Module | None:
    """Returns a module as far as its parameters are chosen; `rest` asks for buffers that no chosen part has, too."""
    inside = [id(parameter) in chosen for parameter in module.parameters()]
    if all(inside) if inside else rest:
        return module
    part = nn.Module()
    for name, parameter in module.named_parameters(recurse=False):
        if id(parameter) in chosen:
            part.register_parameter(name, parameter)
    for name, buffer in module.named_buffers(recurse=False) if rest else ():
        part.register_buffer(name, buffer)
    for name, child in module.named_children():
        if (below := _part(child, chosen, rest)) is not None:
            part.add_module(name, below)
    if (until := vars(module).get(_FROZEN_UNTIL)) is not None:
        vars(part)[_FROZEN_UNTIL] = until
    return part


def held_part(tensor: Tensor) -> Tensor:
    """Returns what this process has of a tensor that may be divided among several (a `DTensor`)."""
    # Where that is not imported, there is none.
    divided = sys.modules.get("torch.distributed.tensor")
    part: Tensor = internals.local_part(tensor) if divided and isinstance(tensor, divided.DTensor) else tensor
    return part


def move(module: nn.Module, device: str) -> None:
    """Moves a module to a device; a parameter or buffer that it has in several places stays one.

    On devices of PyTorch's extension point, as TPUs are, `Module.to` makes a new one for each place, without its hooks.
    """
    old = list(module.parameters())
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for each in module.modules():
        held: dict[str, Any]
        for held in (internals.parameters(each), internals.buffers(each)):
            for name, tensor in held.items():
                if tensor is not None:
                    places.setdefault(id(tensor), []).append((held, name))
    module.to(device)
    for (first, name), *others in places.values():
        for other, its_name in others:
            other[its_name] = first[name]
    for before, now in zip(old, module.parameters(), strict=True):
        if now is not before:
            for hook in (internals.gradient_hooks(before) or {}).values():
                now.register_hook(hook)
            for hook in (internals.accumulation_hooks(before) or {}).values():
                now.register_post_accumulate_grad_hook(hook)


def is_dense(tensor: Tensor) -> bool:
    """Tells whether a tensor is stored element by element; sparse ones (COO, CSR) are not."""
    return tensor.layout is torch.strided


def memory_of(tensor: Tensor) -> int:
    """Returns the identity of the memory that a tensor shares with its views."""
    plain = is_dense(tensor) and not tensor.is_nested
    return int(internals.storage_address(tensor.untyped_storage())) if plain else id(tensor)


def same_values(one: Tensor, other: Tensor) -> bool:
    """Tells whether two tensors, dense or sparse, have the same shape and elements."""
    one, other = (each if is_dense(each) else each.to_dense() for each in (one, other))
    return torch.equal(one, other)


def overlapping(module: nn.Module) -> tuple[str, str] | None:
    """Returns two names, of a trained parameter and of a tensor that has memory of it without being it.

    The other is a parameter, a buffer or an attribute; it is the parameter itself where its elements share memory.
    """
    places: dict[int, list[tuple[str, Tensor]]] = {}
    attributes = (
        (f"{path}.{name}", value) for path, part in module.named_modules() for name, value in vars(part).items()
    )
    seen: set[int] = set()
    for name, tensor in chain(module.named_parameters(), module.named_buffers(), attributes):
        if isinstance(tensor, Tensor) and id(tensor) not in seen and is_dense(tensor) and not tensor.is_meta:
            seen.add(id(tensor))
            places.setdefault(memory_of(tensor), []).append((name.strip("."), tensor))
    trained = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
    for (name, one), (other_name, other) in chain.from_iterable(combinations(each, 2) for each in places.values()):
        if trained & {id(one), id(other)} and _meet(one, other):
            return name, other_name
    for name, each in chain.from_iterable(places.values()):
        steps = [step for step, size in zip(each.stride(), each.shape, strict=True) if size > 1]
        if id(each) in trained and 0 in steps:
            return name, name
    return None


def _meet(one: Tensor, other: Tensor) -> bool:
    """Tells whether two tensors of one storage have elements in the same place."""
    elements = one.untyped_storage().nbytes() // one.element_size()
    if one.dtype != other.dtype or not (one.numel() and other.numel()):
        return bool(one.numel() and other.numel())
    numbers = torch.arange(elements)
    here, there = (numbers.as_strided(each.shape, each.stride(), each.storage_offset()) for each in (one, other))
    if here.max() < there.min() or there.max() < here.min():
        return False
    return bool(torch.isin(here, there).any())


def refuse_overlapping(module: nn.Module, why: str) -> None:
    """Raises JobError if parameters of a model share memory without being one; `why` is what parts them, or ""."""
    if why and (pair := overlapping(module)):
        apart = f"{pair[0]!r} shares memory with {pair[1]!r}" if pair[0] != pair[1] else f"{pair[0]!r} is expanded"
        raise JobError(
            f"{apart}, and {why}; make them one parameter (second.weight = first.weight), compute one from the other "
            "in forward, or clone()"
        )


def restore(tensor: Tensor, value: Tensor) -> None:
    """Gives a tensor a value of the same form; a sparse one may have other elements than before."""
    if is_dense(tensor):
        tensor.copy_(value)
    else:
        tensor.data = value.to(tensor.device).clone()


def parameters_and_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields every parameter once and every buffer that belongs to the model's state, by checkpoint name."""
    for name, parameter in module.named_parameters():
        yield f"parameter/{name}", parameter.detach()
    kept = module.state_dict(keep_vars=True)
    for name, buffer in module.named_buffers():
        if name in kept:
            yield f"buffer/{name}", buffer


def not_sent(module: nn.Module, plan: Plan) -> Iterator[tuple[str, Tensor]]:
    """Yields what workers do not get from the first one as they begin: buffers, and what servers do not hold."""
    yield from module.named_buffers()
    yield from ((name, each) for name, each in module.named_parameters() if plan.servers and not each.requires_grad)


def derived_state(module: nn.Module) -> list[str]:
    """Returns the names of a state dict's tensors that are neither parameters, buffers nor extra state."""
    own = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return [
        key
        for key, each in module.state_dict(keep_vars=True).items()
        if isinstance(each, Tensor) and id(each) not in own and not key.endswith(EXTRA_STATE)
    ]


def beside_frozen(module: nn.Module) -> dict[str, str]:
    """Returns the frozen parameters of which a state dict has more than their values, by the names of what it has.

    Such names begin with the parameter's: "weight.absmax" are the scales of a weight in 4 bits.
    """
    own = [name for name, each in module.named_parameters(remove_duplicate=False) if not each.requires_grad]
    derived = derived_state(module) if own else ()
    return {key: name for key in derived for name in own if key.startswith(f"{name}.")}


def _spec(name: str, tensor: Tensor) -> ParameterSpec:
    return ParameterSpec(
        name=name,
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        trainable=tensor.requires_grad,
    )


def stateful_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the modules that define extra state (`get_extra_state`), once each, by name."""
    return [
        (name, each)
        for name, each in module.named_modules()
        if type(each).get_extra_state is not nn.Module.get_extra_state and not isinstance(each, torch.jit.ScriptModule)
    ]


def replace_tensors(module: nn.Module, made: Mapping[int, Tensor]) -> None:
    """Puts others in the places of a module's parameters and buffers, by their ids; TorchScript keeps its own."""
    for part in module.modules():
        if not isinstance(part, torch.jit.ScriptModule):
            tables: tuple[dict[str, Any], ...] = internals.parameters(part), internals.buffers(part)
            for table in tables:
                table.update({name: made[id(each)] for name, each in table.items() if id(each) in made})


def without_data(tensor: Tensor) -> Tensor:
    """Returns a tensor or parameter of the same shape and type on the meta device."""
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
