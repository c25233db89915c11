"""Measured layers: bytes exactly, seconds by their order of size."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace.models import mlp
from headrace.modules import describe
from headrace.pipeline.layer_cost import _saved, kept_bytes
from headrace.pipeline.partition import Terms, split
from headrace.pipeline.profile import profile
from headrace.training.user_code.objective import Objective
from headrace.trees import map_tensors
from pipeline.zoo import ZOO, Normalised


def total(output: Any, _: Any) -> Tensor:
    parts: list[Tensor] = []
    map_tensors(lambda tensor: parts.append(tensor.sum()), output)
    return torch.stack(parts).sum()


def peak_bytes(act: Callable[[], object]) -> int:
    """Returns the most memory that this process holds while it does something."""
    Path("/proc/self/clear_refs").write_text("5")
    act()
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


def test_bytes_are_those_of_parameters_of_what_autograd_keeps_and_of_what_crosses() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2, bias=False), nn.Tanh())
    found = profile(model, Objective(total), (torch.randn(16, 4), None), seconds=0)
    assert [layer.name for layer in found.layers] == ["0", "1", "2", "3"]
    assert [layer.parameter_bytes for layer in found.layers] == [4 * 40, 0, 4 * 16, 0]
    # The input; what ReLU gives, which the matrix needs as well; nothing; what Tanh gives.
    assert [layer.saved_bytes for layer in found.layers] == [4 * 16 * 4, 4 * 16 * 8, 0, 4 * 16 * 2]
    assert [layer.crossing_bytes for layer in found.layers] == [4 * 16 * 8, 4 * 16 * 8, 4 * 16 * 2, 0]
    assert all(layer.forward_s > 0 and layer.backward_s > 0 for layer in found.layers)
    assert found.sweeps == 5
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_of_a_sparse_tensor_the_values_count(layout: torch.layout) -> None:
    graph = torch.eye(5).to_sparse(layout=layout)
    nodes = torch.randn(5, 3, requires_grad=True)
    kept, _ = kept_bytes(lambda: torch.sparse.mm(graph, nodes), lambda found: [found])
    assert 4 * 5 in kept.values()


def test_what_passes_by_crosses_too() -> None:
    case = ZOO["unet"]
    found = profile(case.model(), Objective(total), (case.batch(2), None), seconds=0)
    crossing = {layer.name: layer.crossing_bytes for layer in found.layers}
    high, low = 4 * 2 * 2 * 8 * 12, 4 * 2 * 4 * 4 * 6
    assert crossing["first"] == high
    assert crossing["pool"] == high + high // 4
    assert crossing["second"] == high + low
    assert crossing["pool:2"] == high + low + low // 4


def test_layers_that_cannot_be_parted_are_measured_together() -> None:
    found = profile(Normalised(), Objective(total), (torch.randn(8, 4), None), seconds=0)
    assert [(layer.name, layer.joined, layer.forward_s > 0) for layer in found.layers] == [
        ("first", False, True),
        ("norm", True, False),
        ("second", True, False),
        ("norm:2", False, True),
        ("head", False, True),
    ]


def test_a_layer_with_a_hundred_times_the_work_takes_longer() -> None:
    model = mlp(4, 2048, 4)
    found = profile(model, Objective(total), (torch.randn(64, 4), None), seconds=0, threads=1)
    seconds = {layer.name: layer.forward_s + layer.backward_s for layer in found.layers}
    assert max(seconds, key=seconds.__getitem__) == "2"
    assert seconds["2"] > 5 * seconds["1"]
    assert seconds["2"] > 5 * seconds["3"]


@pytest.mark.parametrize("name", ZOO)
def test_each_model_is_measured_and_can_be_split(name: str) -> None:
    case = ZOO[name]
    model = case.model()
    found = profile(model, Objective(total), case.batch(2) if name == "several" else (case.batch(2), None), seconds=0)
    spec = replace(describe(model), layers=found.layers)
    for stages in range(1, min(4, 1 + sum(not layer.joined for layer in found.layers[:-1])) + 1):
        assert len(split(spec, stages, Terms())) == stages


@pytest.mark.slow
def test_never_more_than_one_layers_activations_and_gradients_are_there() -> None:
    width, examples, blocks = 64, 4096, 60
    model = nn.Sequential(*(layer for _ in range(blocks) for layer in (nn.Linear(width, width), nn.Tanh())))
    batch, one = torch.randn(examples, width), 4 * examples * width
    before = peak_bytes(lambda: None)
    grown = peak_bytes(
        lambda: profile(model, Objective(total), (batch, None), sample=(batch[:2], None), seconds=0, threads=1)
    )
    # Of 120 activations, and gradients of theirs.
    assert grown - before < 40 * one, f"{(grown - before) / one:.1f} activations"
    assert all(parameter.grad is None for parameter in model.parameters())


class Inward(nn.Linear):
    """The gradient of a sum of squares by its input."""

    def forward(self, x: Tensor) -> Any:
        return torch.func.vmap(torch.func.grad(lambda v: super(Inward, self).forward(v).square().sum()))(x)


def test_a_layer_that_refuses_hooks_is_measured() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Inward(4, 4), nn.Linear(4, 4))
    found = profile(model, Objective(total), (torch.randn(8, 4), None), seconds=0)
    assert [layer.name for layer in found.layers] == ["0", "1", "2"]
    # At least what its weight's gradient needs: its input and what is differentiated there.
    assert found.layers[1].saved_bytes >= 2 * 8 * 4 * 4
    (notice,) = found.notices
    assert notice.startswith("Inward is one layer, not cut")


def test_what_a_graph_shows_is_what_hooks_see() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4)), torch.randn(3, 8, 4)
    seen: dict[int, int] = {}

    def see(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
        kept, _ = model(x)
    shown = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in _saved([model(x)[0]])}
    assert kept.requires_grad
    assert sum(shown.values()) == sum(seen.values())


def sleep(*_: object) -> None:
    time.sleep(0.02)


def test_a_layer_that_sleeps_takes_as_long_as_it_does() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].register_forward_hook(sleep)
    found = profile(model, Objective(total), (torch.randn(8, 4), None), seconds=0)
    assert [layer.forward_s > 0.02 for layer in found.layers] == [False, True, False]
    assert all(layer.backward_s < 0.01 for layer in found.layers)
