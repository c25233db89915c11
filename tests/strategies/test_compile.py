"""Graph mode: the numbers of eager mode, compiled once, and nothing left behind.

Inductor takes seconds a graph, so the usual run has one case with it, that in processes; the others trace the same
graphs and run them as they are ("aot_eager"). With --full, every case is inductor's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from belongings import belongings, left_since
from headrace.api.probes import measured
from headrace.engine.local.engine import LocalEngine
from headrace.errors import JobError, UsageError, WorkerFailed
from headrace.spec.events import Notice
from headrace.spec.job import Share
from headrace.spec.options import check_options
from headrace.training.fixed_shapes.graph_mode import CompiledModule
from headrace.training.user_code.objective import Objective
from strategies.contract_models import COUNTS, MODELS, VARIANTS, Case, dense
from strategies.contract_runs import distance, drive, train
from strategies.test_contract import DOUBLE, ROWS, assert_equal, on_one_device

pytestmark = [
    pytest.mark.slow,
    # torch's own, where a model is compiled in pieces.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

CASES = {
    "mlp": MODELS["mlp"],
    "tied": MODELS["tied"],
    "idle": MODELS["idle"],
    "buffers": MODELS["buffers"],
    "partial": MODELS["partial"],
    "tokens": VARIANTS["tokens"],
    "accumulate": Case(dense, options=hr.Options(accumulate=2, clip_norm=0.3, ema_decay=0.8)),
}
WORKERS = [("one_device", 1), ("central_storage", 2), ("mirrored", 3)]
PAIRS = [(case, *WORKERS[index % 3]) for index, case in enumerate(sorted(CASES))]
"""To compile takes seconds, so each case goes with one strategy."""


def compiled(case: Case, how: bool | str = True) -> Case:
    return dataclasses.replace(case, options=dataclasses.replace(case.options, compile=how))


@pytest.fixture(autouse=True)
def _compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of processes are not reached by this, and have inductor."""
    if not request.config.getoption("--full"):
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """Every test compiles for itself."""
    torch.compiler.reset()
    eagerly.clear()
    yield
    torch.compiler.reset()


@pytest.mark.one
@pytest.mark.parametrize(("case", "name", "workers"), PAIRS)
def test_it_gives_the_numbers_of_eager_mode(case: str, name: str, workers: int) -> None:
    strategy = ROWS[name].make(workers)
    ranks = drive(compiled(CASES[case]).job(COUNTS["tiny"]), strategy, workers, 0, 9)
    reference = drive(CASES[case].job(COUNTS["tiny"]), strategy, workers, 0, 9)
    assert max(distance(one.tensors, other.tensors) for one, other in zip(ranks, reference, strict=True)) <= DOUBLE


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "workers"), [pytest.param(*one, marks=[pytest.mark.full] * (one[1] != 1)) for one in WORKERS]
)
def test_in_processes_too_and_none_is_left(name: str, workers: int) -> None:
    case = CASES["mlp"]
    before = belongings()
    with LocalEngine() as engine:
        outcome = train(compiled(case).job(COUNTS["uneven"]), ROWS[name].make(workers), engine)
    assert left_since(before) == {}
    assert_equal(outcome, on_one_device(case, "uneven", torch.float64, None), DOUBLE)


def test_a_short_last_batch_and_evaluations_run_eager() -> None:
    """A graph for their sizes would take seconds to compile."""
    train(compiled(Case(Watched)).job(COUNTS["uneven"]), hr.OneDevice())
    # Three epochs, each with a last batch of 3 and an evaluation of 7 in fours.
    assert eagerly == [3, 4, 3] * 3


@pytest.mark.parametrize("strategy", [hr.ParameterServer(1), hr.ParameterServer(3, staleness_bound=0)], ids=["1", "3"])
def test_portions_run_compiled(strategy: hr.ParameterServer) -> None:
    case = compiled(Case(Watched))
    train(dataclasses.replace(case.job(COUNTS["uneven"]), eval_data=None), strategy)
    # A batch of 4 is cut into 4, or 2 + 1 + 1; the last of 3 into 3, or 1 + 1 + 1, which has a portion's size.
    assert eagerly == [3] * 3 * (strategy.workers == 1)


def test_the_first_batch_may_be_the_short_one() -> None:
    """As in a run that goes on from the end of an epoch: it runs as it would have without the interruption."""
    module = nn.Linear(2, 2)
    graph = CompiledModule(module, 4)
    chosen = [graph.forward(examples) is module for examples in (3, 4, 4, 3, 4)]
    assert chosen == [True, False, False, True, False]


class Reused(nn.Module):
    """Stands in for a model in a CUDA graph: each call writes to the same memory."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.memory = module, torch.zeros(())

    def forward(self, *batch: Tensor) -> Tensor:
        self.memory.detach_().copy_(self.module(*batch).detach())
        return self.memory.view_as(self.memory)


@pytest.mark.parametrize(
    ("how", "arguments", "same"),
    [
        (True, {}, True),
        ("reduce-overhead", {"mode": "reduce-overhead"}, False),
        ("max-autotune", {"mode": "max-autotune"}, False),
        ("max-autotune-no-cudagraphs", {"mode": "max-autotune-no-cudagraphs"}, True),
        ("cudagraphs", {"backend": "cudagraphs"}, False),
    ],
)
def test_torch_gets_the_mode_and_a_loss_outlives_its_graph(
    how: bool | str, arguments: dict[str, str], same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, begun = [], []

    def compile_it(module: nn.Module, **chosen: str) -> nn.Module:
        given.append(chosen)
        return Reused(module)

    monkeypatch.setattr(torch, "compile", compile_it)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(len(begun)))
    graph = CompiledModule(Reused(nn.Sequential(nn.Linear(2, 1), nn.Flatten(0), Total())), 2, how)
    losses = []
    for value in (1.0, 2.0):
        x = torch.full((2, 2), value)
        losses.append(graph.loss(Objective(lambda output, target: output), (x, x), Share((x, x), 2, 2, 0)))
    assert given == [arguments]
    assert torch.equal(*losses) == same
    assert len(begun) == (0 if same else 2)


class Total(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compile": "fast"}, "compile is True, False, 'auto' or 'cudagraphs' or 'reduce-overhead' or .*, got 'fast'"),
        ({"compile": 1}, "compile is True, False, 'auto' or .*, got 1"),
        ({"compile": "reduce-overhead", "accumulate": 2}, "next micro-batch overwrites the gradients of a graph; use"),
        ({"compile": "auto", "memory_format": "auto"}, "memory_format='auto' with compile='auto'"),
    ],
)
def test_ways_of_compiling_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        hr.Options(**options)


def test_graphs_are_for_devices_that_have_them() -> None:
    check_options(hr.Options(compile="cudagraphs"), "cuda")
    with pytest.raises(UsageError, match="compile='cudagraphs' is for CUDA, and the device is cpu; use compile=True"):
        check_options(hr.Options(compile="cudagraphs"), "cpu")


@pytest.mark.parametrize(("slower", "chosen"), [(0.5, True), (2.0, False)])
def test_what_is_measured_decides(slower: float, chosen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda module: module)
    monkeypatch.setattr(measured, "_in_turn", lambda own, last, share: (1.0, slower))
    job = compiled(CASES["mlp"], "auto").job(COUNTS["even"])
    run = hr.fit(job, hr.OneDevice(), engine=hr.ThreadEngine(), check=False)
    notices = [event.text for event in run.events if isinstance(event, Notice)]
    assert any(f"compile: {chosen}; {1e3 * slower:.2f} ms a step with True, after" in each for each in notices)


eagerly: list[int] = []
"""Sizes of the batches that `Watched` has run eager."""


class Watched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            eagerly.append(len(x))
        return self.layer(x)


def refuse(*_: object) -> None:
    raise RuntimeError("no such compiler")


def test_a_model_that_cannot_be_compiled_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=refuse))
    job = compiled(CASES["mlp"]).job(COUNTS["even"])
    with pytest.raises(JobError, match=r"cannot be compiled: .*no such compiler.*use compile=False"):
        train(job, hr.OneDevice())


def test_an_error_of_the_model_is_the_models() -> None:
    class Bang(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                raise ValueError("bang")
            return self.layer(x)

    with pytest.raises(WorkerFailed, match="ValueError: bang"):
        train(compiled(Case(Bang)).job(COUNTS["even"]), hr.OneDevice())
