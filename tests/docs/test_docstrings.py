"""The docstrings of public names: all arguments are explained, and an example runs and prints what it shows."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import inspect
import itertools
import re
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as hr
from data.readers import tfrecord
from docs.pages import ROOT
from headrace.api import comparison, fit

FRONTS = {
    "hr": hr,
    **{
        f"hr.{name}": importlib.import_module(f"headrace.{name}") for name in ("accelerate", "data", "metrics", "tasks")
    },
}
NAMES = {f"{front}.{name}": getattr(module, name) for front, module in FRONTS.items() for name in module.__all__}
PACKAGES = {
    "hr.MLflow": "mlflow", "hr.WandB": "wandb", "hr.RayEngine": "ray", "hr.data.from_ray": "ray.data",
    "hr.from_lightning": "lightning", "hr.from_trainer": "accelerate",
}  # fmt: skip
"""That examples need and that need not be installed."""
MADE_BY_RUNS = ("hr.Moment", "hr.Worker")
FASHION_MNIST = Path.home() / ".cache" / "headrace" / "fashion-mnist"
RECORDS = tfrecord([b"\n\x10\n\x0e\n\x05label\x12\x05\x1a\x03\n\x01" + bytes([label]) for label in (0, 1)])
"""Two of `tf.train.Example`, each with a label."""


def docstring(name: str) -> str:
    """Returns a name's docstring; a value has it below the line that assigns it, as documentation tools read it."""
    value = NAMES[name]
    if not isinstance(value, functools.partial):
        return inspect.getdoc(value) or ""
    own = name.rpartition(".")[2]
    home = next(
        each for path, each in sys.modules.items() if path.startswith("headrace.strategies.") and own in vars(each)
    )
    body = ast.parse(inspect.getsource(home)).body
    for assigned, below in itertools.pairwise(body):
        if isinstance(assigned, ast.AnnAssign) and ast.unparse(assigned.target) == own:
            assert isinstance(below, ast.Expr)
            return inspect.cleandoc(ast.literal_eval(below.value))
    return ""


DOCSTRINGS = {name: docstring(name) for name, value in NAMES.items() if callable(value)}


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


@pytest.fixture(scope="module")
def profile() -> hr.ModelSpec:
    """The profile that several examples start from."""
    return hr.profile(job(), device="cpu", batch_sizes=(), seconds=0.01)


@pytest.fixture
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder with the files that are read; on threads, since an example is shorter than a process's start."""
    for each in ("model.toml", "cluster.toml"):
        shutil.copy(ROOT / "examples" / "simulate" / each, tmp_path)
    (tmp_path / "train-0.tfrecord").write_bytes(RECORDS)
    monkeypatch.chdir(tmp_path)
    for module in (fit, comparison):
        monkeypatch.setattr(module, "kept_engine", lambda: nullcontext(hr.ThreadEngine()))


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(
    "name",
    # Warnings of those packages are theirs.
    [
        pytest.param(name, marks=[pytest.mark.filterwarnings("default")] * (name in PACKAGES))
        for name in sorted(DOCSTRINGS)
    ],
)
def test_the_example_of_a_name_runs(
    name: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    if package := PACKAGES.get(name):
        pytest.importorskip(package)
    if name == "hr.data.fashion_mnist" and not FASHION_MNIST.exists():
        pytest.skip(f"{FASHION_MNIST} has no files")
    known: dict[str, Any] = {"hr": hr, "torch": torch, "job": job()}
    if re.search(r">>> .*\bprofile[,)]", DOCSTRINGS[name]):
        known["profile"] = request.getfixturevalue("profile")
    example = doctest.DocTestParser().get_doctest(DOCSTRINGS[name], known, name, None, None)
    failed, tried = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example)
    assert tried > 0, "there is no example"
    assert failed == 0, capsys.readouterr().out


def arguments(name: str) -> list[str]:
    """Returns what a caller of a public name can give."""
    if name in MADE_BY_RUNS or isinstance(NAMES[name], functools.partial):
        return []
    return [each for each in inspect.signature(NAMES[name]).parameters if not each.startswith("_")]


def written(value: object) -> bool:
    """Whether a function was written; a dataclass makes its own `__init__`."""
    return inspect.isfunction(value) and not value.__code__.co_filename.startswith("<")


@pytest.mark.parametrize("name", sorted(DOCSTRINGS))
def test_every_argument_and_error_is_explained(name: str) -> None:
    text = DOCSTRINGS[name]
    assert [each for each in arguments(name) if not re.search(rf"\b{each}\b", text)] == []
    value = NAMES[name]
    made = [vars(value).get(each) for each in ("__init__", "__post_init__")] if inspect.isclass(value) else [value]
    raises = any(re.search(r"^\s+raise \w+\(", inspect.getsource(each)) for each in made if written(each))
    assert not raises or "Raises:" in text
