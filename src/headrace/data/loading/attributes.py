"""What the attributes of a data set hold, so that a change of them is noticed that reading processes do not have."""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import chain
from pathlib import PurePath
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.internals import version

_MOST = 5_000
"""Objects that are looked at."""
_MOST_BYTES = 1 << 26
"""Of an array that is compared by its bytes."""
_VALUES = (bool, int, float, complex, str, bytes, type(None))
_FIXED = (*_VALUES, type, ModuleType, BuiltinFunctionType, range, PurePath, np.generic, torch.dtype, torch.device)


class _Unknown(Exception):
    """There is too much, or something that tells nothing of what it holds."""


def state_of(*roots: Any) -> list[Any] | None:
    """Returns what objects and all that their attributes lead to hold, to be compared; None if that cannot be told."""
    seen: dict[int, Any] = {}
    found: list[Any] = []
    waiting: list[Any] = list(roots)
    try:
        while waiting:
            value = waiting.pop()
            if isinstance(value, _FIXED):
                found.append(repr(value))
            elif id(value) not in seen:
                seen[id(value)] = value
                if len(seen) > _MOST:
                    return None
                found.append((type(value), content := _content(value)))
                waiting += [] if content else _inside(value)
    except _Unknown:
        return None
    return found


def _content(value: Any) -> Any:
    """Returns what is compared of a value as a whole; None where what is inside is looked at."""
    if isinstance(value, Tensor):
        # Each write to it counts up its version.
        return id(value), version(value)
    if isinstance(value, np.ndarray) and value.dtype != object and value.nbytes <= _MOST_BYTES:
        return value.shape, zlib.crc32(value.tobytes())
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().tolist())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, list | tuple) and len(value) and _are_values(value):
        return hash(tuple(value))
    return None


def _are_values(items: Any) -> bool:
    """Whether items are numbers and text, or tuples of them, such as the path and the label of an image."""
    kinds = set(map(type, items))
    return kinds <= set(_VALUES) or (kinds == {tuple} and set(map(type, chain.from_iterable(items))) <= set(_VALUES))


def _inside(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from (len(value), *value.keys(), *value.values())
    elif isinstance(value, list | tuple | deque | set | frozenset):
        yield from (len(value), *value)
    elif isinstance(value, FunctionType):
        yield from (id(value), value.__defaults__, *(value.__closure__ or ()))
    elif isinstance(value, CellType):
        yield value.cell_contents
    elif isinstance(value, MethodType):
        yield from (value.__self__, value.__func__)
    elif isinstance(value, partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, np.ndarray):
        yield vars(value)
        yield from (each for kind in type(value).__mro__ for each in vars(kind).values() if isinstance(each, _VALUES))
    else:
        raise _Unknown
