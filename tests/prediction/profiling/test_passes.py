"""Forward and backward of a whole model: operations and bytes exactly, seconds by their order of size."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headrace.prediction.profiling.passes import BatchPasses, accumulation_s, measure_passes
from headrace.training.user_code.objective import Objective


def squared(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


BATCH = torch.randn(16, 4), torch.randn(16, 2)


def passes(model: nn.Module) -> BatchPasses:
    return measure_passes(model, Objective(squared), BATCH, seconds=0.0)


def test_operations_and_bytes_are_counted() -> None:
    found = passes(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2, bias=False)))
    assert found.forward_flops == 2 * 16 * (4 * 8 + 8 * 2)
    # The input, what ReLU gives, and the difference that is squared.
    assert found.saved_bytes == 4 * 16 * (4 + 8 + 2)
    assert found.forward_s > 0
    assert found.backward_s > 0


def test_views_are_no_operations() -> None:
    class Viewed(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs.view(4, 4, 4).flatten(0, 1).view(16, 4))

    assert passes(Viewed(4, 2)).operations == passes(nn.Linear(4, 2)).operations > 4


class Slow(nn.Linear):
    """Takes 20 ms forward."""

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(0.02)
        return super().forward(inputs)


def test_forward_and_backward_are_told_apart() -> None:
    found = passes(Slow(4, 2))
    assert 0.02 <= found.forward_s < 0.1
    assert found.backward_s < 0.01


def test_adding_gradients_takes_longer_for_more_parameters() -> None:
    small, large = (nn.Linear(width, width) for width in (4, 1024))
    assert 0 < accumulation_s(small, 1) < accumulation_s(large, 1) < 0.1
    frozen = nn.Linear(1024, 1024).requires_grad_(False)
    assert accumulation_s(frozen, 1) < accumulation_s(large, 1)
    assert large.weight.grad is None


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2)).eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    passes(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_reentrant_checkpointing_is_measured_too() -> None:
    class Checkpointed(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            found: Tensor = checkpoint(super().forward, inputs.requires_grad_(), use_reentrant=True)
            return found

    model = Checkpointed(4, 2)
    assert passes(model).backward_s > 0
    assert model.weight.grad is None
