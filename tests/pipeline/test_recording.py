"""Autograd functions that run while calls are recorded."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import headrace as hr
from headrace import internals
from headrace.errors import JobError
from headrace.pipeline.trace.frames import functions_with_backward, running
from headrace.pipeline.trace.tracing import trace


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
        seen.append(running(functions_with_backward()) is not None)
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
            seen.append(running(functions_with_backward()) is not None)

    Function.apply(torch.ones(1))
    assert seen == [True]


class Square(torch.autograd.Function):
    """Its `apply`, which is bound below, is none that can be traced: such models are replayed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


square = Square.apply
again = functools.partial(checkpoint, use_reentrant=False)


class Recomputed(nn.Module):
    """Recomputes what `between` says."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4, dtype=torch.float64) for _ in "abcd")
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        recomputed = {
            "alone": self.b,
            "with an operation": lambda x: torch.tanh(self.b(x)),
            "with another": lambda x: self.c(self.b(x)),
            "twice": lambda x: self.b(self.b(x)),
            "in two within one": lambda x: again(self.c, again(self.b, x)),
            "in a sequence": lambda x: checkpoint_sequential([self.b, self.c], 1, x, use_reentrant=False),
        }[self.between]
        x = again(recomputed, square(self.a(x)))
        return self.d(torch.tanh(x))  # type: ignore[no-any-return]


def job_of(model: nn.Module) -> hr.Job:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(24, 4, generator=generator, dtype=torch.float64)
    return hr.Job(
        model=model,
        loss=nn.functional.mse_loss,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        data=(x, x.flip(1)),
        global_batch_size=8,
        epochs=2,
    )


def test_a_module_that_is_recomputed_alone_is_replayed_and_trains_as_on_one_device() -> None:
    model = Recomputed("alone")
    alone, staged = (
        hr.fit(job_of(copy.deepcopy(model)), strategy, engine=hr.ThreadEngine()).model.state_dict()
        for strategy in (hr.OneDevice(), hr.Pipeline(2))
    )
    for name, tensor in alone.items():
        torch.testing.assert_close(staged[name], tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "between", ["with an operation", "with another", "twice", "in two within one", "in a sequence"]
)
def test_what_is_recomputed_together_is_not_cut_apart(between: str) -> None:
    """A stage would run again in backward what another stage has: the gradients were wrong, without a word."""
    with pytest.raises(JobError, match=r"torch\.utils\.checkpoint runs (b|c|b:2) and more in one function"):
        hr.fit(job_of(Recomputed(between)), hr.Pipeline(2), engine=hr.ThreadEngine())


def test_a_refused_model_leaves_nothing_of_its_checkpoints() -> None:
    """torch before 2.13 saves as a checkpoint does while the frame of one that failed is kept, here by the error."""
    with pytest.raises(JobError) as refused:  # which keeps it until this test ends
        hr.fit(job_of(Recomputed("with another")), hr.Pipeline(2), engine=hr.ThreadEngine())
    x = torch.ones(3, requires_grad=True)
    (x.exp() * x).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.full((3,), 2 * torch.e))
    assert "torch.utils.checkpoint" in str(refused.value)


class Through(torch.autograd.Function):
    """Rounds, and lets gradients through, which those of its operations would not be."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


through = Through.apply


class Rounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(4, 4, dtype=torch.float64) for _ in "ab")

    def forward(self, x: Tensor) -> Tensor:
        return self.b(through(self.a(x)))  # type: ignore[no-any-return]


def test_a_function_that_is_called_by_a_name_of_its_apply_keeps_its_backward() -> None:
    """From torch 2.14 on `apply` takes anything, and what forward does was traced in its place."""
    model = Rounded()
    alone, staged = (
        hr.fit(job_of(copy.deepcopy(model)), strategy, engine=hr.ThreadEngine()).model.state_dict()
        for strategy in (hr.OneDevice(), hr.Pipeline(2))
    )
    assert not torch.equal(alone["a.weight"], model.a.weight)
    for name, tensor in alone.items():
        torch.testing.assert_close(staged[name], tensor, rtol=1e-12, atol=1e-12)


class Fussy(nn.Linear):
    """Fails on three examples."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 3:
            raise ValueError("3 is no shape")
        return super().forward(x)


class Trying(nn.Module):
    """Sets an attribute, which no graph has, and may go on after an error of a layer."""

    def __init__(self, caught: tuple[type[Exception], ...]) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), Fussy(4, 4), nn.Linear(4, 4)
        self.caught = caught

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.shape
        try:
            x = self.second(self.first(x))
        except self.caught:
            x = x + 1
        return self.third(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("caught", "words"),
    [
        ((), "it fails on 3 examples: ValueError: 3 is no shape"),
        ((ValueError,), "depends on the number of examples: it calls third where it called second"),
    ],
)
def test_the_error_of_a_layer_is_told_as_it_is(caught: tuple[type[Exception], ...], words: str) -> None:
    """torch's modes said "pop from an empty deque" in its place."""
    with pytest.raises(JobError, match=words):
        trace(Trying(caught), torch.randn(2, 4))
    assert internals.function_modes() == internals.dispatch_modes() == 0
