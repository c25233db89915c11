"""Weight gradients that are added up in place, or made later, are those of autograd; others are left to autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from headrace.pipeline.backward import WeightGradients

WIDTH = 260


def inputs(shape: tuple[int, ...] = (5,)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(*shape, WIDTH, generator=generator, requires_grad=True) for _ in range(3)]


def gradients(model: nn.Module, values: list[Tensor], call: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
    """Runs forward of all micro-batches, then backward of all."""
    model.zero_grad()
    for value in values:
        value.grad = None
    outputs = [call(value) for value in values]
    for output in outputs:
        output.square().sum().backward()
    return [each.grad for each in (*model.parameters(), *values)]


def added(model: nn.Module, values: list[Tensor]) -> list[Tensor | None]:
    """As `gradients`, of a linear layer that is called twice on the way."""
    weights = WeightGradients()
    with weights.adding():
        return gradients(model, values, lambda value: weights.call(model, weights.call(model, value)))


def same(these: list[Tensor | None], those: list[Tensor | None]) -> bool:
    def each(one: Tensor | None, other: Tensor | None) -> bool:
        if one is None or other is None:
            return one is other
        return torch.allclose(one, other, rtol=1e-12, atol=1e-12)

    return all(each(one, other) for one, other in zip(these, those, strict=True))


def is_ours(output: Tensor) -> bool:
    return output.grad_fn is not None and output.grad_fn.name() == "_WeightedBackward"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3)])
def test_what_is_added_up_is_what_autograd_adds_up(bias: bool, shape: tuple[int, ...]) -> None:
    layer = nn.Linear(WIDTH, WIDTH, bias).double()
    values = [value.detach().double().requires_grad_() for value in inputs(shape)]
    assert is_ours(WeightGradients().call(layer, values[0]))
    ours = [None if each is None else each.clone() for each in added(layer, values)]
    assert same(ours, gradients(layer, values, lambda value: layer(layer(value))))


@pytest.mark.parametrize("frozen", ["weight", "bias", "input"])
def test_what_is_frozen_gets_no_gradient(frozen: str) -> None:
    layer = nn.Linear(WIDTH, WIDTH).double()
    values = [value.detach().double() for value in inputs()]
    for value in values:
        value.requires_grad_(frozen != "input")
    if frozen != "input":
        getattr(layer, frozen).requires_grad_(False)
    ours = [None if each is None else each.clone() for each in added(layer, values)]
    assert any(each is None for each in ours)
    assert same(ours, gradients(layer, values, lambda value: layer(layer(value))))


def test_a_gradient_that_is_there_is_kept_in_its_place() -> None:
    layer, weights = nn.Linear(WIDTH, WIDTH), WeightGradients()
    layer.weight.grad = place = torch.ones(WIDTH, WIDTH)
    with weights.adding():
        weights.call(layer, inputs()[0]).sum().backward()
    assert layer.weight.grad is place
    assert not place.eq(1).all()


def test_a_loss_that_asks_for_one_gradient_adds_nothing_up() -> None:
    layer, weights = nn.Linear(WIDTH, WIDTH), WeightGradients()
    layer.weight.grad = torch.zeros(WIDTH, WIDTH)
    (value, *_) = inputs()
    loss = weights.call(layer, value).square().sum()
    (asked,) = torch.autograd.grad(loss, layer.weight, retain_graph=True)
    (of_value,) = torch.autograd.grad(loss, value, create_graph=True)
    assert layer.weight.grad.eq(0).all()
    (expected,) = torch.autograd.grad(layer(value).square().sum(), layer.weight)
    assert torch.allclose(asked, expected)
    # A penalty on a gradient is differentiated once more.
    (twice,) = torch.autograd.grad(of_value.square().sum(), layer.weight)
    again = copy.deepcopy(layer)
    (plain,) = torch.autograd.grad(again(value).square().sum(), value, create_graph=True)
    (expected,) = torch.autograd.grad(plain.square().sum(), again.weight)
    assert torch.allclose(twice, expected, rtol=1e-4)


def hooked(layer: nn.Linear) -> nn.Module:
    layer.register_forward_hook(lambda module, args, output: output)
    return layer


def heard(layer: nn.Linear) -> nn.Module:
    layer.weight.register_hook(lambda gradient: gradient)
    return layer


def awaited(layer: nn.Linear) -> nn.Module:
    layer.weight.register_post_accumulate_grad_hook(lambda weight: None)
    return layer


def sliced(layer: nn.Linear) -> nn.Module:
    """As a rank of tensor parallelism has it: it sums over ranks in its forward."""
    whole = layer.forward
    layer.forward = lambda value: 2 * whole(value)  # type: ignore[method-assign]
    return layer


class Own(nn.Linear):
    """A subclass, whose forward may be any."""


@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(8, 8),
        nn.Identity(),
        Own(WIDTH, WIDTH),
        hooked(nn.Linear(WIDTH, WIDTH)),
        heard(nn.Linear(WIDTH, WIDTH)),
        awaited(nn.Linear(WIDTH, WIDTH)),
        parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        nn.Linear(WIDTH, WIDTH).requires_grad_(False),
        sliced(nn.Linear(WIDTH, WIDTH)),
    ],
    ids=["small", "identity", "subclass", "hooked", "heard", "awaited", "parametrized", "frozen", "sliced"],
)
def test_what_is_more_than_a_large_linear_layer_is_called_as_it_is(layer: nn.Module) -> None:
    value = torch.randn(3, 8 if getattr(layer, "in_features", WIDTH) == 8 else WIDTH, requires_grad=True)
    output = WeightGradients().call(layer, value)
    assert not is_ours(output)
    assert torch.equal(output, layer(value))


def test_without_a_graph_and_under_autocast_the_layer_is_called_as_it_is() -> None:
    layer, (value, *_) = nn.Linear(WIDTH, WIDTH), inputs()
    with torch.no_grad():
        assert WeightGradients().call(layer, value).grad_fn is None
    with torch.autocast("cpu", torch.bfloat16):
        output = WeightGradients().call(layer, value)
    assert output.dtype == torch.bfloat16
    assert not is_ours(output)


LAYERS = {
    "linear": (nn.Linear(6, 5), (4, 6)),
    "linear-3d": (nn.Linear(6, 5, bias=False), (2, 3, 6)),
    "conv1d": (nn.Conv1d(4, 6, 3, padding=1, groups=2), (2, 4, 7)),
    "conv2d": (nn.Conv2d(3, 4, (3, 2), stride=2, dilation=(1, 2)), (2, 3, 8, 9)),
    "conv3d": (nn.Conv3d(2, 3, 2, bias=False), (2, 2, 4, 4, 4)),
}


def split_pass(layer: nn.Module, values: list[Tensor], half: torch.dtype | None = None) -> list[Tensor | None]:
    """As `gradients`, where every weight's gradient is made after all backward passes."""
    layer.zero_grad()
    weights = WeightGradients()
    weights.split = True
    later = []
    for value in values:
        value.grad = None
        with torch.autocast("cpu", half, enabled=half is not None):
            output = weights.call(layer, value)
        assert is_ours(output)
        with weights.deferring() as deferred:
            output.square().sum().backward()
        assert (value.grad is not None) == value.requires_grad
        later += deferred
    assert layer.weight.grad is None
    assert len(later) == len(values)
    for gradient in later:
        gradient.add()
    return [each.grad for each in (*layer.parameters(), *values)]


@pytest.mark.parametrize("wants", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_a_weight_gradient_that_is_made_later_is_that_of_autograd(name: str, wants: bool) -> None:
    layer, shape = copy.deepcopy(LAYERS[name])
    layer.double()
    values = [torch.randn(shape, dtype=torch.float64, requires_grad=wants) for _ in range(3)]
    ours = [None if each is None else each.clone() for each in split_pass(layer, values)]
    assert same(ours, gradients(layer, values, layer))


@pytest.mark.parametrize("name", ["linear", "conv2d"])
def test_under_autocast_a_weight_gradient_that_is_made_later_has_the_weights_type(name: str) -> None:
    layer, shape = copy.deepcopy(LAYERS[name])
    values = [torch.randn(shape, requires_grad=True) for _ in range(2)]

    def call(value: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(value)

    ours = [each.clone() for each in split_pass(layer, values, torch.bfloat16) if each is not None]
    theirs = [each for each in gradients(layer, values, call) if each is not None]
    assert [each.dtype for each in ours] == [each.dtype for each in theirs]
    assert all(torch.allclose(one, other, rtol=0.05, atol=0.05) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 4, 3, padding="same"),
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
        nn.ConvTranspose2d(3, 4, 3),
        hooked(nn.Conv2d(3, 4, 3)),  # type: ignore[arg-type]
        heard(nn.Conv2d(3, 4, 3)),  # type: ignore[arg-type]
    ],
    ids=["same", "reflect", "transposed", "hooked", "heard"],
)
def test_what_is_more_than_a_plain_convolution_is_left_to_autograd(layer: nn.Module) -> None:
    weights = WeightGradients()
    weights.split = True
    value = torch.randn(2, 3, 6, 6)
    assert torch.equal(weights.call(layer, value), layer(value))
    assert not is_ours(weights.call(layer, value))
