"""Which modules are gathered as one: found in the model, or named."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headrace.errors import UsageError
from headrace.modules import beside_frozen
from headrace.training.recompute.blocks import entries_of_containers

AUTO = "auto"
_SHOWN = 8
"""Names in a message."""


def find_units(module: nn.Module, units: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the names of the modules that are gathered by themselves; the rest of the model is one more unit.

    "auto" finds blocks, the entries of the outermost Sequentials and ModuleLists. Of a pattern count the outermost
    modules that match it. Modules without parameters are left out.

    Raises:
        UsageError: a pattern matches nothing, or the model has something that cannot be sharded; by name.
    """
    named = {name: each for name, each in module.named_modules() if name}
    for name, each in {"": module, **named}.items():
        if isinstance(each, torch.jit.ScriptModule):
            raise UsageError(
                f"{name or 'the model'} is a TorchScript module, whose parameters cannot be exchanged for shards; use "
                "the module that it was made from, or mirrored"
            )
    found = dict.fromkeys(entries_of_containers(module) if isinstance(units, str) else _matching(named, units))
    chosen = [name for name in found if any(True for _ in named[name].parameters())]
    shared = _shared(module, chosen)
    if shared and not isinstance(units, str):
        name, first, second = next(iter(shared))
        raise UsageError(
            f"the parameter {name!r} belongs to {_text(first)} and to {_text(second)}: tied weights must be in one "
            "unit; name a module that has both, or leave both out, so that they are in the rest of the model"
        )
    apart = {unit for _, *owners in shared for unit in owners}
    chosen = [name for name in chosen if name not in apart]
    for unit, parameters in unit_parameters(module, chosen).items():
        dtypes = {str(each.dtype).removeprefix("torch.") for each in parameters.values() if each.requires_grad}
        if len(dtypes) > 1:
            raise UsageError(
                f"{_text(unit)} has trained parameters of {' and '.join(sorted(dtypes))}, and the gradients of a unit "
                "are summed as one; give modules of another type a unit of their own, units=[...], or use mirrored"
            )
    return tuple(chosen)


def unit_parameters(module: nn.Module, units: Sequence[str]) -> dict[str, dict[str, nn.Parameter]]:
    """Returns the parameters of each unit by name, and under "" those of the rest; tied ones once."""
    found: dict[str, dict[str, nn.Parameter]] = {unit: {} for unit in (*units, "")}
    for name, parameter in module.named_parameters():
        found[_unit_of(name, units)][name] = parameter
    return found


def written(parameter: str) -> UsageError:
    """Returns the error of a forward that writes to a parameter, of which each rank has a part."""
    return UsageError(
        f"forward changed the parameter {parameter!r}, and hr.FullySharded(...) releases it afterwards, so that the "
        "change would be lost; keep what forward changes in a buffer, or use hr.Mirrored(...)"
    )


_MOST_VALUES = 10_000


def refuse_hooks(names: Sequence[str]) -> None:
    """Raises UsageError for parameters that have hooks, which would see no gradient of a whole parameter."""
    if names:
        raise UsageError(
            f"{', '.join(map(repr, names)):.200}: fully_sharded divides the parameter among the workers, so that its "
            "hooks (register_hook, register_post_accumulate_grad_hook) would see no gradient; use mirrored or "
            "central_storage, or change the loss or Options(clip_norm=...)"
        )


def refuse_cast(module: nn.Module) -> None:
    """Raises UsageError for what may be other numbers packed into floats, where units are gathered in bfloat16."""
    for key, name in beside_frozen(module).items():
        if (parameter := module.get_parameter(name)).is_floating_point() and parameter.dtype != torch.bfloat16:
            raise UsageError(
                f"{name!r} is frozen, of {parameter.dtype}, and has {key!r} beside it: if it is packed, "
                "param_dtype='bf16' would round what is in it; load the base with bnb_4bit_quant_storage=torch.uint8 "
                "or torch.bfloat16, or leave param_dtype out"
            )


def refuse_kept(module: nn.Module) -> None:
    """Raises UsageError for lists and dicts that hold a parameter, which would stay the one before it is divided."""
    plain = vars(nn.Module())
    waiting: list[tuple[str, Any]] = [
        (f"{name}.{key}".lstrip("."), value)
        for name, part in module.named_modules()
        # Recurrent layers of torch renew the list that they hold.
        if not isinstance(part, nn.RNNBase)
        for key, value in vars(part).items()
        if key not in plain
    ]
    own, paths = {id(parameter) for parameter in module.parameters()}, []
    for path, value in waiting:
        if id(value) in own:
            paths.append(path)
        elif isinstance(value, dict | list | tuple) and len(waiting) < _MOST_VALUES:
            items = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [(f"{path}[{key!r}]", each) for key, each in items]
    if paths:
        raise UsageError(
            f"{', '.join(map(repr, paths)):.200}: this attribute holds a parameter beside its registered name, and "
            "fully_sharded divides the registered one, so that forward would compute with an old one; use the "
            "registered name in forward, or mirrored"
        )


def is_kept_whole(parameter: Tensor) -> bool:
    """Tells whether every rank holds a parameter: it has no rows to divide."""
    return parameter.dim() == 0 or parameter.numel() == 0


def _unit_of(name: str, units: Sequence[str]) -> str:
    return next((unit for unit in units if name.startswith(f"{unit}.")), "")


def _matching(named: Mapping[str, nn.Module], patterns: Sequence[str]) -> Iterator[str]:
    matched: list[str] = []
    for pattern in patterns:
        those = [name for name in named if fnmatch.fnmatchcase(name, pattern)]
        held = [name for name in those if any(True for _ in named[name].parameters())]
        if not held:
            what = f"only {_listed(those)}, without parameters" if those else "no module of the model"
            raise UsageError(f"the pattern {pattern!r} of units matches {what}; there are {_listed(list(named))}")
        matched += held
    for name in named:
        if name not in matched or any(name.startswith(f"{other}.") for other in matched):
            continue
        if isinstance(named[name], nn.ModuleList | nn.ModuleDict):
            raise UsageError(
                f"units: {name!r} is a {type(named[name]).__name__}, which is never called, so nothing would gather "
                f"it; name its entries, '{name}.*'"
            )
        yield name


def _shared(module: nn.Module, units: Sequence[str]) -> list[tuple[str, str, str]]:
    """Returns the parameters that two units have, with both; "" is the rest of the model."""
    owners: dict[int, tuple[str, str]] = {}
    shared = []
    for name, parameter in module.named_parameters(remove_duplicate=False):
        unit = _unit_of(name, units)
        first, owner = owners.setdefault(id(parameter), (name, unit))
        if owner != unit:
            shared.append((first, owner, unit))
    return shared


def _text(unit: str) -> str:
    return f"the unit {unit!r}" if unit else "the rest of the model"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:_SHOWN])) + " ..." * (len(names) > _SHOWN)
