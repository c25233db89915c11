"""Layers that are made sparse by their names, in a model that does not say `sparse=True` itself."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from headrace.errors import UsageError
from headrace.modules import copy_module

_LAYERS = (nn.Embedding, nn.EmbeddingBag)


@dataclass(frozen=True)
class NamedSparse:
    """Builds a model in which the embeddings with some names are sparse.

    The model is built twice: first to learn which layers get these names, then with them sparse. Both times the user's
    function must make its embeddings in the same order.

    Attributes:
        build: the user's function.
        patterns: names as in `named_modules()`, where `*` stands for anything.
    """

    build: Callable[[], nn.Module]
    patterns: tuple[str, ...]

    def __call__(self) -> nn.Module:
        made: list[int] = []
        state = torch.get_rng_state()

        def notes(layer: nn.Module, given: dict[str, Any]) -> None:
            made.append(id(layer))
            given["device"] = "meta"

        with _constructors(notes):
            first = self.build()
        torch.set_rng_state(state)
        chosen = {made.index(id(layer)) for layer in named_layers(first, self.patterns)}
        count = iter(range(len(made)))

        def changes(layer: nn.Module, given: dict[str, Any]) -> None:
            if next(count, -1) in chosen:
                given["sparse"] = True

        with _constructors(changes):
            return self.build()


def named_layers(module: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """Returns the embeddings with these names; raises UsageError for a pattern that no embedding has."""
    known = {name: each for name, each in module.named_modules() if type(each) in _LAYERS}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise UsageError(
                f"sparse={pattern!r} is the name of no nn.Embedding or nn.EmbeddingBag of the model; it has "
                f"{', '.join(map(repr, known)) or 'none'}"
            )
    return [each for name, each in known.items() if any(fnmatchcase(name, pattern) for pattern in patterns)]


def made_sparse(model: Callable[[], nn.Module] | nn.Module, patterns: Sequence[str]) -> Any:
    """Returns a job's model with the named embeddings sparse; of a module a copy."""
    if not patterns:
        return model
    if not isinstance(model, nn.Module):
        return NamedSparse(model, tuple(patterns))
    model = copy_module(model)
    for layer in named_layers(model, patterns):
        assert isinstance(layer, _LAYERS)
        layer.sparse = True
    return model


@contextmanager
def _constructors(change: Callable[[nn.Module, dict[str, Any]], object]) -> Iterator[None]:
    """Lets `change` see and change the arguments of every embedding that is made in its body."""
    originals: dict[type[nn.Module], Callable[..., None]] = {kind: kind.__init__ for kind in _LAYERS}

    def patched(kind: type[nn.Module]) -> Callable[..., None]:
        signature = inspect.signature(originals[kind])

        @functools.wraps(originals[kind])
        def build(layer: nn.Module, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(layer, *args, **kwargs).arguments
            if type(layer) in _LAYERS:
                change(layer, given)
            del given["self"]
            originals[kind](layer, **given)

        return build

    for kind in _LAYERS:
        kind.__init__ = patched(kind)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for each, original in originals.items():
            each.__init__ = original  # type: ignore[method-assign]
