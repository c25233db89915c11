"""The rows of tables under the strategies whose workers each hold all rows that were changed.

worker 0   ids, gradient ─┐            ┌─► sum ──► the same update of its rows
                          ├─ gathered ─┤
worker 1   ids, gradient ─┘            └─► sum ──► the same update of its rows
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from headrace.collectives.base import ProcessGroup
from headrace.training.clipping import StepDecision, all_finite
from headrace.training.embeddings.layer import SparseEmbedding, combine
from headrace.training.embeddings.local import LocalRows
from headrace.training.embeddings.pieces import blocks_of, chunks, is_row_piece, to_pieces
from headrace.training.embeddings.table import EmbeddingTable
from headrace.training.embeddings.updater import RowUpdater
from headrace.training.exchange import Exchange
from headrace.training.optimizer import StatePiece
from headrace.trees import as_bytes

_TABLES = "tables"


class TablesExchange(Exchange):
    """Does what `inner` does, and updates the rows of tables in each worker alike.

    Args:
        layers: the sparse embeddings of this worker's model.
        group: the workers.
    """

    def __init__(
        self, inner: Exchange, layers: Sequence[SparseEmbedding], updater: RowUpdater, group: ProcessGroup
    ) -> None:
        self._inner, self.keeps_writes = inner, inner.keeps_writes
        self._layers = layers
        self._updater = updater
        self._group = group
        self._tables: list[EmbeddingTable] = []
        self._gradients: list[tuple[Tensor, Tensor]] = []
        for layer in layers:
            table = updater.table(layer.spec)
            assert isinstance(layer.source, LocalRows)
            given = layer.source.table
            table.load(given.block(0, len(given)))
            layer.source, layer.collects = LocalRows(table), True
            self._tables.append(table)

    def begin(self, round_: int) -> None:
        for layer in self._layers:
            layer.forget()
        self._inner.begin(round_)

    def synchronize(self, finite: bool | Tensor = True) -> StepDecision:
        own = [layer.take() for layer in self._layers]
        decision = self._inner.synchronize(bool(finite) and all_finite([gradient for _, gradient in own]))
        # Before the step is committed, as all that needs the other workers.
        self._gradients = [self._summed(*each) for each in own] if decision.apply else []
        return decision

    def update(self, round_: int) -> None:
        self._inner.update(round_)
        for table, (ids, gradient) in zip(self._tables, self._gradients, strict=True):
            if table.spec.trainable:
                self._updater.apply(table, ids, gradient, round_)
        self._updater.advance(round_)

    def skip(self, round_: int) -> None:
        self._inner.skip(round_)
        self._updater.advance(round_)

    def swap_weights(self, averaged: bool) -> None:
        self._inner.swap_weights(averaged)

    def state(self) -> Iterable[StatePiece]:
        rows = (
            to_pieces(table.spec.name, number, table.block(start, stop))
            for table in self._tables
            for number, (start, stop) in enumerate(chunks(len(table), table.row_bytes))
        )
        return chain(self._inner.state(), chain.from_iterable(rows) if self._group.rank == 0 else ())

    def own(self) -> tuple[StatePiece, ...]:
        return self._inner.own()

    def settings(self) -> dict[str, Any]:
        return {**self._inner.settings(), _TABLES: self._updater.settings()}

    def load(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None) -> None:
        every = list(pieces)
        for table in self._tables:
            # Without rows in the checkpoint, those that the model began with stay.
            blocks = list(blocks_of(every, table.spec.name))
            if blocks:
                table.clear()
            for block in blocks:
                table.load(block)
        if settings is not None and _TABLES in settings:
            self._updater.load(settings[_TABLES])
        self._inner.load([piece for piece in every if not is_row_piece(piece)], settings)

    def memory(self) -> tuple[int, int]:
        parameters, state = self._inner.memory()
        values = sum(len(table) * table.spec.row_bytes for table in self._tables)
        return parameters + values, state + sum(table.nbytes for table in self._tables) - values

    def _summed(self, ids: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sum of all workers' gradients of one table; they are added in the order of ranks."""
        group = self._group
        if group.world == 1:
            return ids, gradient
        counts = group.sum([float(len(ids)) if rank == group.rank else 0.0 for rank in range(group.world)])
        row_bytes = gradient.element_size() * gradient.shape[1]
        most = int(max(counts))
        own = torch.zeros(most * (8 + row_bytes), dtype=torch.uint8)
        own[: 8 * len(ids)] = ids.view(torch.uint8)
        own[8 * most : 8 * most + gradient.nbytes] = as_bytes(gradient.contiguous())
        every = group.gather(own)
        found, gradients = [], []
        for row, count in zip(every, map(int, counts), strict=True):
            found.append(row[: 8 * count].clone().view(torch.int64))
            values = row[8 * most : 8 * most + count * row_bytes].clone().view(gradient.dtype)
            gradients.append(values.view(count, gradient.shape[1]))
        return combine(found, gradients)
