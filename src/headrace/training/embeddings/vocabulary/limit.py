"""Embeddings of open vocabularies: as many ids as there may be, and a limited number of rows."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from headrace.errors import UnknownName, UsageError
from headrace.spec.embedding import RowLimit
from headrace.training.embeddings.vocabulary.index import EVICTIONS

_MARK = "_headrace_row_limit"
_MOST_ROWS = 1 << 56

Layer = TypeVar("Layer", nn.Embedding, nn.EmbeddingBag)


def limit_rows(layer: Layer, max_rows: int, evict: str = "age") -> Layer:
    """Lets a sparse embedding hold at most so many rows; returns the layer.

    A row takes memory when it gets its first gradient. When there would be more rows than `max_rows`, others are
    dropped with their optimizer's state; a row that comes back begins as it began first.

    Args:
        layer: with `sparse=True`, or made sparse by its name; its `num_embeddings` may be any number up to 2**56.
        max_rows: over all servers together.
        evict: which rows go: by "age" those whose last gradient is the longest ago, by "count" those that had the
            fewest.

    Raises:
        UsageError: it is no such layer or number, or there is no such `evict`.

    Examples:
        >>> words = torch.nn.Embedding(1000, 16, sparse=True)
        >>> hr.limit_rows(words, max_rows=500) is words
        True
    """
    if type(layer) not in (nn.Embedding, nn.EmbeddingBag):
        raise UsageError(f"limit_rows is for nn.Embedding and nn.EmbeddingBag, got {type(layer).__name__}")
    if isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < 1:
        raise UsageError(f"max_rows must be a whole number from 1 on, got {max_rows!r}")
    if evict not in EVICTIONS:
        raise UnknownName("evict", evict, EVICTIONS)
    if layer.num_embeddings > _MOST_ROWS:
        raise UsageError(f"an embedding has at most 2**56 ids, and this one has {layer.num_embeddings:,}; use fewer")
    setattr(layer, _MARK, RowLimit(max_rows, evict))
    return layer


def limit_of(layer: nn.Module) -> RowLimit | None:
    """Returns the limit that a layer was given; None without."""
    limit = getattr(layer, _MARK, None)
    return limit if isinstance(limit, RowLimit) else None
