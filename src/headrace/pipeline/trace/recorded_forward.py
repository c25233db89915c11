"""A recorded forward, and how its parts are run again."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn


class Untraceable(Exception):
    """Something in forward cannot be recorded."""

    def __init__(self, owner: nn.Module, reason: str) -> None:
        super().__init__(reason)
        self.owner = owner
        self.reason = reason


@dataclass
class Recording:
    """A forward.

    Attributes:
        graph: what is done, in order. A `get_attr` reads a tensor or `training`; the output is a list of leaves.
        guards: nodes whose values forward has asked for, and what they must be in every run.
        gradless: nodes under `torch.no_grad`.
        writes: (writer, node whose value it writes to).
        written: (writer, name of the buffer that it writes to).
        constants: tensors that forward has created, by the `get_attr` that reads them.
        inputs: placeholders by the place of a tensor in the arguments of forward, "images" or "batch['text'][0]".
        settled: what else there is in the arguments, by its place.
        output: the tree that forward returns, with indices into the leaves in their place.
        recomputes: whether it has used `torch.utils.checkpoint`, which is left out.
    """

    module: nn.Module
    graph: fx.Graph = field(default_factory=fx.Graph)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    guards: dict[fx.Node, Any] = field(default_factory=dict)
    owners: dict[fx.Node, nn.Module] = field(default_factory=dict)
    gradless: set[fx.Node] = field(default_factory=set)
    writes: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)
    written: list[tuple[fx.Node, str]] = field(default_factory=list)
    constants: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, str] = field(default_factory=dict)
    settled: dict[str, Any] = field(default_factory=dict)
    output: Any = None
    recomputes: bool = False

    def fetch(self, path: str) -> Any:
        """Returns what a `get_attr` reads."""
        if path in self.constants:
            return self.constants[path]
        parent, _, name = path.rpartition(".")
        return getattr(self.module.get_submodule(parent), name)


def execute(recording: Recording, node: fx.Node, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs a node that is neither a placeholder nor the output."""
    target: Any = node.target
    with torch.no_grad() if node in recording.gradless else nullcontext():
        if node.op == "call_module":
            return recording.module.get_submodule(target)(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        if node.op == "call_function":
            return target(*args, **kwargs)
        return recording.fetch(target)


def answer(value: Any) -> Any:
    """Returns what a guard holds of a value: the length of what is taken apart, else the value itself."""
    return len(value) if isinstance(value, tuple | list | dict) and not isinstance(value, torch.Size) else value
