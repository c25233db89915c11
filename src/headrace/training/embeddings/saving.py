"""The rows of a trained model's tables, as tensors in its file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from headrace.training.embeddings.layer import LocalRows, SparseEmbedding
from headrace.training.embeddings.table import EmbeddingTable, RowBlock


def rows_of_layers(layers: Iterable[SparseEmbedding]) -> dict[str, Tensor]:
    """Returns the changed rows of each layer's table, by name."""
    found: dict[str, Tensor] = {}
    for layer in layers:
        blocks = list(layer.source.blocks())
        if blocks:
            found[f"rows/{layer.spec.name}/ids"] = torch.cat([block.ids for block in blocks])
            found[f"rows/{layer.spec.name}/values"] = torch.cat([block.values for block in blocks])
    return found


def load_rows(layers: Iterable[SparseEmbedding], saved: Mapping[str, Tensor]) -> None:
    """Gives each layer a table with the rows that `rows_of_layers` returned."""
    for layer in layers:
        table = EmbeddingTable(layer.spec)
        if (ids := saved.get(f"rows/{layer.spec.name}/ids")) is not None:
            table.load(RowBlock(ids, saved[f"rows/{layer.spec.name}/values"], {}))
        layer.source = LocalRows(table)
