"""Attention over a divided sequence: each rank's queries see the keys and values of all ranks, block by block.

It is ring attention (Liu, Zaharia, Abbeel, "Ring attention with blockwise transformers for near-infinite context",
2023). What a query has seen so far is the softmax's sum of values and the logarithm of its denominator, and two such
parts are added exactly (Milakov, Gimelshein, "Online normalizer calculation for softmax", 2018):

    m = log(exp(m1) + exp(m2))        out = exp(m1 - m) out1 + exp(m2 - m) out2

Backward goes around once more, with m known: of each block it computes the probabilities again (Dao et al.,
"FlashAttention", 2022, section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headrace.context_parallel.division import require_last_derivative
from headrace.context_parallel.placement import Zigzag
from headrace.context_parallel.ring import Ring
from headrace.devices import HOST
from headrace.errors import UsageError

Index = tuple[Any, ...]

_SCORES, _ON_DEVICE = 1 << 17, 1 << 20
"""Scores that are in memory at a time, at most: on the host few enough for its caches."""
_SHARED = 1 << 19
"""Numbers of keys and values that go around at a time: of some heads, where all have more."""


@dataclass(frozen=True)
class Span:
    """Rows of this rank's queries that see columns of a block of keys; where `diagonal`, none that come later."""

    rows: slice
    columns: slice
    chunk: int
    diagonal: bool


@dataclass(frozen=True)
class Attention:
    """One call: which tokens are where, and who sees what.

    Attributes:
        causal: whether a token sees none that come later.
        scale: of scores.
        groups: how many heads of queries share one of keys.
        most: how many scores are in memory at a time.
        keys: by rank which keys count or what is added to their scores, `(..., 1, local)`; () for none.
        pairs: what is added to this rank's scores, or which of them count, `(..., local, length)`; None for none.
    """

    placement: Zigzag
    ring: Ring
    causal: bool
    scale: float
    groups: int
    most: int = _SCORES
    keys: tuple[Tensor, ...] = ()
    pairs: Tensor | None = None

    def parts(self, key: Tensor, value: Tensor) -> Iterator[tuple[Attention, Index, Index]]:
        """Yields what goes around together: the call for some heads, which of queries they are, and which of keys."""
        heads = key.shape[-3] if key.dim() > 2 else 1
        step = max(1, heads * _SHARED // max(1, key.numel() + value.numel()))
        for start in range(0, heads, step):
            if step >= heads:
                yield self, (...,), (...,)
                return
            shared = slice(start, start + step)
            of_queries = slice(start * self.groups, shared.stop * self.groups)
            keys = tuple(_of_heads(each, of_queries) for each in self.keys)
            pairs = None if self.pairs is None else _of_heads(self.pairs, of_queries)
            part = replace(self, keys=keys, pairs=pairs)
            yield part, (..., of_queries, slice(None), slice(None)), (..., shared, slice(None), slice(None))

    def spans(self, rank: int, scores_a_row: int) -> Iterator[Span]:
        """Yields what of a rank's block this rank's queries see, in pieces of a bounded number of scores."""
        place, size = self.placement, self.placement.chunk
        for half, query in enumerate(place.chunks(place.rank)):
            for other, key in enumerate(place.chunks(rank)):
                real = place.real(key)
                if not real or (self.causal and key > query):
                    continue
                diagonal = self.causal and key == query
                step = max(1, self.most // max(1, scores_a_row * real))
                for start in range(0, size, step):
                    stop = min(start + step, size)
                    seen = min(real, stop) if diagonal else real
                    columns = slice(other * size, other * size + seen)
                    yield Span(slice(half * size + start, half * size + stop), columns, key, diagonal)

    def scores(self, queries: Tensor, keys: Tensor, rank: int, span: Span) -> Tensor:
        """Returns the scores of a span, `(..., rows, columns)`, in float32 or more."""
        scores = queries @ keys.transpose(-1, -2)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).mul_(self.scale)
        if self.keys:
            scores = _masked(scores, self.keys[rank][..., span.columns])
        size = self.placement.chunk
        if self.pairs is not None:
            first = span.chunk * size
            width = span.columns.stop - span.columns.start
            scores = _masked(scores, self.pairs[..., span.rows, first : first + width])
        if span.diagonal:
            rows = torch.arange(span.rows.start % size, span.rows.start % size + scores.shape[-2], device=scores.device)
            later = torch.arange(scores.shape[-1], device=scores.device) > rows[:, None]
            scores.masked_fill_(later, -math.inf)
        return scores

    def spread(self, keys: Tensor) -> Tensor:
        """Returns keys or values for each head of queries."""
        return keys if self.groups == 1 else keys.repeat_interleave(self.groups, -3)

    def gather(self, gradient: Tensor) -> Tensor:
        """Returns the gradient of what `spread` was given."""
        return gradient if self.groups == 1 else gradient.unflatten(-3, (-1, self.groups)).sum(-3)


class RingAttention(torch.autograd.Function):
    """From this rank's queries `(..., heads, local, width)`, and keys and values, to its outputs.

    Some heads go around after the others, so that little more is in memory than what is given and returned.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, call: Attention) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        seen = query.new_empty(query.shape[:-1], dtype=torch.promote_types(query.dtype, torch.float32))
        for part, heads, shared in call.parts(key, value):
            _attend(part, *(query[heads], key[shared], value[shared]), *(out[heads], seen[heads[:-1]]))
        ctx.call = call
        ctx.save_for_backward(query, key, value, out, seen)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        require_last_derivative()
        query, key, value, out, seen = ctx.saved_tensors
        found = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in (query, key, value)]
        for part, heads, shared in ctx.call.parts(key, value):
            given = (query[heads], key[shared], value[shared])
            own = [whole[place] for whole, place in zip(found, (heads, shared, shared), strict=True)]
            _differentiate(part, own, *given, *(out[heads], seen[heads[:-1]], gradient[heads]))
        return *found, None


def _attend(call: Attention, query: Tensor, key: Tensor, value: Tensor, out: Tensor, seen: Tensor) -> None:
    """Fills in `out` and `seen` of some heads."""
    query = query.contiguous()
    total = torch.zeros_like(out, dtype=seen.dtype)
    seen.fill_(-math.inf)
    for rank, block in call.ring.blocks(torch.cat([key, value], -1)):
        keys, values = block.split([key.shape[-1], value.shape[-1]], -1)
        for span in call.spans(rank, math.prod(query.shape[:-2])):
            rows, columns = span.rows, span.columns
            scores = call.scores(query[..., rows, :], call.spread(keys[..., columns, :]), rank, span)
            before, here = seen[..., rows], scores.logsumexp(-1)
            after = torch.logaddexp(before, here)
            # Where a query has seen nothing so far, all weights are 0.
            finite = after.masked_fill(after == -math.inf, 0.0)
            weights = scores.sub_(finite[..., None]).exp_().to(value.dtype)
            old = total[..., rows, :]
            old.mul_((before - finite).exp()[..., None])
            old.add_((weights @ call.spread(values[..., columns, :])).to(seen.dtype))
            before.copy_(after)
    out.copy_(total)


def _differentiate(
    call: Attention,
    into: Sequence[Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    seen: Tensor,
    gradient: Tensor,
) -> None:
    """Writes the gradients of queries, keys and values of some heads `into` tensors like them."""
    wide, split = seen.dtype, [key.shape[-1], value.shape[-1]]
    query, gradient = query.contiguous(), gradient.contiguous()
    inner = (gradient.to(wide) * out.to(wide)).sum(-1, keepdim=True)
    finite = seen.masked_fill(seen == -math.inf, 0.0)
    to_query = torch.zeros_like(query, dtype=wide)

    def part(rank: int, block: Tensor) -> Tensor:
        keys, values = block.split(split, -1)
        found = torch.zeros_like(block, dtype=wide)
        to_keys, to_values = found.split(split, -1)
        for span in call.spans(rank, math.prod(query.shape[:-2])):
            rows, columns = span.rows, span.columns
            key, value = call.spread(keys[..., columns, :]), call.spread(values[..., columns, :])
            weights = call.scores(query[..., rows, :], key, rank, span).sub_(finite[..., rows, None]).exp_()
            coming = gradient[..., rows, :]
            to_values[..., columns, :] += call.gather((weights.to(value.dtype).mT @ coming).to(wide))
            slopes = (coming @ value.mT).to(wide).sub_(inner[..., rows, :]).mul_(weights).mul_(call.scale)
            slopes = slopes.to(query.dtype)
            to_query[..., rows, :] += (slopes @ key).to(wide)
            to_keys[..., columns, :] += call.gather((slopes.mT @ query[..., rows, :]).to(wide))
        return found.to(block.dtype)

    together = call.ring.return_gradients(torch.cat([key, value], -1), part)
    for place, slopes in zip(into, (to_query, *together.split(split, -1)), strict=True):
        place.copy_(slopes)


def _of_heads(mask: Tensor, heads: slice) -> Tensor:
    """Returns a mask of some heads; one for all stays."""
    return mask[..., heads, :, :] if mask.dim() > 2 and mask.shape[-3] > 1 else mask


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    return scores.masked_fill_(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask


def attend(
    placement: Zigzag,
    ring: Ring,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Returns what `scaled_dot_product_attention` returns for this rank's tokens, where all ranks have some.

    Raises:
        UsageError: what it is asked for depends on more than the keys and values of the sequence.
    """
    local, length = placement.local, placement.length
    if query.shape[-2] != local or key.shape[-2] != local or value.shape[-2] != local:
        raise UsageError(
            f"scaled_dot_product_attention gets {query.shape[-2]} queries and {key.shape[-2]} keys, and this worker "
            f"has {local} of the sequence's {length} tokens: under context_parallel attention is of the sequence to "
            "itself, without tokens that the model adds; use mirrored, or tensor_parallel"
        )
    if dropout_p:
        raise UsageError(
            f"scaled_dot_product_attention(dropout_p={dropout_p:g}) draws for pairs of tokens, which lie on several "
            "workers under context_parallel; use dropout_p=0.0 (in transformers attention_dropout=0.0)"
        )
    grouped = enable_gqa and key.shape[-3] != query.shape[-3]
    groups = query.shape[-3] // key.shape[-3] if grouped else 1
    heads = (*key.shape[:-3], key.shape[-3] * groups) if grouped else key.shape[:-2]
    if query.shape[:-2] != heads or key.shape[:-2] != value.shape[:-2]:
        raise UsageError(
            f"scaled_dot_product_attention gets queries {tuple(query.shape)}, keys {tuple(key.shape)} and values "
            f"{tuple(value.shape)}, and context_parallel needs as many heads of each, or enable_gqa=True; expand them"
        )
    keys, pairs = _masks(attn_mask, placement, ring)
    if torch.is_autocast_enabled(query.device.type):
        half = torch.get_autocast_dtype(query.device.type)
        query, key, value = (each.to(half) if each.dtype == torch.float32 else each for each in (query, key, value))
    call = Attention(
        *(placement, ring, is_causal, query.shape[-1] ** -0.5 if scale is None else scale, groups),
        *(_SCORES if query.device.type == HOST else _ON_DEVICE, keys, pairs),
    )
    with torch.autocast(query.device.type, enabled=False):
        out: Tensor = RingAttention.apply(query, key, value, call)  # type: ignore[no-untyped-call]
    return out


def _masks(mask: Tensor | None, placement: Zigzag, ring: Ring) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Returns a mask as those of all ranks' keys, or as one of this rank's queries and all keys."""
    if mask is None:
        return (), None
    if mask.requires_grad:
        raise UsageError(
            "scaled_dot_product_attention's attn_mask has a gradient, and context_parallel has none for it; use "
            "mirrored, or tensor_parallel"
        )
    rows, columns = mask.shape[-2:]
    if columns == placement.length and rows in (1, placement.local):
        return (), mask.expand(*mask.shape[:-2], placement.local, columns)
    if rows != 1 or columns != placement.local:
        raise UsageError(
            f"scaled_dot_product_attention's attn_mask is {tuple(mask.shape)}, for pairs of the {placement.local} "
            f"tokens that this worker has of {placement.length}, and each sees those of the others, too: use "
            "is_causal=True in its place, a mask of keys (..., 1, tokens), or one of all pairs in the batch, "
            "(examples, 1, tokens, tokens)"
        )
    # One for all heads, where it has been expanded.
    for dim, stride in enumerate(mask.stride()[:-2]):
        mask = mask.narrow(dim, 0, 1) if not stride else mask
    every = {rank: block.clone() for rank, block in ring.blocks(mask.contiguous())}
    return tuple(every[rank] for rank in range(ring.world)), None
