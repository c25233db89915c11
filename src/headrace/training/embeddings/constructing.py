"""What is seen and changed of embeddings while the user's function builds the model.

A layer with `sparse=True` gets a weight on the meta device, which has no memory. What initialises the weight is
recorded, and is later done row by row. A layer may also be made sparse by its name, in a model that does not say so.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from headrace import internals
from headrace.errors import UsageError
from headrace.internals import TorchDispatchMode
from headrace.modules import copy_module, memory_of
from headrace.spec.embedding import RowInit
from headrace.training.embeddings.layer import LAYERS

_PATCHING = threading.RLock()
_COPIES = ("_to_copy", "clone")
"""Operations whose result has the numbers of what they take: another type, a copy."""


class Initialised:
    """What the weights of deferred layers begin with, by the memory that they would have."""

    def __init__(self) -> None:
        # With the tensor, so that no other one gets its place.
        self._found: dict[int, tuple[Tensor, RowInit | str]] = {}

    def note(self, weight: Tensor, init: RowInit | str) -> None:
        """Notes what a weight begins with from now on."""
        self._found[memory_of(weight)] = weight.detach(), init

    def of(self, weight: Tensor) -> RowInit | str | None:
        """Returns what a weight begins with; None where that is not known."""
        return self._found.get(memory_of(weight), (weight, None))[1]


class _Initialisers(TorchDispatchMode):
    """Records what is written to the weights of deferred layers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = Initialised()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        target, schema = args[0] if args else None, internals.schema(func)
        if not isinstance(target, Tensor) or not target.is_meta:
            return result
        recorded = _recorded(func, target, args[1:]) if schema.is_mutable else None
        if recorded is not None:
            self.found.note(target, recorded)
        elif schema.name.removeprefix("aten::") in _COPIES and (known := self.found.of(target)) is not None:
            self.found.note(result, known)
        return result


def _recorded(func: Any, target: Tensor, args: tuple[Any, ...]) -> RowInit | str | None:
    name = internals.schema(func).name.removeprefix("aten::")
    if target.numel() * target.element_size() != target.untyped_storage().nbytes():
        # The row of the padding, which nn.Embedding sets to zero itself.
        return None if name in ("fill_", "zero_") else f"{name} on a part of it"
    numbers = [float(each) for each in args if isinstance(each, int | float)]
    if name in ("normal_", "uniform_"):
        first, second = [*numbers, *[0.0, 1.0][len(numbers) :]]
        return RowInit(name.removesuffix("_"), first, second)
    if name == "zero_":
        return RowInit("constant", 0.0)
    if name == "fill_" and numbers:
        return RowInit("constant", numbers[0])
    return str(name)


@contextmanager
def deferred_tables() -> Iterator[Callable[[nn.Module, int], nn.Module]]:
    """Builds models with deferred tables in its body; yields the function that then puts these into a model.

    That function takes the model and the job's seed.
    """
    owner = threading.get_ident()
    initialisers = _Initialisers()
    with _PATCHING, ExitStack() as recording:
        recorded = False

        def defer(layer: nn.Module, given: dict[str, Any]) -> None:
            nonlocal recorded
            without = given.get("sparse") and given.get("_weight") is None
            if without and threading.get_ident() == owner:
                given["device"] = "meta"
                if not recorded:
                    # Only now: it costs time in every operation.
                    recorded = True
                    recording.enter_context(initialisers)

        recording.enter_context(constructors(defer))
        recording.enter_context(_without_memory(initialisers.found, owner))
        yield lambda module, seed: put_tables(module, seed, initialisers.found)


@contextmanager
def _without_memory(found: Initialised, owner: int) -> Iterator[None]:
    """Records the initialisers that do nothing for a weight without memory, so that no operation shows them."""

    def truncated(mean: float, std: float, low: float, high: float, generator: object = None) -> RowInit:
        return RowInit("truncated", float(mean), float(std), (float(low), float(high)))

    silent: dict[str, Callable[..., RowInit | str]] = {
        internals.truncated_normal.name: truncated,
        "orthogonal_": lambda *args, **kwargs: "orthogonal_",
        "sparse_": lambda *args, **kwargs: "sparse_",
    }
    internals.truncated_normal(nn.init)
    originals = {name: getattr(nn.init, name) for name in silent}

    def recording(name: str) -> Callable[..., Tensor]:
        def initialise(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if tensor.is_meta and threading.get_ident() == owner:
                found.note(tensor, silent[name](*args, **kwargs))
                return tensor
            done: Tensor = originals[name](tensor, *args, **kwargs)
            return done

        return initialise

    for name in silent:
        setattr(nn.init, name, recording(name))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(nn.init, name, original)


def put_tables(module: nn.Module, seed: int, found: Initialised | None = None) -> nn.Module:
    """Puts tables in the place of the sparse layers of a model; see `with_tables`."""
    if not any(type(each) in LAYERS for each in module.modules()):
        return module
    # Imported for those alone whose models have embeddings.
    from headrace.training.embeddings.building import with_tables

    return with_tables(module, seed, found.of if found else lambda weight: None)


@contextmanager
def constructors(change: Callable[[nn.Module, dict[str, Any]], object]) -> Iterator[None]:
    """Lets `change` see and change the arguments of every embedding that is made in its body."""
    originals: dict[type[nn.Module], Callable[..., None]] = {kind: kind.__init__ for kind in LAYERS}

    def patched(kind: type[nn.Module]) -> Callable[..., None]:
        signature = inspect.signature(originals[kind])

        @functools.wraps(originals[kind])
        def build(layer: nn.Module, *args: Any, **kwargs: Any) -> None:
            given = signature.bind(layer, *args, **kwargs).arguments
            if type(layer) in LAYERS:
                change(layer, given)
            del given["self"]
            originals[kind](layer, **given)

        return build

    for kind in LAYERS:
        kind.__init__ = patched(kind)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for each, original in originals.items():
            each.__init__ = original  # type: ignore[method-assign]


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

        with constructors(notes):
            first = self.build()
        torch.set_rng_state(state)
        chosen = {made.index(id(layer)) for layer in named_layers(first, self.patterns)}
        count = iter(range(len(made)))

        def changes(layer: nn.Module, given: dict[str, Any]) -> None:
            if next(count, -1) in chosen:
                given["sparse"] = True

        with constructors(changes):
            return self.build()


def named_layers(module: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """Returns the embeddings with these names; raises UsageError for a pattern that no embedding has."""
    known = {name: each for name, each in module.named_modules() if type(each) in LAYERS}
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
        assert isinstance(layer, LAYERS)
        layer.sparse = True
    return model
