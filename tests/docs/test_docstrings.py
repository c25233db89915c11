"""The examples in the docstrings of public names run, and print what they show."""

from __future__ import annotations

import doctest
import functools
import importlib
import inspect
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as hr
from docs.pages import ROOT
from headrace.api import fit

FRONTS = {
    "hr": hr,
    **{f"hr.{name}": importlib.import_module(f"headrace.{name}") for name in ("data", "metrics", "tasks")},
}
NAMES = {f"{front}.{name}": getattr(module, name) for front, module in FRONTS.items() for name in module.__all__}
DOCSTRINGS = {name: inspect.getdoc(each) or "" for name, each in NAMES.items() if callable(each)}
SHOWN = sorted(name for name, text in DOCSTRINGS.items() if ">>> " in text)


def job() -> hr.Job:
    """What the examples train: four rounds."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(64, 4, generator=generator)
    data = inputs, (inputs.sum(1) > 0).long()
    return hr.Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)),
        task=hr.tasks.multiclass(2),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        data=data,
        eval_data=data,
        global_batch_size=16,
        epochs=1,
    )


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with two files for the simulator; on threads, since an example is shorter than a process's start."""
    for each in ("model.toml", "cluster.toml"):
        shutil.copy(ROOT / "examples" / "simulate" / each, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(fit, "kept_engine", lambda: nullcontext(hr.ThreadEngine()))


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN)
def test_the_example_of_a_name_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    known: dict[str, Any] = {"hr": hr, "torch": torch, "job": job()}
    example = doctest.DocTestParser().get_doctest(DOCSTRINGS[name], known, name, None, None)
    failed, tried = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example)
    assert tried > 0
    assert failed == 0, capsys.readouterr().out


def test_most_names_have_an_example() -> None:
    assert len(SHOWN) >= 80
