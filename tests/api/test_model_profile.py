"""A job's profile, measured: its batch sizes and layers, and what is left out and said."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.api import model_profile
from headrace.api.model_profile import _own_size
from headrace.engine.local.engine import LocalEngine
from headrace.errors import JobError, UsageError
from headrace.machine.resources import cores
from headrace.policies.measurement import MachineLoad, Measurement
from headrace.spec.events import Stepped
from headrace.spec.model import ModelSpec

INPUTS = torch.randn(64, 16)
SGD = functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9)


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))


def job(model: Any = deep, **more: Any) -> hr.Job:
    options = {"optimizer": SGD, "data": (INPUTS, INPUTS.sum(1, keepdim=True)), "global_batch_size": 8, "epochs": 1}
    return hr.Job(model=model, task=hr.tasks.regression(), **(options | more))


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with LocalEngine() as engine:
        yield engine


@pytest.fixture
def profiled(engine: LocalEngine) -> Any:
    def measure(job: hr.Job, *sizes: int, said: list[str] | None = None) -> ModelSpec:
        say = (said if said is not None else []).append
        return hr.profile(job, device="cpu", threads=1, batch_sizes=sizes, seconds=0.01, engine=engine, say=say)

    return measure


@pytest.mark.slow
def test_a_profile_has_batches_layers_and_what_it_belongs_to(profiled: Any, tmp_path: Path) -> None:
    found = profiled(job(), 2, 100)
    compute = found.compute
    assert [batch.examples for batch in compute.batches] == [2, 8]
    assert [[layer.name for layer in batch.layers] for batch in compute.batches] == [["0", "1", "2"]] * 2
    assert all(min(batch.forward_s, batch.backward_s, compute.optimizer_s) > 0 for batch in compute.batches)
    assert compute.batches[1].saved_bytes == 4 * compute.batches[0].saved_bytes
    assert (compute.device, compute.threads) == ("cpu", 1)
    # As many workers as cores slow each other down, and a process holds more than the model.
    assert compute.crowd == cores()
    assert 1.0 <= compute.crowding < 50
    assert min(batch.workspace_bytes for batch in compute.batches) > 0
    assert found.flops_per_example == 2 * (16 * 32 + 32)
    # The parameter, its gradient, its momentum.
    assert (found.copies, found.trainable_bytes) == (3, 4 * (16 * 32 + 32 + 32 + 1))
    assert {"torch", "headrace", "machine", "digest", "precision"} <= set(found.origin)
    found.save(tmp_path / "model.json")
    assert ModelSpec.load(tmp_path / "model.json") == found


class Whole(nn.Module):
    """Cannot be cut: its path depends on the data. It takes no single example."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        if len(inputs) == 1 and self.training:
            raise ValueError("more than one, please")
        return inputs @ self.weight if inputs.sum() > 1e9 else inputs @ (self.weight * 2)


@pytest.mark.slow
def test_a_size_that_does_not_run_and_layers_that_are_not_there_are_said(profiled: Any) -> None:
    said: list[str] = []
    found = profiled(job(Whole, global_batch_size=4), 1, said=said)
    assert [batch.examples for batch in found.compute.batches] == [4]
    assert "batches of 1 are left out: the model cannot be trained on 1 examples: more than one, please" in said
    assert found.layers == ()
    assert any(line.startswith("the model is measured as a whole: Whole cannot be cut") for line in said)
    with pytest.raises(JobError, match="cannot be trained on 1 examples: more than one"):
        profiled(job(Whole, global_batch_size=1))


@pytest.mark.slow
def test_micro_batches_count_as_batches(profiled: Any) -> None:
    found = profiled(job(options=hr.Options(accumulate=3)))
    assert [batch.examples for batch in found.compute.batches] == [3]


@pytest.mark.slow
def test_a_busy_machine_is_tried_twice_and_said(profiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Measurement(1.0, 1, None, MachineLoad(2, 1, others=2.0))
    monkeypatch.setattr(model_profile, "measured", lambda run: (run(), busy))
    said: list[str] = []
    found = profiled(job(), said=said)
    assert said.count("steps of training of 8 examples") == 2
    assert found.origin["disturbed"] == ("while it trained on 8 examples, other programs kept 2.0 of 2 cores busy")


def slow(example: Any) -> Any:
    time.sleep(0.005)
    return example


@pytest.mark.slow
def test_what_decides_whether_a_gpu_would_help(tmp_path: Path) -> None:
    arrays = hr.data.from_arrays(INPUTS, INPUTS.sum(1, keepdim=True)).map(slow, parallel="inline")
    found = model_profile.job_facts(job(data=arrays), "deep", seconds=0.2)
    assert (found.name, found.examples, found.batch_bytes) == ("deep", 8, 4 * 8 * 17)
    # Two layers with three operations each way at most, the loss, and what autograd adds.
    assert 10 < found.operations < 60
    # A busy machine wakes it late.
    assert 5 < found.input_per_s < 200
    assert (found.gpu_step_s is None) != torch.cuda.is_available()


def stepped(time_s: float, compute_s: float) -> Stepped:
    return Stepped(0, time_s, 0, 0, 8, 0.5, 8, 0.001, compute_s, 0.0, 0.002)


def test_the_median_counts_or_the_quickest_steps_of_a_machine_that_is_not_idle() -> None:
    # Five steps of warm-up, then ten of 10 ms and ten of 30 ms.
    lengths = [0.5] * 5 + [0.010, 0.030] * 10
    steps = [stepped(sum(lengths[: index + 1]), length - 0.004) for index, length in enumerate(lengths)]
    middle, quick = (model_profile._typical(steps, quickest=quickest) for quickest in (False, True))
    assert middle.compute_s == pytest.approx(0.016)
    assert quick.compute_s == pytest.approx(0.006)
    assert quick.update_s == 0.002
    assert quick.rest_s == pytest.approx(0.001)
    assert quick.spread == middle.spread == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("how", [{"seconds": 0}, {"seconds": float("nan")}, {"batch_sizes": [0]}, {"threads": 0}])
def test_numbers_that_cannot_be_meant(how: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="must be a"):
        hr.profile(job(), **how)


def test_a_batch_is_a_micro_batch_and_no_more_than_there_is() -> None:
    data = (torch.zeros(20, 2), torch.zeros(20))
    sizes = {(16, 1): 16, (16, 4): 4, (18, 4): 5, (64, 2): 20}
    for (batch, pieces), size in sizes.items():
        job = hr.Job(
            model=nn.Identity, loss=nn.functional.mse_loss, optimizer=torch.optim.SGD, data=data,
            global_batch_size=batch, epochs=1, options=hr.Options(accumulate=pieces),
        )  # fmt: skip
        assert _own_size(job) == size
