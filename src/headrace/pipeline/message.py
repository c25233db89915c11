"""What crosses a cut, as a message: tensors as they are, and a note in JSON that says what they are.

Numbers and shapes travel in the note. Nothing in a note is run.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from headrace.channels.mailbox import places
from headrace.errors import UsageError
from headrace.spec.model import ITEM_BYTES


def pack(values: Mapping[str, Any], tracked: Callable[[Tensor], bool]) -> tuple[bytes, list[Tensor]]:
    """Returns a note, and the tensors that it speaks of, detached.

    Args:
        values: tensors, numbers, shapes and None, by name.
        tracked: whether a tensor's receiver is to send a gradient back.

    Raises:
        UsageError: a value is of another kind.
    """
    form = {name: _form(name, value, tracked) for name, value in values.items()}
    tensors = [value.detach() for value in values.values() if isinstance(value, Tensor)]
    return json.dumps(form, separators=(",", ":")).encode(), tensors


def unpack(note: bytes, data: Tensor, receive: Callable[[Tensor, bool], Tensor]) -> dict[str, Any]:
    """Returns the values of a message, by name.

    Args:
        note: what `pack` returned.
        data: `(nbytes,)` uint8, the tensors' bytes by `places`.
        receive: takes a tensor that lies in `data`, and whether it is tracked, and returns what is to stand for it.

    Raises:
        ValueError: the note is none.
    """
    form: dict[str, Any] = json.loads(note)
    forms = [each for each in form.values() if isinstance(each, list) and len(each) == 3]
    sizes = [_elements(shape) * ITEM_BYTES[word] for word, shape, _ in forms]
    begins, _ = places(sizes)
    tensors = iter(
        receive(data[begin : begin + size].view(_type(word)).view(shape), tracked)
        for begin, size, (word, shape, tracked) in zip(begins, sizes, forms, strict=True)
    )
    return {name: _value(each, tensors) for name, each in form.items()}


def _form(name: str, value: Any, tracked: Callable[[Tensor], bool]) -> Any:
    if isinstance(value, Tensor):
        return [str(value.dtype).removeprefix("torch."), list(value.shape), tracked(value)]
    if isinstance(value, torch.Size):
        return [list(value)]
    if value is None or type(value) in (bool, int, float):
        return value
    raise UsageError(
        f"{name} is a {type(value).__name__} and is needed behind a cut; tensors, numbers and shapes cross one; cut "
        "elsewhere (partition), or put what makes it and what uses it into one submodule"
    )


def _value(form: Any, tensors: Any) -> Any:
    if not isinstance(form, list):
        return form
    return next(tensors) if len(form) == 3 else torch.Size(form[0])


def _elements(shape: list[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def _type(word: str) -> torch.dtype:
    if word not in ITEM_BYTES:
        raise ValueError(f"{word!r} is no type of tensors that travel")
    dtype: torch.dtype = getattr(torch, word)
    return dtype
