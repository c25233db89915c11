"""BatchNorm over the global batch, against torch's on one device."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from collectives.seats import together
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.training.shared_buffers.batch_norm import GlobalBatchNorm, averaged_buffers, synchronise_batch_norm

SPLITS = [(7,), (4, 3), (5, 1, 1), (6, 0, 1), (0, 7)]
SHAPES: dict[str, tuple[type[_BatchNorm], tuple[int, ...]]] = {
    "features": (nn.BatchNorm1d, (3,)),
    "series": (nn.BatchNorm1d, (3, 4)),
    "images": (nn.BatchNorm2d, (3, 2, 5)),
    "volumes": (nn.BatchNorm3d, (3, 2, 1, 2)),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "usual": {},
    "cumulative": {"momentum": None},
    "fixed": {"momentum": 0.0},
    "plain": {"affine": False},
    # An argument of later versions of torch than the oldest that headrace takes.
    **({"unbiased": {"bias": False}} if "bias" in signature(nn.BatchNorm1d).parameters else {}),
    "untracked": {"track_running_stats": False},
    "coarse": {"eps": 0.5, "momentum": 0.9},
}


@dataclass
class Passed:
    """What came out of some rounds of a layer: all rounds' outputs and input gradients, and what is left in it."""

    outputs: list[Tensor]
    input_gradients: list[Tensor]
    parameter_gradients: list[Tensor]
    buffers: dict[str, Tensor]
    evaluated: Tensor


def rounds(shape: tuple[int, ...], dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Returns inputs and the gradients of their outputs, `(7, channels, ...)`."""
    generator = torch.Generator().manual_seed(0)
    return [
        tuple((torch.randn(7, *shape, generator=generator, dtype=torch.float64) * 3 + 2).to(dtype) for _ in range(2))
        for _ in range(3)
    ]  # type: ignore[misc]


def passed(layer: nn.Module, inputs: list[tuple[Tensor, Tensor]]) -> Passed:
    outputs, gradients = [], []
    layer.train()
    for x, gradient in inputs:
        x = x.clone().requires_grad_()
        output = layer(x)
        output.backward(gradient.clone())  # autograd may keep it as a .grad, and add to it
        outputs.append(output.detach())
        gradients.append(x.grad)
    layer.eval()
    with torch.no_grad():
        # Without running statistics a worker evaluates by its own batch.
        evaluated = layer(inputs[0][0]) if dict(layer.named_buffers()) else torch.empty(0)
    found = [parameter.grad for parameter in layer.parameters()]
    return Passed(outputs, gradients, found, {n: b.clone() for n, b in layer.named_buffers()}, evaluated)


def made(kind: type[_BatchNorm], channels: int, dtype: torch.dtype, **options: Any) -> _BatchNorm:
    layer = kind(channels, **options).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(channels, generator=generator))
    return layer


def shared(layer: _BatchNorm, inputs: list[tuple[Tensor, Tensor]], split: tuple[int, ...]) -> list[Passed]:
    """Passes every worker's part of the inputs through its copy of the layer, all at the same time."""

    def act(host: ThreadCollective) -> Passed:
        low = sum(split[: host.rank])
        high = low + split[host.rank]
        return passed(GlobalBatchNorm(copy.deepcopy(layer), host), [(x[low:high], g[low:high]) for x, g in inputs])

    return together(len(split), act)


def assert_close(ours: Tensor, reference: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(ours, reference, rtol=tolerance, atol=tolerance)


@pytest.mark.each_value
@pytest.mark.parametrize("split", SPLITS, ids=str)
@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("options", sorted(OPTIONS))
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["double", "single"]
)
def test_any_split_is_normalised_as_one_batch(
    split: tuple[int, ...], shape: str, options: str, dtype: torch.dtype, tolerance: float
) -> None:
    kind, dims = SHAPES[shape]
    layer = made(kind, dims[0], dtype, **OPTIONS[options])
    inputs = rounds(dims, dtype)
    workers = shared(layer, inputs, split)
    one = passed(layer, inputs)
    for round_ in range(len(inputs)):
        assert_close(torch.cat([each.outputs[round_] for each in workers]), one.outputs[round_], tolerance)
        assert_close(
            torch.cat([each.input_gradients[round_] for each in workers]), one.input_gradients[round_], tolerance
        )
    for parts, whole in zip(
        zip(*(each.parameter_gradients for each in workers), strict=True), one.parameter_gradients, strict=True
    ):
        assert_close(torch.stack(parts).sum(0), whole, 10 * tolerance)
    for each in workers:
        assert each.buffers.keys() == one.buffers.keys()
        for name, buffer in one.buffers.items():
            assert_close(each.buffers[name], buffer, tolerance)
    assert_close(torch.cat([each.evaluated for each in workers]), one.evaluated, tolerance)


def test_evaluation_asks_no_other_rank() -> None:
    """A worker whose share of an evaluation batch is empty does not evaluate it."""

    def act(host: ThreadCollective) -> Tensor | None:
        layer = GlobalBatchNorm(nn.BatchNorm1d(3, track_running_stats=False), host).eval()
        return layer(torch.tensor([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])) if host.rank == 0 else None

    normal, nothing = together(2, act)
    assert nothing is None
    assert normal is not None
    assert_close(normal, torch.tensor([[-1.0, 0.0, 1.0], [1.0, 0.0, -1.0]]), 1e-4)


def test_digits_are_kept_where_the_mean_is_large() -> None:
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = nn.BatchNorm1d(3, affine=False).double()(x)
    far = (x + 1_000).float()
    (first, second) = together(
        2, lambda host: GlobalBatchNorm(nn.BatchNorm1d(3, affine=False), host)(far[4 * host.rank : 4 * host.rank + 4])
    )
    # A number around 1,000 has digits down to 6e-5.
    assert_close(torch.cat([first, second]).double(), exact, 1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_half(dtype: torch.dtype) -> None:
    x, gradient = rounds((3, 4), dtype)[0]
    mixed = made(nn.BatchNorm1d, 3, torch.float32)
    (ours,) = shared(mixed, [(x, gradient)], (7,))
    one = passed(mixed, [(x, gradient)])
    assert ours.outputs[0].dtype == ours.input_gradients[0].dtype == one.outputs[0].dtype == dtype
    assert_close(ours.outputs[0].float(), one.outputs[0].float(), 0.05)
    assert_close(ours.input_gradients[0].float(), one.input_gradients[0].float(), 0.05)


class Tree(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm1d(3, affine=False)))
        self.again = self.body[1]
        self.once = nn.BatchNorm1d(3)
        self.twice = self.once
        self.nothing = None
        self.layer = nn.LayerNorm(3)


def alone() -> ThreadCollective:
    return ThreadCollective(ThreadGroup(1), 0)


def test_every_layer_is_replaced_under_every_name_it_has() -> None:
    module = Tree()
    before = {name: tensor.data_ptr() for name, tensor in module.state_dict(keep_vars=True).items()}
    trained = [id(parameter) for parameter in module.parameters()]
    module.once.eval()
    assert synchronise_batch_norm(module, alone())
    assert not any(isinstance(layer, _BatchNorm) for layer in module.modules())
    replaced = {
        name for name, layer in module.named_modules(remove_duplicate=False) if isinstance(layer, GlobalBatchNorm)
    }
    assert replaced == {"body.1", "body.2.0", "again", "once", "twice"}
    assert {name: tensor.data_ptr() for name, tensor in module.state_dict(keep_vars=True).items()} == before
    assert [id(parameter) for parameter in module.parameters()] == trained
    assert [module.body[1].training, module.once.training, module.twice.training] == [True, False, False]


def test_a_model_without_such_layers_has_nothing_to_say() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Sequential(nn.GroupNorm(1, 3)))
    assert not synchronise_batch_norm(module, alone())
    assert averaged_buffers(module) == []


def test_a_checkpoint_averages_running_statistics_alone() -> None:
    module = nn.Sequential(
        nn.BatchNorm1d(2), nn.BatchNorm1d(2, track_running_stats=False), nn.Sequential(nn.BatchNorm2d(3))
    )
    expected = [module[0].running_mean, module[0].running_var, module[2][0].running_mean, module[2][0].running_var]
    assert [id(buffer) for buffer in averaged_buffers(module)] == [id(buffer) for buffer in expected]
    synchronise_batch_norm(module, alone())
    assert [id(buffer) for buffer in averaged_buffers(module)] == [id(buffer) for buffer in expected]
