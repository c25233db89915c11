"""Embedding tables as an exported program has them: all rows in one tensor, and bags as plain operations."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headrace import internals
from headrace.modules import copy_module
from headrace.training.embeddings.layer import SparseEmbedding


class WholeBag(nn.Module):
    """What `nn.EmbeddingBag` computes of bags of one length `(batch, length)`, by operations that every format has."""

    def __init__(self, weight: Tensor, mode: str, padding: int | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.mode, self.padding = mode, padding

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Returns the sums, means or largest values `(batch, width)` of the rows; padding counts not."""
        if input.dim() != 2:
            return F.embedding_bag(input, self.weight, offsets, mode=self.mode, padding_idx=self.padding)
        rows = F.embedding(input, self.weight)
        mask = (torch.ones_like(input) if self.padding is None else (input != self.padding).long()).unsqueeze(2)
        if self.mode == "max":
            return rows.masked_fill(mask == 0, -torch.inf).amax(1).masked_fill(mask.sum(1) == 0, 0.0)
        factor = mask.to(rows.dtype)
        if per_sample_weights is not None:
            factor = factor * per_sample_weights.unsqueeze(2)
        total = (rows * factor).sum(1)
        return total / mask.sum(1).clamp(min=1) if self.mode == "mean" else total


def with_whole_tables(model: nn.Module) -> nn.Module:
    """Returns a model with the rows of all its sparse tables in it; itself where there is nothing to replace."""
    if not any(_replaceable(module) for module in model.modules()):
        return model
    made: dict[int, nn.Module] = {}
    copy = copy_module(model)
    if _replaceable(copy):
        return _whole(copy)
    for parent in list(copy.modules()):
        # Not `named_children`, which leaves out a table that stands at a second place.
        for name, child in list(internals.children(parent).items()):
            if child is not None and _replaceable(child):
                setattr(parent, name, made.setdefault(id(child), _whole(child)))
    return copy


def _replaceable(module: nn.Module) -> bool:
    if isinstance(module, nn.EmbeddingBag):
        return not module.include_last_offset
    return isinstance(module, SparseEmbedding) and not (module.bag and module.bag.include_last_offset)


def _whole(module: nn.Module) -> nn.Module:
    if isinstance(module, nn.EmbeddingBag):
        rows = module.weight.detach()
        if module.max_norm is not None:
            # The layer does it to the rows of a call, in place and before it reads them.
            places = torch.arange(len(rows), device=rows.device)
            rows = torch.embedding_renorm_(rows.clone(), places, module.max_norm, module.norm_type)
        return WholeBag(rows, module.mode, module.padding_idx)
    # `_replaceable` lets no other through.
    assert isinstance(module, SparseEmbedding)
    rows = module.source.pull(torch.arange(module.num_embeddings))
    if module.bag is not None:
        return WholeBag(rows, module.bag.mode, module.padding_idx)
    table: nn.Embedding = nn.Embedding.from_pretrained(rows, padding_idx=module.padding_idx)
    return table
