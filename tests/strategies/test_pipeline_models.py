"""Models that are hard to cut train in stages as they do on one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

import headrace as hr
from headrace.trees import map_tensors
from pipeline.rendezvous import Devices, Meeting
from pipeline.test_evaluation import Layered, Skipping
from pipeline.zoo import ZOO
from strategies.contract_models import SGD, Case
from strategies.contract_runs import distance, drive
from strategies.test_pipeline import merged

COUNT = 10
WHOLE = ("dense", "direct", "gated", "tied")
"""Those that drop at random, count their calls or look at the whole batch do something else with pieces of it."""
DRAWS = ("dense", "tied")
"""Those that drop at random: threads draw from one generator, and none can draw again what it has drawn before."""


class Rows(torch.utils.data.Dataset[Any]):
    """Examples of a batch of any form, by their index."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return map_tensors(lambda tensor: tensor[index], self.batch)


def doubled(tree: Any) -> Any:
    return map_tensors(lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, tree)


def weighted(output: Any, batch: Any) -> Tensor:
    """Returns a mean over examples in which every element of every output counts, each in another way."""
    parts: list[Tensor] = []

    def add(tensor: Tensor) -> None:
        rows = tensor.flatten(1) if tensor.dim() > 1 else tensor[:, None]
        parts.append((rows * torch.linspace(1, 2, rows.shape[1], dtype=rows.dtype)).square().sum(1).mean())

    map_tensors(add, output)
    return torch.stack(parts).sum()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("name", sorted(ZOO))
def test_a_model_in_stages_is_one_device(name: str, schedule: str) -> None:
    case = ZOO[name]
    torch.manual_seed(0)
    model, batch = case.model().double(), doubled(case.batch(COUNT))
    data = Rows(batch) if isinstance(batch, dict) else (batch, torch.zeros(COUNT))
    normalises = any(isinstance(layer, _BatchNorm) for layer in model.modules())
    pieces, stages = 1 if normalises or name in WHOLE else 3, 2 if name == "writing" else 3
    job = hr.Job(
        model=model,
        loss=weighted,
        optimizer=partial(SGD, lr=1e-3),
        data=data,
        global_batch_size=8,
        epochs=2,
        seed=1,
    )
    pipeline = hr.Pipeline(stages, pieces, schedule, "never" if name in DRAWS else "always")
    outcomes = []
    for strategy, workers, wired in (
        (hr.OneDevice(), 1, False),
        (pipeline, stages, False),
        (pipeline, stages, Devices(Meeting(stages))),
    ):
        torch.manual_seed(2)
        outcomes.append(merged(drive(job, strategy, workers, 0, 4, wired=wired)))
    reference, trained, on_devices = outcomes
    assert distance(trained, reference) <= 1e-9
    assert distance(on_devices, reference) <= 1e-9
    assert distance(trained, model.state_dict()) > 0.0


class Auxiliary(Layered):
    """Another output from the middle, in training alone."""

    def forward(self, x: Tensor) -> Any:
        x = torch.relu(self.second(self.first(x)))
        return (self.head(x), self.third(x)) if self.training else self.head(x)


class Clamped(Layered):
    """A hook of autograd's graph makes its gradients others."""

    def forward(self, x: Tensor) -> Any:
        x = self.third(torch.relu(self.second(self.first(x))))
        if x.grad_fn is not None:
            x.grad_fn.register_prehook(lambda gradients: (gradients[0].clamp(-0.01, 0.01),))
        return self.head(x)


class Rounded(Layered):
    """What is saved for the backward pass is rounded."""

    def forward(self, x: Tensor) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda each: (8 * each).round() / 8, lambda each: each):
            x = self.third(torch.relu(self.second(self.first(x))))
        return self.head(x)


def both(output: Any, target: Tensor) -> Tensor:
    main, other = output if isinstance(output, tuple) else (output, None)
    loss = nn.functional.cross_entropy(main, target)
    return loss if other is None else loss + 0.3 * nn.functional.cross_entropy(other, target)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Auxiliary, Skipping, Clamped, Rounded])
def test_a_model_that_does_something_else_in_evaluation_is_one_device(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind().double()
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    x = torch.randn(COUNT, 4, dtype=torch.float64)
    job = hr.Job(
        model=model,
        loss=both,
        optimizer=partial(SGD, lr=0.1),
        data=(x, x.argmax(1)),
        eval_data=(x, x.argmax(1)),
        global_batch_size=5,
        epochs=1,
    )
    one, stages = (hr.fit(job, strategy, engine=hr.ThreadEngine()) for strategy in (hr.OneDevice(), hr.Pipeline(2, 2)))
    assert stages.metrics == pytest.approx(one.metrics, abs=1e-9)
    assert distance(stages.model.state_dict(), one.model.state_dict()) <= 1e-9


def scripted() -> nn.Module:
    torch.manual_seed(0)
    script = torch.jit.script(nn.Linear(4, 6).double())
    return nn.Sequential(nn.Linear(4, 4).double(), script, nn.Tanh(), nn.Linear(6, 3).double())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("partition", [[1, 3], [2, 2]])
def test_a_script_module_is_a_layer_of_one_stage(partition: list[int]) -> None:
    x = torch.randn(COUNT, 4, dtype=torch.float64)
    job = hr.Job(
        model=scripted,
        loss=nn.functional.cross_entropy,
        optimizer=partial(SGD, lr=0.1),
        data=(x, x[:, :3].argmax(1)),
        global_batch_size=5,
        epochs=1,
    )
    strategies = (hr.OneDevice(), hr.Pipeline(2, 2, partition=partition))
    one, stages = (hr.fit(job, strategy, device="cpu", engine=hr.ThreadEngine()) for strategy in strategies)
    assert distance(stages.model.state_dict(), one.model.state_dict()) <= 1e-9


class Waves(nn.Module):
    """What crosses the cut is complex: a spectrum, which the next layer filters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.weights = nn.Parameter(torch.rand(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.fft.irfft(torch.fft.rfft(self.first(x)) * self.weights, n=8))


@pytest.mark.parametrize("recompute", ["never", "except_last", "always"])
def test_complex_values_that_cross_a_cut_send_gradients_back(recompute: str) -> None:
    job = Case(Waves).job(COUNT)
    one = merged(drive(job, hr.OneDevice(), 1, 0, 3))
    two = merged(drive(job, hr.Pipeline(2, 4, "gpipe", recompute=recompute, partition=[1, 2]), 2, 0, 3))
    assert distance(two, one) <= 1e-9
