"""Masks of transformers' models over a divided sequence: a rank's queries in the rows, all keys in the columns.

A model makes its masks of where a query and a key are in the sequence, of which keys count, and of positions, which say
where another text begins. Ranks join the last two, of which each has its own tokens', and then ask for their rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headrace.context_parallel.placement import Zigzag


def mask_of_rows(
    place: Zigzag,
    whole: Callable[[Tensor], Tensor],
    make: Callable[..., Tensor | None],
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    *,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **named: Any,
) -> Tensor | None:
    """Returns what `sdpa_mask` of transformers, `make`, makes for this rank's tokens, `(examples, 1, local, length)`.

    None stands for attention that is causal, or sees all, as it does for a whole sequence.
    """
    counted = attention_mask if attention_mask is None else whole(attention_mask)
    every = counted is None or bool(counted.all())
    if every and (allow_is_causal_skip or allow_is_bidirectional_skip) and not _is_local(local_size, place.length):
        return None
    rows = []
    for chunk in place.chunks(place.rank):
        # Tokens that a sequence is filled with see what its last one does.
        first, real = min(chunk * place.chunk, place.length - 1), max(1, place.real(chunk))
        found = make(
            *(batch_size, real, place.length, first, 0),
            attention_mask=counted,
            local_size=local_size,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            **named,
        )
        assert found is not None
        rows += [found, *[found[..., -1:, :]] * (place.chunk - real)]
    return torch.cat(rows, -2)


def _is_local(size: int | None, length: int) -> bool:
    return size is not None and length >= size
