"""Autograd functions that run while calls are recorded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.pipeline.replay.recording import _inside_function


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(function)(lambda *args: function(*args))


class Called:
    """An object in the place of a function."""

    def __call__(self, ctx: Any, call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return call(x)


def called(ctx: Any, call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return call(x)


@pytest.mark.parametrize(
    "forward",
    [
        staticmethod(torch.amp.custom_fwd(called, device_type="cpu")),
        staticmethod(decorated(called)),
        classmethod(lambda cls, ctx, call, x: call(x)),
        staticmethod(functools.partial(called)),
        Called(),
    ],
    ids=["custom_fwd", "decorated", "classmethod", "partial", "object"],
)
def test_a_forward_of_a_function_is_known_in_any_form(forward: Any) -> None:
    seen: list[bool] = []

    def look(x: Tensor) -> Tensor:
        seen.append(_inside_function())
        return x.clone()

    function: Any = type("Function", (torch.autograd.Function,), {"forward": forward})
    function.apply(look, torch.ones(1))
    look(torch.ones(1))
    assert seen == [True, False]


def test_what_a_function_keeps_for_its_backward_is_within_it() -> None:
    seen: list[bool] = []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:  # type: ignore[override]
            return x.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            seen.append(_inside_function())

    Function.apply(torch.ones(1))
    assert seen == [True]
