"""Which blocks of a model run again in backward, and how they are made to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
from torch import nn

from headrace.errors import UnknownName, UsageError
from headrace.spec.options import FULL, SELECTIVE
from headrace.training.recompute.forward import RecomputedForward


def recompute(module: nn.Module, choice: str | Sequence[str], kind: str | None = None) -> tuple[str, ...]:
    """Makes blocks of a module run again in backward, in place; returns their names.

    `kind` says how those that patterns fit do, "full" if it is None.

    Raises:
        UsageError: a pattern fits no module, there are no blocks, or one cannot be run again; by name.
    """
    with recomputing(module, choice, kind) as names:
        return names


@contextmanager
def recomputing(module: nn.Module, choice: str | Sequence[str], kind: str | None = None) -> Iterator[tuple[str, ...]]:
    """Does so after its body, which may rewrite the module, but for the hooks that there are before."""
    _refuse_own_checkpoints(module)
    parts = {name: module.get_submodule(name) for name in find_blocks(module, choice)}
    blocks = [RecomputedForward(name, part, SELECTIVE in (choice, kind)) for name, part in parts.items()]
    yield tuple(parts)
    for block in blocks:
        block.install()


def find_blocks(module: nn.Module, choice: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the names of the modules that run again: blocks, or the outermost modules that patterns fit."""
    named = {name: part for name, part in module.named_modules() if name}
    if choice in (FULL, SELECTIVE):
        chosen = [name for name in entries_of_containers(module) if any(True for _ in named[name].parameters())]
        if not chosen:
            raise UsageError(
                f"recompute={choice!r} runs blocks again, the entries of Sequential, ModuleList and ModuleDict, and "
                f"{type(module).__name__} has none with parameters; give a pattern of modules' names, recompute='*'"
            )
    else:
        chosen = list(_fitting(named, [choice] if isinstance(choice, str) else choice))
    for name in chosen:
        if any(isinstance(part, torch.jit.ScriptModule) for part in named[name].modules()):
            raise UsageError(
                f"recompute: {name!r} is in TorchScript, which cannot be run again in backward; use the module that it "
                "was made from, or patterns that leave it out"
            )
    return tuple(chosen)


def entries_of_containers(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yields the names of blocks: the entries of the outermost Sequentials, ModuleLists and ModuleDicts."""
    entries = isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)
    for name, child in module.named_children():
        # One without a forward of its own is never called.
        if entries and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield prefix + name
        else:
            yield from entries_of_containers(child, f"{prefix}{name}.")


def _fitting(named: dict[str, nn.Module], patterns: Sequence[str]) -> Iterator[str]:
    fitting: list[str] = []
    for pattern in patterns:
        found = [name for name in named if fnmatchcase(name, pattern)]
        if not found:
            raise UnknownName("module that fits", pattern, named, "recompute's model")
        fitting += found
    called = [name for name in fitting if not isinstance(named[name], nn.ModuleList | nn.ModuleDict)]
    if not called:
        raise UsageError(
            f"recompute: {fitting[0]!r} is a {type(named[fitting[0]]).__name__}, which is never called; name its "
            f"entries, '{fitting[0]}.*'"
        )
    for name in named:
        if name in called and not any(name.startswith(f"{other}.") for other in called):
            yield name


def _refuse_own_checkpoints(module: nn.Module) -> None:
    """Raises UsageError for a model of transformers that recomputes by itself."""
    for name, part in module.named_modules():
        if vars(part).get("gradient_checkpointing") is True:
            raise UsageError(
                f"recompute: {name or 'the model'!r} recomputes by itself (gradient_checkpointing is True), and would "
                "twice; leave recompute out, or call model.gradient_checkpointing_disable()"
            )
