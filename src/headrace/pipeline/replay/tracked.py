"""Which modules' calls are the layers of a replayed model.

The blocks of repeated lists are, and elsewhere the outermost modules that hold none of these blocks. So forward of the
modules around them runs on every stage, and must not have a state of its own.

    model ─┬─ embeddings          tracked
           ├─ encoder ─ layer ─┬─ 0    tracked
           │                   └─ 1    tracked
           └─ head                tracked
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrize

from headrace import internals

FEWEST = 4
"""Layers with parameters, below which modules are looked into further."""

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_LOOKED_INTO = (*_CONTAINERS, nn.TransformerEncoder, nn.TransformerDecoder, nn.Transformer)
"""Of torch's own modules, those that only call others."""


def tracked_modules(root: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules whose calls are layers, by path; a module with several paths has the first."""
    blocks = {id(block) for module in root.modules() for block in _repeated(module)}
    whole: set[int] = set()
    found = _walk(root, blocks, whole)
    while sum(any(True for _ in module.parameters()) for module in found.values()) < FEWEST:
        divisible = [module for module in found.values() if _divisible(module)]
        if not divisible:
            break
        largest = max(divisible, key=lambda module: sum(each.numel() for each in module.parameters()))
        whole.add(id(largest))
        found = _walk(root, blocks, whole)
    return found


def is_whole(module: nn.Module, root: bool = False) -> bool:
    """Returns whether nothing inside a module can be a layer of its own."""
    # A compiled module's type is torch's own, too.
    return (
        isinstance(module, torch.jit.ScriptModule)
        or vars(module).get(internals.COMPILED_CALL) is not None
        or internals.module_hooks(module)
        or parametrize.is_parametrized(module)
        # Forward may change its state by all that it sees, so it runs where that is.
        or (not root and type(module).get_extra_state is not nn.Module.get_extra_state)
        or (type(module).__module__.startswith("torch.") and not isinstance(module, _LOOKED_INTO))
    )


def _repeated(module: nn.Module) -> list[nn.Module]:
    """Returns the blocks of a list of at least two of the same type, each with modules of its own."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return []
    blocks = [
        child for child in module if any(True for _ in child.children()) and any(True for _ in child.parameters())
    ]
    kinds = {type(block) for block in blocks} - set(_CONTAINERS)
    return blocks if len(blocks) > 1 and len(kinds) == 1 and kinds == {type(block) for block in blocks} else []


def _walk(root: nn.Module, blocks: set[int], opened: set[int]) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def walk(path: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            place = f"{path}.{name}" if path else name
            if id(child) in seen:
                continue
            seen.add(id(child))
            if not is_whole(child) and (
                id(child) in opened
                or isinstance(child, _CONTAINERS)
                or (id(child) not in blocks and any(id(part) in blocks for part in child.modules()))
            ):
                walk(place, child)
            else:
                found[place] = child

    walk("", root)
    return found


def _divisible(module: nn.Module) -> bool:
    own = any(True for _ in module.parameters(recurse=False))
    return not is_whole(module) and not own and any(any(True for _ in each.parameters()) for each in module.children())
