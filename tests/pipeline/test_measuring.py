"""The layers of a job, on the first examples of its data."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.errors import UnfitMachine
from headrace.pipeline import profile as module_of_profile
from headrace.pipeline.profile import limited_threads, measure
from headrace.spec.model import ProfileRequest
from headrace.training.user_code.objective import Objective
from pipeline.zoo import Greedy


def squared(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def job_of(model: Any, options: hr.Options | None = None) -> hr.Job:
    return hr.Job(
        model=model,
        loss=squared,
        optimizer=partial(torch.optim.SGD, lr=0.1),
        data=(torch.randn(20, 4), torch.randn(20, 1)),
        global_batch_size=10,
        epochs=1,
        options=options or hr.Options(),
    )


def test_a_micro_batch_of_the_jobs_data_is_measured_and_the_model_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    job = job_of(model, hr.Options(precision="bf16"))
    threads = torch.get_num_threads()
    found = measure(job, model, Objective(squared), ProfileRequest(examples=5, threads=1), "cpu")
    assert [layer.name for layer in found.layers] == ["0", "1", "2"]
    # Five examples of eight numbers, in half precision.
    assert found.layers[0].crossing_bytes == 5 * 8 * 2
    assert torch.get_num_threads() == threads
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    every = measure(job, model, Objective(squared), ProfileRequest(examples=100), "cpu")
    assert every.layers[0].crossing_bytes == 20 * 8 * 2


class Big(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Any:
        return Greedy.apply(self.layer(x))  # type: ignore[no-untyped-call]


def test_what_there_is_no_memory_to_measure_says_so() -> None:
    job = job_of(Big)
    with pytest.raises(UnfitMachine, match=r"no memory to measure the layers of Big, .* a micro-batch of 5 examples: "):
        measure(job, Big(), Objective(squared), ProfileRequest(examples=5), "cpu")


class Keeps(nn.Linear):
    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = super().forward(x)
        return self.last


def test_what_a_forward_keeps_is_gone_when_it_has_been_measured() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Keeps(4, 1))
    job = job_of(model)
    measure(job, model, Objective(squared), ProfileRequest(examples=5), "cpu")
    assert copy.deepcopy(model)[1].last is None


PROGRAM = """
import os
from functools import partial
from pathlib import Path
import torch
from torch import nn
import headrace as hr
from headrace.pipeline.profile import measure
from headrace.training.user_code.objective import Objective
from headrace.spec.model import ProfileRequest

def resident_bytes():
    # Without what is of files, such as libraries, of which the system decides what is resident.
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGESIZE")

def squared(output, target):
    return ((output - target) ** 2).mean()

width, examples = 64, 4096
model = nn.Sequential(*(layer for _ in range(20) for layer in (nn.Linear(width, width), nn.Tanh())))
data = (torch.randn(examples, width), torch.zeros(examples, width))
job = hr.Job(
    model=model,
    loss=squared,
    optimizer=partial(torch.optim.SGD, lr=0.1),
    data=data,
    global_batch_size=examples,
    epochs=1,
)
# Once with little, so that what the first use allocates for good has been.
measure(job, model, Objective(squared), ProfileRequest(examples=64, threads=1), "cpu")
before = resident_bytes()
measure(job, model, Objective(squared), ProfileRequest(examples=examples, threads=1), "cpu")
print(resident_bytes() - before)
"""


@pytest.mark.usefixtures("real_python")
@pytest.mark.slow
def test_a_launcher_has_no_more_memory_when_it_has_measured() -> None:
    # In a process of its own: what else goes on in that of the tests takes memory too.
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    # Of 40 activations of 1 MB each.
    assert int(done.stdout) < 6 << 20


def test_a_model_is_traced_again_only_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.first, self.second, self.scale = nn.Linear(4, 4), nn.Linear(4, 1), scale

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).relu()) * self.scale

    def without_relu(self: Any, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * self.scale

    job = job_of(Net)
    traced: list[nn.Module] = []
    real = module_of_profile.trace

    def counted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        traced.append(module)
        return real(module, *args, **kwargs)

    monkeypatch.setattr(module_of_profile, "trace", counted)

    def traces(scale: float = 1.0, examples: int = 5) -> int:
        """Measures a new model, and returns how many were traced."""
        made = Net(scale)
        found = measure(job, made, Objective(squared), ProfileRequest(examples, threads=1), "cpu")
        assert [layer.name for layer in found.layers] == ["first", "second"]
        return len(traced)

    assert [traces(), traces()] == [1, 1]
    assert [traces(scale=2.0), traces(examples=6)] == [2, 3]
    monkeypatch.setattr(Net, "forward", without_relu)
    assert [traces(), traces()] == [4, 4]


def test_two_measurements_at_once_leave_the_number_of_threads_as_it_was() -> None:
    before, began, entered = torch.get_num_threads(), threading.Event(), threading.Event()
    told: list[int] = []

    def first() -> None:
        with limited_threads(1):
            began.set()
            # In vain: the second waits for the end of this.
            entered.wait(0.2)

    def second() -> None:
        began.wait()
        with limited_threads(1):
            entered.set()
            one.join()

    def run(function: Callable[[], object]) -> threading.Thread:
        thread = threading.Thread(target=function)
        thread.start()
        return thread

    torch.set_num_threads(2)
    try:
        one = run(first)
        run(second).join()
        run(lambda: told.append(torch.get_num_threads())).join()
        assert (torch.get_num_threads(), *told) == (2, 2)
    finally:
        torch.set_num_threads(before)
