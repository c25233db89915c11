"""Which functions of torch are running around what is recorded: by the frames of the stack."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
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


def running_checkpoints() -> list[FrameType]:
    """Returns the calls of `torch.utils.checkpoint` whose functions are running."""
    found: list[FrameType] = []
    inner, frame, code = None, inspect.currentframe(), _code(checkpoint)
    while frame is not None:
        if frame.f_code is code:
            if inner is not None and inner.f_code.co_flags & inspect.CO_GENERATOR:
                # It prepares, in a generator of its own, and has not called the function.
                return []
            found.append(frame)
        inner, frame = frame, frame.f_back
    return found


@contextmanager
def frames_cleared() -> Iterator[None]:
    """Clears the frames of what an error ends.

    torch before 2.13 saves tensors as `torch.utils.checkpoint` does for as long as the frame of a call of it that has
    failed is kept, as an error keeps it.
    """
    try:
        yield
    except BaseException as error:
        each: BaseException | None = error
        while each is not None:
            traceback.clear_frames(each.__traceback__)
            each = each.__cause__ or each.__context__
        raise


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
