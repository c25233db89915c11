"""Which functions are replaced while a worker computes: attention, what counts tokens, and transformers' masks."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from headrace import internals

torch_arange = torch.arange
"""torch's own."""


def plain_attention(*values: Any, **named: Any) -> Tensor:
    """Calls torch's own attention, while it is replaced."""
    out: Tensor = _torch[0](*values, **named)
    return out


def plain_arange(where: str, *args: Any, **kwargs: Any) -> Tensor:
    """Calls torch's own `arange`, from anywhere."""
    return torch_arange(*args, **kwargs)


class Substitutes(NamedTuple):
    """What is called in the place of other functions; all are the library's own where nothing is said.

    `attend` takes what `scaled_dot_product_attention` takes; `arange` what it takes behind where it is called, as text.
    `whole` is given numbers of this worker's tokens, `(examples, tokens)`, and returns those of all; `mask` is given
    transformers' `sdpa_mask` and what that takes, and returns that of this worker's tokens.
    """

    attend: Callable[..., Tensor] = plain_attention
    arange: Callable[..., Tensor] = plain_arange
    whole: Callable[[Tensor], Tensor] | None = None
    mask: Callable[..., Tensor | None] | None = None


PLAIN = Substitutes()

_lock = threading.Lock()
_used: dict[int, Substitutes] = {}
"""By thread."""
_torch: list[Any] = []
"""torch's own attention, and whether its layers may compute attention by other functions of theirs."""
_PACKED, _PLACED = "find_packed_sequence_indices", "remap_positions_for_packed_sequence"
_masking: dict[str, Any] = {}
"""Functions of transformers by which models make masks of places; none where the library is not imported."""


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
            _replace_masking()
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
                _restore_masking()


def _replace_masking() -> None:
    library: Any = sys.modules.get("transformers.masking_utils")
    if library is None:
        return
    _masking.update({name: getattr(library, name) for name in (_PACKED, _PLACED)})
    _masking["sdpa"] = library.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    library.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] = _mask
    setattr(library, _PACKED, lambda positions: _masking[_PACKED](_whole(positions)))
    setattr(library, _PLACED, lambda function, positions: _masking[_PLACED](function, _whole(positions)))


def _restore_masking() -> None:
    if _masking:
        library: Any = sys.modules["transformers.masking_utils"]
        library.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] = _masking.pop("sdpa")
        for name in (_PACKED, _PLACED):
            setattr(library, name, _masking.pop(name))


def _whole(positions: Tensor) -> Tensor:
    found = _current()
    return found.whole(positions) if found and found.whole else positions


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    found = _current()
    own: Callable[..., Tensor | None] = _masking["sdpa"]
    # What counts in it is no token of a model's.
    with substituted(PLAIN):
        return found.mask(own, *args, **kwargs) if found and found.mask else own(*args, **kwargs)


def _current() -> Substitutes | None:
    with _lock:
        found = _used.get(threading.get_ident())
        if found is None and len(_used) == 1 and internals.current_backward() != -1:
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
