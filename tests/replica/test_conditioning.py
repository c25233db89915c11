"""Norms and clipping, as torch does them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from headrace.replica.conditioning import clip_coefficient, squared_norm


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
