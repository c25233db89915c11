"""Linear layers that write the gradients of their weights to the places of a sink."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from headrace.spec.job import Share
from headrace.spec.options import Options
from headrace.training import gradients as module
from headrace.training.user_code.objective import Objective
from headrace.training.whole_model import WholeModel

WIDTH = 8
ONES = Share((torch.ones(2, WIDTH), torch.ones(2, 1)), 2, 2, 0)


@pytest.fixture(autouse=True)
def small_weights_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_FEWEST_ELEMENTS", WIDTH * WIDTH)


class Kept:
    """A sink that keeps what it was given."""

    def __init__(self) -> None:
        self.gradients: list[Tensor | None] = []

    def store(self, gradients: Sequence[Tensor | None]) -> None:
        self.gradients = list(gradients)

    def store_nothing(self) -> None:
        raise AssertionError("every share has examples")


class Placed(Kept):
    """One that has places for the gradients of all parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.places = [torch.full_like(each, torch.nan).detach() for each in model.parameters()]

    def place(self, index: int) -> Tensor | None:
        return self.places[index]

    @property
    def written(self) -> set[int]:
        """The places that are the gradients."""
        pairs = zip(self.gradients, self.places, strict=True)
        return {index for index, (own, place) in enumerate(pairs) if own is not None and own is place}


class Layers(nn.Module):
    """Two layers of which the second has no bias, and how to go through them."""

    def __init__(self, way: Callable[[Layers, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, 1)
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.way(self, x))


FIRST, SECOND = 0, 2
"""The indices of the large weights."""


def in_turn(model: Layers, x: Tensor) -> Tensor:
    return model.second(torch.tanh(model.first(x)))


def of_several(model: Layers, x: Tensor) -> Tensor:
    return in_turn(model, torch.stack([x, x + 1, x * x], 1)).sum(1)


def of_many(model: Layers, x: Tensor) -> Tensor:
    return in_turn(model, torch.stack([x, x + 1, x * x, x - 1], 1).view(len(x), 2, 2, WIDTH)).sum((1, 2))


def of_several_in_another_order(model: Layers, x: Tensor) -> Tensor:
    return model.second(torch.tanh(model.first(torch.stack([x, x + 1, x * x]).transpose(0, 1)))).sum(1)


def transposed(model: Layers, x: Tensor) -> Tensor:
    return in_turn(model, x.t().contiguous().t())


def twice(model: Layers, x: Tensor) -> Tensor:
    return model.first(torch.tanh(model.second(model.first(x))))


def by_name(model: Layers, x: Tensor) -> Tensor:
    return model.second(torch.tanh(model.first(input=x)))


def computed_again(model: Layers, x: Tensor) -> Tensor:
    return checkpoint(lambda value: in_turn(model, value), x, use_reentrant=False)


def computed_again_inside(model: Layers, x: Tensor) -> Tensor:
    return checkpoint(lambda value: in_turn(model, value), x.requires_grad_(), use_reentrant=True)


def by_example(model: Layers, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda value: in_turn(model, value))(x[:, None])[:, 0]


def in_half(model: Layers, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        first = model.first(x)
    return model.second(first.float())


def with_the_gradient_in_the_loss(model: Layers, x: Tensor) -> Tensor:
    hidden = in_turn(model, x)
    (own,) = torch.autograd.grad(hidden.sum(), model.first.weight, create_graph=True)
    return hidden + own.square().sum()


class Nested(torch.autograd.Function):
    """Differentiates by the second weight in a backward pass of its own, twice."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, model: Layers) -> Tensor:
        ctx.model = model
        ctx.save_for_backward(value, weight)
        return functional.linear(value, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        value, weight = ctx.saved_tensors
        found = []
        for factor in (1.0, 2.0):
            with torch.enable_grad():
                output = ctx.model.second(value.detach() * factor)
            found += torch.autograd.grad(output, weight, gradient)
        return gradient @ weight, found[0] + 0.5 * found[1], None


def differentiated_within(model: Layers, x: Tensor) -> Tensor:
    return Nested.apply(torch.tanh(model.first(x)), model.second.weight, model)  # type: ignore[no-untyped-call,no-any-return]


def computed(way: Callable[[Layers, Tensor], Tensor], placed: bool, **options: Any) -> tuple[WholeModel, Kept]:
    """Returns what has computed two steps, of which the second counts."""
    torch.manual_seed(0)
    model = Layers(way)
    sink = Placed(model) if placed else Kept()
    compute = WholeModel(model, Objective(functional.mse_loss), sink, options=Options(**options))
    for _ in range(2):
        x, y = torch.randn(6, WIDTH), torch.randn(6, 1)
        compute.run(Share((x, y), 6, 6, 0))
    return compute, sink


@pytest.mark.parametrize(
    ("way", "written"),
    [
        (in_turn, {FIRST, SECOND}),
        (of_several, {FIRST, SECOND}),
        (of_many, {FIRST, SECOND}),
        (of_several_in_another_order, {SECOND}),
        (transposed, {FIRST, SECOND}),
        (twice, {SECOND}),
        (by_name, {SECOND}),
        (computed_again, {FIRST, SECOND}),
        (computed_again_inside, set()),
        (by_example, set()),
        (in_half, {SECOND}),
        (with_the_gradient_in_the_loss, {FIRST}),
        (differentiated_within, {FIRST}),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_every_gradient_has_the_bits_that_autograd_gives_it(
    way: Callable[[Layers, Tensor], Tensor], written: set[int]
) -> None:
    _, expected = computed(way, placed=False)
    _, sink = computed(way, placed=True)
    for own, other in zip(sink.gradients, expected.gradients, strict=True):
        assert (own is None and other is None) or torch.equal(own, other)
    assert isinstance(sink, Placed)
    assert sink.written == written


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"precision": "bf16"}], ids=str)
def test_what_is_summed_or_cast_is_made_in_new_memory(options: dict[str, Any]) -> None:
    _, expected = computed(in_turn, placed=False, **options)
    _, sink = computed(in_turn, placed=True, **options)
    for own, other in zip(sink.gradients, expected.gradients, strict=True):
        assert torch.equal(own, other)
    assert isinstance(sink, Placed)
    assert sink.written == set()


def test_a_hook_may_keep_the_gradient_that_it_is_given() -> None:
    kept: list[Tensor] = []
    torch.manual_seed(0)
    model = Layers(in_turn)
    model.first.weight.register_hook(kept.append)
    sink = Placed(model)
    compute = WholeModel(model, Objective(functional.mse_loss), sink)
    for _ in range(2):
        compute.run(Share((torch.randn(6, WIDTH), torch.randn(6, 1)), 6, 6, 0))
    assert sink.written == {SECOND}
    assert not torch.equal(*kept)


def test_outside_of_a_step_the_layers_are_as_they_were() -> None:
    compute, _ = computed(in_turn, placed=True)
    assert not any("forward" in vars(layer) for layer in compute.module.modules())

    def broken(model: Layers, x: Tensor) -> Tensor:
        assert "forward" in vars(model.first)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        computed(broken, placed=True)


def test_a_layer_with_a_forward_of_its_own_keeps_it() -> None:
    torch.manual_seed(0)
    model = Layers(in_turn)
    model.first.forward = lambda x: torch.zeros_like(x)  # type: ignore[method-assign]
    sink = Placed(model)
    WholeModel(model, Objective(functional.mse_loss), sink).run(ONES)
    assert sink.gradients[FIRST] is None
    assert "forward" in vars(model.first)


def test_a_layer_without_a_place_is_left_alone() -> None:
    torch.manual_seed(0)
    model = Layers(in_turn)
    sink = Placed(model)
    sink.place = lambda index: None if index == SECOND else sink.places[index]  # type: ignore[method-assign]
    seen: list[bool] = []

    def looking(own: Layers, x: Tensor) -> Tensor:
        seen.extend("forward" in vars(layer) for layer in (own.first, own.second))
        return in_turn(own, x)

    model.way = looking
    WholeModel(model, Objective(functional.mse_loss), sink).run(ONES)
    assert seen == [True, False]
    assert sink.written == {FIRST}
