"""Which functions of torch are replaced while a worker computes: attention, and what counts a sequence's tokens."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class Substitutes(NamedTuple):
    """What is called in the place of torch's functions.

    `attend` takes what `scaled_dot_product_attention` takes; `arange` what it takes behind where it is called, as text.
    """

    attend: Callable[..., Tensor]
    arange: Callable[..., Tensor]


torch_arange = torch.arange
"""torch's own."""

_lock = threading.Lock()
_used: dict[int, Substitutes] = {}
"""By thread."""
_torch: list[Any] = []
"""torch's own attention, and whether its layers may compute attention by other functions of theirs."""


@contextmanager
def substituted(substitutes: Substitutes) -> Iterator[None]:
    """Lets them be called: in this thread, and in those of its backward passes."""
    thread = threading.get_ident()
    with _lock:
        if not _used:
            _torch[:] = [functional.scaled_dot_product_attention, torch.backends.mha.get_fastpath_enabled()]
            functional.scaled_dot_product_attention = functools.wraps(_torch[0])(_attention)
            torch.arange = functools.wraps(torch_arange)(_arange)
            torch.backends.mha.set_fastpath_enabled(False)
        before = _used.get(thread)
        _used[thread] = substitutes
    try:
        yield
    finally:
        with _lock:
            if before is None:
                del _used[thread]
            else:
                _used[thread] = before
            if not _used:
                functional.scaled_dot_product_attention = _torch[0]
                torch.arange = torch_arange
                torch.backends.mha.set_fastpath_enabled(_torch[1])


def plain_attention(*values: Any, **named: Any) -> Tensor:
    """Calls torch's own attention, while it is replaced."""
    out: Tensor = _torch[0](*values, **named)
    return out


def _current() -> Substitutes | None:
    with _lock:
        found = _used.get(threading.get_ident())
        if found is None and len(_used) == 1:
            # Backward on an accelerator has a thread of its own, in which a checkpoint runs forward again.
            (found,) = _used.values()
    return found


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    found = _current()
    attend = found.attend if found else _torch[0]
    return attend(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def _arange(*args: Any, **kwargs: Any) -> Tensor:
    found = _current()
    if found is None:
        return torch_arange(*args, **kwargs)
    frame = inspect.currentframe()
    caller = frame.f_back if frame else None
    if caller is None:
        return torch_arange(*args, **kwargs)
    code = caller.f_code
    # The same in all processes, whatever the module is called there.
    place = f"{Path(code.co_filename).name}:{caller.f_lineno}, {code.co_qualname}"
    return found.arange(place, *args, **kwargs)
