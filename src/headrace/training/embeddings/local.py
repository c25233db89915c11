"""Rows that are in this process, and how the file of a trained model has them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from headrace import internals
from headrace.spec.events import TableStats
from headrace.training.embeddings.layer import RowSource, SparseEmbedding, sparse_layers
from headrace.training.embeddings.pieces import RowBlock
from headrace.training.embeddings.table import EmbeddingTable

_MOST_WHOLE_BYTES = 1 << 30


class LocalRows(RowSource):
    """Rows of a table in this process."""

    def __init__(self, table: EmbeddingTable) -> None:
        self.table = table

    def pull(self, ids: Tensor) -> Tensor:
        return self.table.read(ids)

    def stats(self) -> TableStats:
        return self.table.stats()

    def blocks(self) -> Iterator[RowBlock]:
        if len(self.table):
            yield self.table.block(0, len(self.table))


def load_rows(layers: Iterable[SparseEmbedding], saved: Mapping[str, Tensor]) -> None:
    """Gives each layer a table with the rows that `rows_of_layers` returned."""
    for layer in layers:
        table = EmbeddingTable(layer.spec)
        if (ids := saved.get(f"rows/{layer.spec.name}/ids")) is not None:
            table.load(RowBlock(ids, saved[f"rows/{layer.spec.name}/values"], {}))
        layer.source = LocalRows(table)


def with_layers_of_torch(module: nn.Module, named: Iterable[str] = ()) -> nn.Module:
    """Puts torch's layers, with all their rows, in the place of sparse ones; returns the model, or what replaces it.

    Gradients of layers that were made sparse by their names, `named`, are dense, as the job's model has them. Tables of
    more than 1 GiB together stay as they are, as do those with limited rows.
    """
    layers = [each for each in sparse_layers(module) if each.spec.limit is None]
    if sum(each.spec.rows * each.spec.row_bytes for each in layers) > _MOST_WHOLE_BYTES:
        return module
    made = {id(each): _layer_of_torch(each) for each in layers}
    for layer in layers:
        if any(fnmatchcase(layer.spec.name, pattern) for pattern in named):
            made[id(layer)].sparse = False
    for part in list(module.modules()):
        for key, child in internals.children(part).items():
            internals.children(part)[key] = made.get(id(child), child)
    return made.get(id(module), module)


def _layer_of_torch(layer: SparseEmbedding) -> nn.Embedding | nn.EmbeddingBag:
    rows, width, padding = layer.num_embeddings, layer.embedding_dim, layer.padding_idx
    weight = layer.source.pull(torch.arange(rows))
    made: nn.Embedding | nn.EmbeddingBag
    if layer.bag is None:
        made = nn.Embedding(rows, width, padding, sparse=True, _weight=weight)
    else:
        # torch has no sparse gradients of the largest values of a bag.
        sparse, last = layer.bag.mode != "max", layer.bag.include_last_offset
        made = nn.EmbeddingBag(
            rows,
            width,
            mode=layer.bag.mode,
            sparse=sparse,
            include_last_offset=last,
            padding_idx=padding,
            _weight=weight,
        )
    made.weight.requires_grad_(layer.spec.trainable)
    return made.train(layer.training)
