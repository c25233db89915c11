"""Norms and clipping, as torch does them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from collectives.seats import together
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.spec.options import Options
from headrace.training.clipping import (
    HEALTHY,
    GradientClipper,
    LossScale,
    StepDecision,
    all_finite,
    clip_coefficient,
    squared_norm,
)


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 4), (5,), (0,), ())]


def test_a_norm_is_over_all_elements_in_double_precision() -> None:
    flat = torch.cat([tensor.flatten() for tensor in tensors()])
    assert squared_norm(tensors()) == pytest.approx(float(flat.square().sum()), rel=1e-14)
    assert squared_norm([]) == 0.0
    assert squared_norm([torch.full((4,), 1e30)]) == pytest.approx(4e60, rel=1e-6)


@pytest.mark.parametrize("clip_norm", [1e-3, 1.0, 3.0, 1e6])
def test_clipping_is_that_of_torch(clip_norm: float) -> None:
    parameters = [nn.Parameter(torch.zeros_like(tensor)) for tensor in tensors()]
    for parameter, tensor in zip(parameters, tensors(), strict=True):
        parameter.grad = tensor
    nn.utils.clip_grad_norm_(parameters, clip_norm)
    factor = clip_coefficient(clip_norm, squared_norm(tensors()))
    assert factor <= 1
    for parameter, tensor in zip(parameters, tensors(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, tensor * factor, rtol=1e-14, atol=0)


def test_no_gradient_is_not_clipped() -> None:
    assert clip_coefficient(1.0, 0.0) == 1.0
    assert clip_coefficient(1.0, float("inf")) == 0.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_finite_counts_as_finite_and_the_rest_does_not(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    huge = [torch.full((7, 9), most, dtype=dtype), torch.full((3,), -most, dtype=dtype), torch.zeros(0, dtype=dtype)]
    assert all_finite(huge)
    assert all_finite([])
    for bad in (math.nan, math.inf, -math.inf):
        for place in range(63):
            huge[0].view(-1)[place] = bad
            assert not all_finite(huge)
            huge[0].view(-1)[place] = most
    assert not all_finite([torch.tensor([math.inf, -math.inf], dtype=dtype)])
    assert not all_finite([torch.tensor([math.inf]), torch.tensor([-math.inf])])


def conditioned(options: Options, gradients: list[Tensor], finite: tuple[bool, ...]) -> list[StepDecision]:
    """Lets every rank hold its part of each gradient."""
    world = len(finite)

    def act(host: ThreadCollective) -> StepDecision:
        own = [tensor.view(-1).tensor_split(world)[host.rank] for tensor in gradients]
        return GradientClipper(options, host).clip(own, own, finite[host.rank])

    return together(world, act)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("norm", "value"), [(None, 0.3), (1.0, None), (1.0, 0.3), (None, None)])
def test_pieces_on_many_ranks_are_clipped_as_the_whole(world: int, norm: float | None, value: float | None) -> None:
    ours = [tensor for tensor in tensors() if tensor.dim()]
    parameters = [nn.Parameter(torch.zeros_like(tensor)) for tensor in ours]
    for parameter, tensor in zip(parameters, ours, strict=True):
        parameter.grad = tensor.clone()
    if value is not None:
        nn.utils.clip_grad_value_(parameters, value)
    if norm is not None:
        nn.utils.clip_grad_norm_(parameters, norm)
    options = Options(clip_norm=norm, clip_value=value)
    assert conditioned(options, ours, (True,) * world) == [HEALTHY] * world
    for parameter, tensor in zip(parameters, ours, strict=True):
        torch.testing.assert_close(tensor, parameter.grad, rtol=1e-14, atol=0)


@pytest.mark.parametrize("finite", [(False, True, True), (True, False, False), (False,) * 3, (True,) * 40 + (False,)])
def test_all_are_told_whose_loss_is_not_finite(finite: tuple[bool, ...]) -> None:
    guilty = tuple(rank for rank, well in enumerate(finite) if not well)
    before = tensors()[0]
    gradient = before.clone()
    assert conditioned(Options(clip_norm=1e-3), [gradient], finite) == [StepDecision(False, guilty)] * len(finite)
    assert torch.equal(gradient, before)


def test_without_a_need_to_look_an_accelerator_is_not_waited_for() -> None:
    gradients = [torch.full((3,), math.nan)]
    looked = [options for options in LOOKING if not condition_late(options, gradients).apply]
    assert looked == LOOKING[1:]


LOOKING = [Options(clip_value=1.0), Options(clip_norm=1.0), Options(on_nonfinite="skip")]
"""The first does not ask to look at every round."""


def condition_late(options: Options, gradients: list[Tensor]) -> StepDecision:
    return GradientClipper(options, ThreadCollective(ThreadGroup(1), 0), immediate=False).clip(
        gradients, gradients, True
    )


def test_it_follows_torchs_grad_scaler() -> None:
    scale, growth = torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
    ours = LossScale()
    values = []
    for round_ in range(12_000):
        overflow = round_ in (100, 150, 6000)
        torch._amp_update_scale_(scale, growth, torch.tensor(float(overflow)), 2.0, 0.5, 2000)
        if overflow:
            ours.shrink()
        else:
            ours.grow()
        assert ours.value * ours.inverse == 1.0
        values.append(ours.value)
        assert ours.settings() == {"value": float(scale), "good": int(growth)}
    assert min(values) < 2.0**16 < max(values)


def test_its_state_is_taken_up() -> None:
    one, other = LossScale(), LossScale()
    for _ in range(1500):
        one.grow()
    one.shrink()
    one.grow()
    other.load(one.settings())
    assert other.settings() == {"value": 2.0**15, "good": 1}
