"""What a program sets for its process holds in its workers' processes, or the run is refused."""

from __future__ import annotations

import functools
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import headrace as hr
from headrace.errors import UsageError, WorkerFailed
from headrace.worker.guards.caller import _SETTINGS, read_caller, take_settings
from headrace.worker.guards.witness import updates_of

X = torch.linspace(-1, 1, 32).view(-1, 4)
JOB = hr.Job(
    model=partial(nn.Linear, 4, 1),
    loss=nn.functional.mse_loss,
    optimizer=partial(torch.optim.SGD, lr=0.1),
    data=(X.double(), X[:, :1].double()),
    global_batch_size=8,
    steps=2,
)
CHANGES: dict[str, Callable[[], object]] = {
    "argv": lambda: setattr(sys, "argv", ["train.py", "--lr", "0.5"]),
    "recursion": lambda: sys.setrecursionlimit(4321),
    "numpy errors": lambda: np.seterr(over="raise"),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "deterministic": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "precision": lambda: torch.set_float32_matmul_precision("high"),
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "flush denormal": lambda: torch.set_flush_denormal(True),
    "attention fast path": lambda: torch.backends.mha.set_fastpath_enabled(False),
    "cudnn benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
}


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = read_caller()
    yield
    take_settings(before)


def compare(wanted: dict[str, Any], worker: hr.Worker) -> None:
    found = {name: read() for name, (read, _) in _SETTINGS.items()}
    assert found == wanted, "a worker's process"
    for batch in worker.batches():
        worker.step(batch)


@pytest.mark.slow
def test_a_worker_has_the_settings_of_the_caller() -> None:
    before = dict(read_caller().settings)
    for change in CHANGES.values():
        change()
    wanted = dict(read_caller().settings)
    assert {name for name in wanted if wanted[name] != before[name]} == CHANGES.keys()
    run = hr.launch(partial(compare, wanted), JOB, hr.Mirrored(workers=2))
    # A function builds it there.
    assert {each.dtype for each in run.model.parameters()} == {torch.float64}


@pytest.mark.slow
def test_precisions_of_backends_are_taken_too() -> None:
    """In a process of its own: torch then never says the older numbers again."""
    script = (
        "import sys, torch; from headrace.worker.guards.caller import read_caller as read, take_settings\n"
        "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'; wanted = read()\n"
        "torch.backends.mkldnn.matmul.fp32_precision = 'ieee'; assert read() != wanted\n"
        "take_settings(wanted); assert read() == wanted; assert torch.backends.mkldnn.matmul.fp32_precision == 'bf16'"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("engine", [None, hr.ThreadEngine()])
def test_modes_that_workers_would_not_be_in_are_refused(engine: hr.Engine | None) -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UsageError, match=r"within torch.autocast.*precision="):
        hr.fit(JOB, hr.Mirrored(2), engine=engine)
    with torch.device("meta"), pytest.raises(UsageError, match="torch's default device is meta here"):
        hr.fit(JOB, hr.Mirrored(2), engine=engine)
    for mode in (torch.autograd.graph.save_on_cpu(), TorchDispatchMode()):
        with mode, pytest.raises(UsageError, match=r"within torch.autograd.graph.saved_tensors_hooks .* outside"):
            hr.fit(JOB, hr.Mirrored(2), engine=engine)


class Drawing(nn.Module):
    """Draws numbers that no seed decides, as it is built and in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.generator = nn.Linear(4, 1), np.random.default_rng()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) * float(self.generator.random())


def coupled() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))


@pytest.mark.slow
@pytest.mark.every
@pytest.mark.parametrize("model", [Drawing, Drawing(), coupled, coupled()], ids=lambda model: repr(model)[:20])
def test_models_that_compute_the_same_are_trained(model: Any) -> None:
    job = replace(JOB, model=model, data=(X, X[:, :1]))
    assert hr.fit(job, hr.Mirrored(workers=2)).status == "ok"


@pytest.mark.slow
def test_a_worker_that_computes_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's program has replaced a function of torch, which its workers import anew."""
    job = replace(JOB, model=coupled, data=(X, X[:, :1]))
    monkeypatch.setattr(nn.functional, "relu", lambda inputs, inplace: nn.functional.softplus(inputs))
    assert hr.fit(job, hr.Mirrored(2), engine=hr.ThreadEngine()).status == "ok"
    with pytest.raises(WorkerFailed, match=r"the loss of the first examples is .* in this worker's process and"):
        hr.fit(job, hr.Mirrored(workers=2))


MODULE = """
import torch
RATE = 0.1

def optimizer(named):
    return torch.optim.SGD(named, lr=RATE)
"""


@pytest.mark.slow
@pytest.mark.every
def test_a_worker_whose_optimizer_is_another_one_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller's program has changed a number of a module, or the step of a class, that its workers import anew."""
    (tmp_path / "rates_of_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("rates_of_test")
    job = replace(JOB, optimizer=module.optimizer, data=(X, X[:, :1]))
    assert hr.fit(job, hr.Mirrored(workers=2)).status == "ok"
    module.RATE = 0.2
    with pytest.raises(WorkerFailed, match=r"'lr' of the optimizer's group 0 is 0\.1 in .* and 0\.2"):
        hr.fit(job, hr.Mirrored(workers=2))
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self, closure=None: None)
    with pytest.raises(WorkerFailed, match=r"the code of the optimizer's step is SGD \w+ in this worker's process"):
        hr.fit(replace(job, optimizer=partial(torch.optim.SGD, lr=0.1)), hr.Mirrored(workers=2))


def test_wrappers_of_torch_itself_are_no_other_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's compiler puts one around RAdam's step, when a program imports it."""
    job, model = replace(JOB, optimizer=partial(torch.optim.RAdam, lr=0.1)), JOB.model()
    before = updates_of(job, model)
    monkeypatch.setattr(torch.optim.RAdam, "step", torch.no_grad()(torch.optim.RAdam.step))
    assert updates_of(job, model) == before
    monkeypatch.setattr(torch.optim.RAdam, "step", functools.wraps(torch.optim.RAdam.step)(lambda self: None))
    assert updates_of(job, model) != before


def test_hooks_of_all_optimizers_are_refused_where_workers_would_not_have_them() -> None:
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        with pytest.raises(UsageError, match="hooks of all optimizers"):
            hr.fit(JOB, hr.Mirrored(2))
    finally:
        handle.remove()
