"""Attention of which each device has some of the heads."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.collectives.base import Collective
from headrace.tensor_parallel.collectives import copy_to, reduce_from, rows
from headrace.tensor_parallel.layers import dropped
from headrace.tensor_parallel.sequence.tokens import Tokens


class ParallelAttention:
    """A `nn.MultiheadAttention` of which each rank has some heads: one sum over ranks each way."""

    def __init__(self, layer: nn.MultiheadAttention, group: Collective, tokens: Tokens | None = None) -> None:
        self._layer, self._tokens = layer, tokens
        self._batch_first = layer.batch_first
        self._group = group

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        batched = query.dim() == 3
        q, k, v = self._project(query, key, value, batched)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self._layer.head_dim)
        weights = self._masked(scores, key_padding_mask, attn_mask).softmax(-1)
        if self._layer.training and self._layer.dropout > 0.0:
            weights = weights * dropped(weights, self._layer.dropout, 1, self._group)
        out = self._layer.out_proj((weights @ v).transpose(1, 2).flatten(2))
        out = out if self._batch_first else out.transpose(0, 1)
        shown = self._shown(weights, average_attn_weights) if need_weights else None
        if batched:
            return out, shown
        return out.squeeze(0 if self._batch_first else 1), None if shown is None else shown.squeeze(0)

    def _project(self, query: Tensor, key: Tensor, value: Tensor, batched: bool) -> list[Tensor]:
        """Returns this rank's heads of queries, keys and values, each `(batch, heads, time, features)`."""
        inside: dict[int, Tensor] = {}
        weights, found = self._layer.in_proj_weight.chunk(3), list[Tensor]()
        biases = (None, None, None) if self._layer.in_proj_bias is None else self._layer.in_proj_bias.chunk(3)
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True):
            # One value's gradients are summed over ranks once.
            held = self._tokens is not None and self._tokens.holds(x)
            if id(x) not in inside:
                inside[id(x)] = x if held else copy_to(x, self._group)
            with self._tokens.saving(x) if self._tokens else nullcontext():
                y = F.linear(inside[id(x)], weight, bias)
            if not batched:
                y = y.unsqueeze(0 if self._batch_first else 1)
            y = y if self._batch_first else y.transpose(0, 1)
            found.append(y.unflatten(-1, (-1, self._layer.head_dim)).transpose(1, 2))
        return found

    def _masked(self, scores: Tensor, padding: Tensor | None, mask: Tensor | None) -> Tensor:
        if mask is not None:
            if mask.dim() == 3:
                start, stop = rows(self._layer.num_heads, self._group.rank, self._group.world)
                heads: Tensor = mask.unflatten(0, (-1, self._layer.num_heads))
                mask = heads[:, start:stop]
            scores = _forbidden(scores, mask)
        if padding is not None:
            padding = padding if padding.dim() == 2 else padding.unsqueeze(0)
            scores = _forbidden(scores, padding[:, None, None, :])
        return scores

    def _shown(self, weights: Tensor, average: bool) -> Tensor:
        """Returns attention weights of all heads, or their mean over heads."""
        if average:
            return reduce_from(weights.mean(1), self._group) / self._group.world
        every = weights.new_zeros(weights.shape[0], self._layer.num_heads, *weights.shape[2:])
        start, stop = rows(self._layer.num_heads, self._group.rank, self._group.world)
        every = torch.cat([every[:, :start], weights, every[:, stop:]], 1)
        return reduce_from(every, self._group)


def _forbidden(scores: Tensor, mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return scores.masked_fill(mask, -math.inf)
    return scores + mask
