"""The optimizer of torchao that does what a job's does, with state in 8 bits: a choice of plans, where it is there."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from headrace.machine.extras import absent

_NAMES = {torch.optim.Adam: "Adam8bit", torch.optim.AdamW: "AdamW8bit"}
_OPTIONS = {"lr", "betas", "eps", "weight_decay", "amsgrad"}


def in_8_bits(optimizer: Any) -> partial[Any] | None:
    """Returns what makes it; None if there is none, or it has not the job's options."""
    made = optimizer if isinstance(optimizer, partial) else partial(optimizer) if callable(optimizer) else None
    name = next((each for known, each in _NAMES.items() if made is not None and made.func is known), None)
    if made is None or name is None or made.args or not _OPTIONS.issuperset(made.keywords) or absent("torchao"):
        return None
    from torchao import optim

    return partial(getattr(optim, name), **made.keywords)
