"""The layer that stands in a model for `nn.Embedding` and `nn.EmbeddingBag` with `sparse=True`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headrace.errors import DataError, JobError
from headrace.spec.embedding import TableSpec

if TYPE_CHECKING:
    from headrace.spec.events import TableStats
    from headrace.training.embeddings.pieces import RowBlock


LAYERS = (nn.Embedding, nn.EmbeddingBag)
"""The layers of torch that it stands for."""


class RowSource(ABC):
    """Where a layer gets its rows."""

    def stats(self) -> TableStats | None:
        """Returns how many rows are in this process; None where they are elsewhere."""
        return None

    @abstractmethod
    def pull(self, ids: Tensor) -> Tensor:
        """Returns the rows `ids`, distinct and ascending int64 on the CPU, as new memory `(ids, width)`."""

    @abstractmethod
    def blocks(self) -> Iterator[RowBlock]:
        """Yields the changed rows, without their optimizer's state."""


@dataclass(frozen=True)
class BagOptions:
    """What `nn.EmbeddingBag` does with the rows of a bag: `mode` is "sum", "mean" or "max"."""

    mode: str
    include_last_offset: bool = False


class SparseEmbedding(nn.Module):
    """An embedding whose rows come from a table elsewhere: only those of the batch are here.

    Its input and output are those of `nn.Embedding`, or with `bag` of `nn.EmbeddingBag`.

    Attributes:
        spec: of the table; `num_embeddings` and `embedding_dim` as in torch.
        source: of the rows.
        collects: whether the gradients of its rows are kept until `take`.
        inputs: of the calls with gradients since the last `forget`; None to keep none.
    """

    def __init__(self, spec: TableSpec, source: RowSource, bag: BagOptions | None = None) -> None:
        super().__init__()
        self.spec, self.source, self.bag = spec, source, bag
        self.num_embeddings, self.embedding_dim, self.sparse = spec.rows, spec.width, True
        self.padding_idx = spec.padding if spec.padding >= 0 else None
        self.collects = False
        self.inputs: list[Tensor] | None = None
        self._uses: list[tuple[Tensor, Tensor]] = []

    @property
    def weight(self) -> Tensor:
        """There is none: raises JobError."""
        raise JobError(
            f"the model uses the weight of the sparse embedding {self.spec.name!r} itself, and only the rows of a "
            "batch are there; call the layer, or make it with sparse=False"
        )

    @property
    def leaves(self) -> list[Tensor]:
        """The rows of each call since the last `take`, of which autograd leaves the gradient in `.grad`."""
        return [rows for _, rows in self._uses]

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Returns the embeddings of a batch of indices; raises DataError for what is no index of the table."""
        self._require(input)
        if self.inputs is not None and torch.is_grad_enabled():
            self.inputs.append(input.detach())
        ids, inverse = torch.unique(input.detach().cpu().long(), return_inverse=True)
        rows, inverse = self.source.pull(ids).to(input.device), inverse.to(input.device)
        if torch.is_grad_enabled() and self.spec.trainable:
            rows.requires_grad_()
            if self.collects:
                self._uses.append((ids, rows))
        if self.bag is None:
            return F.embedding(inverse, rows)
        found = (ids == self.spec.padding).nonzero().view(-1)
        return F.embedding_bag(
            inverse,
            rows,
            offsets,
            mode=self.bag.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.bag.include_last_offset,
            padding_idx=int(found[0]) if len(found) else None,
        )

    def take(self) -> tuple[Tensor, Tensor]:
        """Returns the gradient of the calls since the last time, summed: distinct ids, and `(ids, width)`."""
        uses, self._uses = self._uses, []
        found = [(ids, rows.grad) for ids, rows in uses if rows.grad is not None]
        if not found:
            none = torch.empty(0, dtype=torch.int64)
            return none, torch.empty(0, self.spec.width, dtype=getattr(torch, self.spec.dtype))
        ids, gradient = combine([each for each, _ in found], [each.cpu() for _, each in found if each is not None])
        if self.spec.padding >= 0:
            kept = ids != self.spec.padding
            ids, gradient = ids[kept], gradient[kept]
        return ids, gradient

    def forget(self) -> None:
        """Drops calls whose gradient is not wanted, and all inputs."""
        self._uses.clear()
        if self.inputs is not None:
            self.inputs.clear()

    def extra_repr(self) -> str:
        return f"{self.spec.rows}, {self.spec.width}, sparse=True"

    def _require(self, input: Tensor) -> None:
        if input.dtype.is_floating_point or input.dtype.is_complex or input.dtype == torch.bool:
            raise DataError(
                f"the sparse embedding {self.spec.name!r} takes indices of rows, whole numbers, and the batch has "
                f"{str(input.dtype).removeprefix('torch.')}; give it int64 or int32"
            )
        if not input.numel():
            return
        low, high = int(input.min()), int(input.max())
        if low < 0 or high >= self.spec.rows:
            raise DataError(
                f"the sparse embedding {self.spec.name!r} has {self.spec.rows:,} rows, and the batch has the index "
                f"{low if low < 0 else high:,}; make the table larger, or map such indices to one that it has"
            )


def sparse_layers(module: nn.Module) -> Iterator[SparseEmbedding]:
    """Yields the sparse embeddings of a model, each once, in its order."""
    yield from (each for each in module.modules() if isinstance(each, SparseEmbedding))


def combine(ids: Sequence[Tensor], gradients: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the sum of several gradients of rows: distinct ids, ascending, and `(ids, width)`."""
    if len(ids) == 1:
        return ids[0], gradients[0]
    distinct, inverse = torch.unique(torch.cat(list(ids)), return_inverse=True)
    every = torch.cat(list(gradients))
    return distinct, every.new_zeros(len(distinct), every.shape[1]).index_add_(0, inverse, every)


def local_stats(module: nn.Module) -> tuple[TableStats, ...]:
    """Returns how many rows a model's sparse embeddings hold in this process; () where their rows are elsewhere."""
    return tuple(stats for layer in sparse_layers(module) if (stats := layer.source.stats()))


def rows_of_layers(layers: Iterable[SparseEmbedding]) -> dict[str, Tensor]:
    """Returns the changed rows of each layer's table, by name."""
    found: dict[str, Tensor] = {}
    for layer in layers:
        blocks = list(layer.source.blocks())
        if blocks:
            found[f"rows/{layer.spec.name}/ids"] = torch.cat([block.ids for block in blocks])
            found[f"rows/{layer.spec.name}/values"] = torch.cat([block.values for block in blocks])
    return found
