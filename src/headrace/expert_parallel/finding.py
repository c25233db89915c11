"""Which modules of a model are experts, and which ranks hold them."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from headrace.errors import UsageError
from headrace.expert_parallel.placement import expert_bounds
from headrace.spec.compute import ExpertSpec

AUTO = "auto"
_INSTEAD = "use mirrored, or fully_sharded, which divides every parameter"


@dataclass(frozen=True)
class ExpertSet:
    """The experts of one layer: rows of stacked parameters, or the entries of a list.

    Attributes:
        name: of the module that holds them.
        caller: name of the module whose forward calls the entries; the same as `name` for stacked ones.
        stacked: whether each parameter has a row of all experts, and forward takes tokens, the numbers of their experts
            and the weights of these.
    """

    name: str
    caller: str
    module: nn.Module
    count: int
    stacked: bool

    def parameters(self) -> Iterator[tuple[str, ExpertSpec]]:
        """Yields the names of all parameters, and whose they are."""
        for name, _ in self.module.named_parameters():
            entry = name.partition(".")[0]
            index = -1 if self.stacked else [key for key, _ in self.module.named_children()].index(entry)
            yield f"{self.name}.{name}" if self.name else name, ExpertSpec(self.count, index)


def find_experts(module: nn.Module, patterns: str | Sequence[str] = AUTO) -> tuple[ExpertSet, ...]:
    """Returns the experts of each layer, in the model's order.

    Raises:
        UsageError: there are none, or they cannot be divided; by name.
    """
    found: list[ExpertSet] = []
    for name, part in module.named_modules():
        chosen = _is_named(name, part) if isinstance(patterns, str) else _fits(name, patterns)
        if not chosen or any(name.startswith(f"{other.name}.") for other in found):
            continue
        if (made := _set_of(module, name, part)) is not None:
            found.append(made)
        elif not isinstance(patterns, str):
            raise UsageError(
                f"experts={list(patterns)!r} matches {name!r} ({type(part).__name__}), which is neither a ModuleList "
                "or ModuleDict of experts, nor a module with num_experts, whose parameters all have so many rows and "
                f"whose forward takes tokens, experts and weights; name such a module, or {_INSTEAD}"
            )
    if not found:
        looked = "" if isinstance(patterns, str) else f" that fit {list(patterns)!r}"
        raise UsageError(
            f"{type(module).__name__} has no experts{looked}: expert_parallel looks for a ModuleList named 'experts', "
            "and for modules of stacked experts as transformers has them; name the lists, experts=['blocks.*.mixture'],"
            f" or {_INSTEAD}"
        )
    _refuse_shared(module, found)
    return tuple(found)


def experts_of(found: Sequence[ExpertSet]) -> Mapping[str, ExpertSpec]:
    """Returns the parameters of experts by name."""
    return {name: spec for each in found for name, spec in each.parameters()}


def require_enough(counts: Mapping[str, int], workers: int) -> None:
    """Raises UsageError if a worker would have no expert of a layer; `counts` are by parameter."""
    name, fewest = min(counts.items(), key=lambda each: each[1], default=("", workers))
    if fewest < workers:
        raise UsageError(
            f"{name!r} is of {fewest} experts, of which each of {workers} workers of expert_parallel must hold one at "
            f"least; use {fewest} workers or fewer"
        )


def bounds_of(count: int, world: int) -> list[tuple[int, int]]:
    """Returns `[start, stop)` of the experts of each rank."""
    return [expert_bounds(count, rank, world) for rank in range(world)]


def _is_named(name: str, part: nn.Module) -> bool:
    return "expert" in name.rpartition(".")[2].lower() or _is_stacked(part)


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return bool(name) and any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _set_of(module: nn.Module, name: str, part: nn.Module) -> ExpertSet | None:
    if _is_stacked(part):
        return ExpertSet(name, name, part, part.get_parameter(next(iter(dict(part.named_parameters())))).shape[0], True)
    if not isinstance(part, nn.ModuleList | nn.ModuleDict):
        return None
    entries = list(part.children())
    if len(entries) < 2 or not all(any(True for _ in each.parameters()) for each in entries):
        return None
    own = type(part).forward not in (nn.ModuleList.forward, nn.ModuleDict.forward)
    return ExpertSet(name, name if own else name.rpartition(".")[0], part, len(entries), False)


def _is_stacked(part: nn.Module) -> bool:
    count = getattr(part, "num_experts", None)
    every = list(part.parameters())
    if not isinstance(count, int) or not every or any(True for child in part.children() for _ in child.parameters()):
        return False
    takes = list(inspect.signature(type(part).forward).parameters)[1:]
    return all(each.dim() and len(each) == count for each in every) and len(takes) == 3


def _refuse_shared(module: nn.Module, found: Sequence[ExpertSet]) -> None:
    """Refuses what several experts have, or an expert and the rest; and buffers of experts."""
    owners: dict[int, tuple[str, str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner = _owner_of(name, found)
        first, other = owners.setdefault(id(parameter), (name, owner))
        if owner != other:
            raise UsageError(
                f"the parameters {first!r} and {name!r} are one, and expert_parallel gives each expert to one worker; "
                f"{_INSTEAD}"
            )
    for each in found:
        for name, _ in each.module.named_buffers():
            raise UsageError(
                f"{each.name}.{name} is a buffer of an expert, whose values would be those of one worker's; keep it "
                f"outside of the experts, or {_INSTEAD}"
            )


def _owner_of(name: str, found: Sequence[ExpertSet]) -> str:
    """Names the expert that a parameter belongs to; "" for none."""
    for each in found:
        if name.startswith(f"{each.name}."):
            entry = name[len(each.name) + 1 :].partition(".")[0]
            return each.name if each.stacked else f"{each.name}.{entry}"
    return ""
