"""From a model with `nn.Embedding(..., sparse=True)` to one whose rows come from tables, without building a table once.

While the user's function builds the model, such a layer gets a weight on the meta device, which has no memory. What
initialises the weight is recorded, and is later done row by row.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headrace import internals
from headrace.errors import JobError
from headrace.internals import TorchDispatchMode
from headrace.modules import memory_of
from headrace.spec.embedding import FLOAT_BYTES, RowInit, TableSpec
from headrace.spec.model import ModelSpec
from headrace.training.embeddings.layer import BagOptions, SparseEmbedding, sparse_layers
from headrace.training.embeddings.local import LocalRows
from headrace.training.embeddings.table import EmbeddingTable, RowBlock
from headrace.training.embeddings.updater import RowUpdater
from headrace.training.embeddings.vocabulary.limit import limit_of

_LAYERS = (nn.Embedding, nn.EmbeddingBag)
_aten = torch.ops.aten
_PATCHING = threading.RLock()
_Layer = nn.Embedding | nn.EmbeddingBag


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
    originals: dict[type[nn.Module], Callable[..., None]] = {kind: kind.__init__ for kind in _LAYERS}
    with _PATCHING, ExitStack() as recording:
        recorded = False

        def patched(kind: type[nn.Module]) -> Callable[..., None]:
            original = originals[kind]
            signature = inspect.signature(original)

            @functools.wraps(original)
            def build(layer: nn.Module, *args: Any, **kwargs: Any) -> None:
                nonlocal recorded
                given = signature.bind(layer, *args, **kwargs).arguments
                without = type(layer) in _LAYERS and given.get("sparse") and given.get("_weight") is None
                if without and threading.get_ident() == owner:
                    given["device"] = "meta"
                    if not recorded:
                        # Only now: it costs time in every operation.
                        recorded = True
                        recording.enter_context(initialisers)
                del given["self"]
                original(layer, **given)

            return build

        for kind in _LAYERS:
            kind.__init__ = patched(kind)  # type: ignore[method-assign]
        recording.enter_context(_without_memory(initialisers.found, owner))
        try:
            yield lambda module, seed: with_tables(module, seed, initialisers.found)
        finally:
            for each, original in originals.items():
                each.__init__ = original  # type: ignore[method-assign]


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


def with_tables(module: nn.Module, seed: int, found: Initialised | None = None) -> nn.Module:
    """Replaces the layers with `sparse=True` in a model, in place; returns the model, or what replaces it.

    A layer whose weight has memory begins with this weight; for others `found` has the initialisers.

    Raises:
        JobError: a layer has an option, an initialiser or a second user that its rows alone cannot have.
    """
    layers = {name: each for name, each in module.named_modules() if type(each) in _LAYERS and each.sparse}
    for name, each in module.named_modules():
        if limit_of(each) is not None and name not in layers:
            raise JobError(f"the embedding {name!r} has limited rows and is not sparse; make it with sparse=True")
    users: dict[int, list[str]] = {}
    for name, part in module.named_modules():
        for key, parameter in internals.parameters(part).items():
            if parameter is not None:
                users.setdefault(id(parameter), []).append(f"{name}.{key}".lstrip("."))
    made: dict[int, nn.Module] = {}
    for name, layer in layers.items():
        assert isinstance(layer, _Layer)
        tied = users[id(layer.weight)]
        if len(tied) > 1:
            raise JobError(
                f"the weight of the sparse embedding {name!r} is tied: it is {' and '.join(map(repr, tied))}, and the "
                "other needs all rows in every step; untie them, or use sparse=False"
            )
        made[id(layer)] = _made(name, layer, seed, found or Initialised())
    for part in list(module.modules()):
        for key, child in internals.children(part).items():
            if id(child) in made:
                internals.children(part)[key] = made[id(child)]
    return made.get(id(module), module)


def _made(name: str, layer: _Layer, seed: int, found: Initialised) -> SparseEmbedding:
    for option in ("max_norm", "scale_grad_by_freq"):
        if getattr(layer, option):
            raise JobError(
                f"the sparse embedding {name!r} has {option}={getattr(layer, option)}, which is not done row by row; "
                "leave it out, or use sparse=False"
            )
    weight = layer.weight
    dtype = str(weight.dtype).removeprefix("torch.")
    if dtype not in FLOAT_BYTES:
        raise JobError(f"the sparse embedding {name!r} is of {dtype}; use one of {', '.join(FLOAT_BYTES)}")
    init = found.of(weight) if weight.is_meta else RowInit()
    if init is None or isinstance(init, str):
        init = init or "numbers of its own"
        raise JobError(
            f"the sparse embedding {name!r} is initialised by {init}, which cannot be done row by row; use "
            "nn.init.normal_, trunc_normal_, uniform_, constant_ or what is made of these (xavier_uniform_)"
        )
    rows, width = weight.shape
    padding = -1 if layer.padding_idx is None else int(layer.padding_idx)
    limit = limit_of(layer)
    spec = TableSpec(name, rows, width, dtype, init, seed, padding, weight.requires_grad, limit=limit)
    table = EmbeddingTable(spec)
    if not weight.is_meta:
        if limit is not None and rows > limit.rows:
            raise JobError(
                f"the sparse embedding {name!r} comes with {rows:,} rows of its own, and max_rows is {limit.rows:,}; "
                "give the job a function that builds the model, or raise max_rows"
            )
        table.load(RowBlock(torch.arange(rows), weight.detach().cpu(), {}))
    bag = BagOptions(layer.mode, bool(layer.include_last_offset)) if isinstance(layer, nn.EmbeddingBag) else None
    replacement = SparseEmbedding(spec, LocalRows(table), bag)
    replacement.train(layer.training)
    return replacement


def tables_of(module: nn.Module, updater: Callable[[ModelSpec], RowUpdater], model: ModelSpec) -> ModelSpec:
    """Returns a model's specification with its tables, and with the state that their optimizer keeps."""
    specs = tuple(layer.spec for layer in sparse_layers(module))
    if not specs:
        return model
    model = replace(model, tables=specs)
    rules = updater(model)
    widths = (sum(width for width, _ in rules.columns(spec).values()) for spec in specs)
    return replace(
        model, tables=tuple(replace(spec, state_width=each) for spec, each in zip(specs, widths, strict=True))
    )
