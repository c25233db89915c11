"""Makes a model with `nn.Embedding(..., sparse=True)` one whose rows come from tables, without building a whole one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from headrace import internals
from headrace.errors import JobError
from headrace.spec.embedding import FLOAT_BYTES, RowInit, TableSpec
from headrace.spec.model import ModelSpec
from headrace.training.embeddings.layer import LAYERS, BagOptions, SparseEmbedding, sparse_layers
from headrace.training.embeddings.local import LocalRows
from headrace.training.embeddings.pieces import RowBlock
from headrace.training.embeddings.table import EmbeddingTable
from headrace.training.embeddings.updater import RowUpdater
from headrace.training.embeddings.vocabulary.limit import limit_of

_Layer = nn.Embedding | nn.EmbeddingBag


def with_tables(module: nn.Module, seed: int, init_of: Callable[[Tensor], RowInit | str | None]) -> nn.Module:
    """Replaces the layers with `sparse=True` in a model, in place; returns the model, or what replaces it.

    A layer whose weight has memory begins with it; for others `init_of` returns the initialiser, if it is known.

    Raises:
        JobError: a layer has an option, an initialiser or a second user that its rows alone cannot have.
    """
    layers = {name: each for name, each in module.named_modules() if type(each) in LAYERS and each.sparse}
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
        made[id(layer)] = _made(name, layer, seed, init_of)
    for part in list(module.modules()):
        for key, child in internals.children(part).items():
            if id(child) in made:
                internals.children(part)[key] = made[id(child)]
    return made.get(id(module), module)


def _made(name: str, layer: _Layer, seed: int, init_of: Callable[[Tensor], RowInit | str | None]) -> SparseEmbedding:
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
    init = init_of(weight) if weight.is_meta else RowInit()
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
