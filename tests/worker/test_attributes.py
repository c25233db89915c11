"""The model that comes back is the one that was trained, wherever its constructor drew."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.api.exporting import trained
from headrace.errors import JobError
from headrace.worker.attributes import SameBuild, attributes_of, give_text
from headrace.worker.state import random_states

COUNTER = itertools.count(1)
_CPU = torch.device("cpu")
RNG = torch.Generator().manual_seed(1)
INPUTS = torch.randn(40, 4, generator=RNG, dtype=torch.float64)
CLASSES = (INPUTS[:, 0] > 0).long() + (INPUTS[:, 1] > 0).long()


def _fresh() -> Any:
    return np.random.default_rng().normal(size=(4, 4))


class _Holder:
    def __init__(self) -> None:
        self.inside = {"matrix": [_fresh()]}


def _from_closure() -> Callable[[], Any]:
    matrix = _fresh()
    return lambda: matrix


def _seeded(seed: int) -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "numpy": (lambda: np.random.randn(4, 4), torch.as_tensor),
    "random": (
        lambda: [[random.gauss(0, 1) for _ in range(4)] for _ in range(4)],
        lambda it: torch.tensor(it).double(),
    ),
    "urandom": (lambda: int.from_bytes(os.urandom(4), "big"), _seeded),
    "time": (lambda: {"at": torch.tensor(time.time() % 7).double()}, lambda it: torch.eye(4).double() * it["at"]),
    "hash": (lambda: hash("a name") % 1000, _seeded),
    "counter": (lambda: next(COUNTER), lambda it: torch.eye(4).double() * it),
    "tuple": (lambda: (_fresh(), "a name"), lambda it: torch.as_tensor(it[0])),
    "object": (_Holder, lambda it: torch.as_tensor(it.inside["matrix"][0])),
    "closure": (_from_closure, lambda it: torch.as_tensor(it())),
    "permutation": (lambda: np.random.default_rng().permutation(4).tolist(), lambda it: torch.eye(4).double()[it]),
    "bound": (lambda: threading.Lock(), lambda it: torch.eye(4).double()),
}


class Drawing(nn.Module):
    """Multiplies by a matrix that its constructor draws."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        draw, self.matrix = KINDS[kind]
        self.drawn = draw()
        self.register_buffer("scale", torch.from_numpy(np.random.default_rng().uniform(1, 2, 4)), persistent=False)
        self.head = nn.Linear(4, 3).double()

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.head(torch.tanh(inputs * self.scale @ self.matrix(self.drawn)))
        return output


def _job(model: Any, epochs: int = 1) -> hr.Job:
    return hr.Job(
        model=model, task=hr.tasks.multiclass(3), optimizer=partial(torch.optim.SGD, lr=0.1), data=(INPUTS, CLASSES),
        eval_data=(INPUTS, CLASSES), global_batch_size=20, epochs=epochs,
    )  # fmt: skip


def _loss(model: nn.Module) -> float:
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(INPUTS), CLASSES))


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_that_comes_back_was_trained(kind: str) -> None:
    before = random_states(_CPU)
    run = hr.fit(_job(partial(Drawing, kind)), hr.Mirrored(workers=2), engine=hr.ThreadEngine())
    assert _loss(run.model) == pytest.approx(run.metrics["loss"], abs=1e-12)
    after = random_states(_CPU)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hash", "closure", "bound"])
def test_the_model_that_comes_back_from_processes_was_trained(kind: str) -> None:
    run = hr.fit(_job(partial(Drawing, kind)), hr.Mirrored(workers=2))
    assert _loss(run.model) == pytest.approx(run.metrics["loss"], abs=1e-12)


def test_a_resumed_run_and_an_export_have_the_attributes_of_the_first_start(tmp_path: Path) -> None:
    make = partial(Drawing, "urandom")
    once = hr.fit(_job(make), run_dir=tmp_path, engine=hr.ThreadEngine()).model
    run = hr.fit(_job(make, epochs=2), run_dir=tmp_path, resume=True, engine=hr.ThreadEngine())
    assert run.model.drawn == once.drawn
    assert _loss(run.model) == pytest.approx(run.metrics["loss"], abs=1e-12)
    assert _loss(trained(_job(make), tmp_path)[1]) == pytest.approx(run.metrics["loss"], abs=1e-12)
    (tmp_path / "attributes.json").unlink()
    last = trained(_job(make), tmp_path, step=4)[1]
    assert _loss(last) == pytest.approx(run.metrics["loss"], abs=1e-12)


_LEFT: dict[str, Tensor] = {}


class Leaving(nn.Module):
    """Its constructor leaves a tensor in its class and in a global variable."""

    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3).double()
        type(self).factor = torch.full((4,), 2.0)
        _LEFT["shift"] = nn.Parameter(torch.ones(4)).detach()

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.head(inputs * self.factor + _LEFT["shift"])
        return output


def test_what_a_constructor_leaves_elsewhere_has_numbers_after_the_check() -> None:
    run = hr.fit(_job(Leaving), engine=hr.ThreadEngine())
    assert run.status == "ok"
    assert Leaving.factor.tolist() == [2.0] * 4
    assert _LEFT["shift"].tolist() == [1.0] * 4


def test_values_of_every_kind_are_carried_as_text() -> None:
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    for module, value in ((one, 1), (two, 2)):
        module.number, module.numbers, module.array = value, (value, value + 0.5), np.full(3, value)
        module.wave, module.single = [value + 1j], np.float32(value)
        module.tensor = torch.full((2,), value, dtype=torch.complex128)
    build = SameBuild(lambda: one)
    build()
    give_text(two, build.text())
    here, there = attributes_of(one), attributes_of(two)
    assert {path: repr(each.value) for path, each in here.items()} == {
        path: repr(each.value) for path, each in there.items()
    }
    assert {"number", "numbers", "array", "wave", "single", "tensor"} <= here.keys()


def test_numbers_of_the_process_stay_its_own() -> None:
    module = nn.Linear(2, 2)
    module.process = os.getpid()
    build = SameBuild(lambda: module)
    build()
    assert build.values is not None
    build.values["process"] = 1
    build.give(module)
    assert module.process == os.getpid()


def test_children_are_in_the_order_of_the_first_model() -> None:
    orders = iter([("a", "b"), ("b", "a")])
    build = SameBuild(lambda: nn.ModuleDict({name: nn.Linear(2, 2) for name in next(orders)}))
    build()
    assert list(build()) == ["a", "b"]


def test_a_model_of_other_layers_is_refused_with_the_remedy() -> None:
    depths = iter([1, 2])
    build = SameBuild(lambda: nn.Sequential(*(nn.Linear(2, 2) for _ in range(next(depths)))))
    build()
    with pytest.raises(JobError, match=r"other parameters and buffers than the launcher's.*PYTHONHASHSEED=0"):
        build()
