"""Which functions of torch are running around what is recorded: by the frames of the stack."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterator
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def functions_with_backward() -> frozenset[CodeType | None]:
    """Returns the code of all autograd functions that there are now: of what their `apply` calls."""
    return frozenset(map(_code, _methods(torch.autograd.Function)))


def running(codes: Collection[CodeType | None]) -> FrameType | None:
    """Returns the innermost call of one of these that is running; None if none is."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame


def running_checkpoint() -> FrameType | None:
    """Returns the call of `torch.utils.checkpoint` that is running; None if none is."""
    return running((_code(checkpoint),))


def _methods(function: Any) -> Iterator[Any]:
    for kind in function.__subclasses__():
        yield from (kind.forward, kind.setup_context)
        yield from _methods(kind)


def _code(method: Any) -> CodeType | None:
    """Returns the code of a method, below its decorators; None if it is not written in Python."""
    method = inspect.unwrap(method)
    if isinstance(method, functools.partial):
        return _code(method.func)
    called = method if isinstance(method, FunctionType | MethodType) else type(method).__call__
    return getattr(called, "__code__", None)
