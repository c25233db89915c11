"""Runs that begin with stored values: the numbers of a plain loop that has loaded them, under each strategy."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import Tensor

import headrace as hr
from weights.models import Stack, job_of, loss, losses_of, stored, write

pytestmark = pytest.mark.slow

STRATEGIES: dict[str, hr.Strategy] = {
    "one_device": hr.OneDevice(),
    "mirrored": hr.Mirrored(2),
    "central_storage": hr.CentralStorage(2),
    "parameter_server": hr.ParameterServer(1),
    "fully_sharded": hr.FullySharded(3),
    "pipeline": hr.Pipeline(2),
    "tensor_parallel": hr.TensorParallel(2),
    "sharded replicas": hr.Hybrid(hr.Mirrored(2), hr.FullySharded(2)),
    "sharded stages": hr.Hybrid(hr.FullySharded(2), hr.Pipeline(2)),
    "sharded slices": hr.Hybrid(hr.FullySharded(2), hr.TensorParallel(2)),
    "replicas of stages": hr.Hybrid(hr.Mirrored(2), hr.Pipeline(2)),
    "servers of stages": hr.Hybrid(hr.ParameterServer(1, servers=2), hr.Pipeline(2)),
}
IN_PROCESSES = ("mirrored", "fully_sharded")
"""Workers that read the files in processes of their own; the others read them by the same code in threads."""
LEVELS = {"M": hr.Mirrored(2), "F": hr.FullySharded(2), "P": hr.Pipeline(2), "T": hr.TensorParallel(2)}
NESTINGS = ["".join(chosen) for count in (1, 2, 3, 4) for chosen in combinations(LEVELS, count)]


FORMS = {"one file": (1, False), "three files": (3, False), "tied": (2, True)}


def plain(tied: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Trains as a PyTorch script does; returns the losses and the trained values."""
    module, job, losses = Stack(tied), job_of(None, tied), []
    module.load_state_dict(stored(tied))
    optimizer = job.optimizer(module.named_parameters())  # type: ignore[operator]
    for _ in range(job.steps or 0):
        optimizer.zero_grad()
        value = loss(module(job.data[0]), job.data[1])
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses, module.state_dict()


def place(tmp_path: Path, files: int, tied: bool) -> Path:
    values = stored(tied)
    if tied:
        # As the library of transformers saves it: once.
        del values["head.weight"]
    return write(tmp_path / "weights", values, files)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_run_goes_on_from_stored_values_as_a_plain_loop_does(name: str, tmp_path: Path) -> None:
    files, tied = FORMS["one file" if "slices" in name or name == "tensor_parallel" else "tied"]
    folder, strategy = place(tmp_path, files, tied), STRATEGIES[name]
    losses, trained = plain(tied)
    engine = None if name in IN_PROCESSES else hr.ThreadEngine()
    run = hr.fit(job_of(folder, tied), strategy, device="cpu", engine=engine)
    found = losses_of(run)
    assert len(found) == len(losses)
    assert max(abs(one - two) for one, two in zip(found, losses, strict=True)) <= 1e-9
    state = run.model.state_dict()
    assert max(float((state[key] - each).abs().max()) for key, each in trained.items()) <= 1e-9


@pytest.mark.parametrize("name", STRATEGIES)
def test_values_are_those_of_the_files_bit_for_bit(name: str, tmp_path: Path) -> None:
    files, tied = FORMS["three files"]
    run = hr.fit(job_of(place(tmp_path, files, tied), steps=1, rate=0.0), STRATEGIES[name], device="cpu")
    state, values = run.model.state_dict(), stored()
    assert all(torch.equal(state[key], values[key]) for key in values)


@pytest.mark.full
@pytest.mark.parametrize("name", NESTINGS)
def test_every_nesting_reads_the_same_values_and_goes_on_alike(name: str, tmp_path: Path) -> None:
    levels = [LEVELS[each] for each in name]
    strategy = levels[0] if len(levels) == 1 else hr.Hybrid(*levels)
    folder = place(tmp_path, 3, False)
    # Only processes can have slices of stages.
    engine = None if "PT" in name else hr.ThreadEngine()
    run = hr.fit(job_of(folder, steps=1, rate=0.0), strategy, device="cpu", engine=engine)
    assert all(torch.equal(run.model.state_dict()[key], each) for key, each in stored().items())
    losses, trained = plain(False)
    run = hr.fit(job_of(folder), strategy, device="cpu", engine=engine)
    assert max(abs(one - two) for one, two in zip(losses_of(run), losses, strict=True)) <= 1e-9
    state = run.model.state_dict()
    assert max(float((state[key] - each).abs().max()) for key, each in trained.items()) <= 1e-9


def test_a_checkpoint_comes_before_stored_values(tmp_path: Path) -> None:
    job = job_of(place(tmp_path, 1, False))
    whole = hr.fit(job, device="cpu")
    for strategy in (hr.OneDevice(), hr.FullySharded(2)):
        hr.fit(replace(job, steps=2), strategy, device="cpu", run_dir=tmp_path / strategy.name)
        resumed = hr.fit(job, strategy, device="cpu", run_dir=tmp_path / strategy.name, resume=True)
        state = resumed.model.state_dict()
        assert max(float((state[key] - each).abs().max()) for key, each in whole.model.state_dict().items()) <= 1e-9
