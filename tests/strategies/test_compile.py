"""Graph mode: the numbers of eager mode, compiled once, and nothing left behind.

Inductor takes seconds a graph, so the usual run has one case with it, that in processes; the others trace the same
graphs and run them as they are ("aot_eager"). With --full, every case is inductor's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from belongings import belongings, left_since
from headrace.engine.local.engine import LocalEngine
from headrace.errors import JobError, WorkerFailed
from headrace.training.fixed_shapes.graph_mode import CompiledModule
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


def compiled(case: Case) -> Case:
    return dataclasses.replace(case, options=dataclasses.replace(case.options, compile=True))


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
    # Looked at before the start; then three epochs, each with a last batch of 3 and an evaluation of 7 in fours.
    assert eagerly == [2, 2, *[3, 4, 3] * 3]


@pytest.mark.parametrize("strategy", [hr.ParameterServer(1), hr.ParameterServer(3, staleness_bound=0)], ids=["1", "3"])
def test_portions_run_compiled(strategy: hr.ParameterServer) -> None:
    case = compiled(Case(Watched))
    train(dataclasses.replace(case.job(COUNTS["uneven"]), eval_data=None), strategy)
    # A batch of 4 is cut into 4, or 2 + 1 + 1; the last of 3 into 3, or 1 + 1 + 1, which has a portion's size.
    assert eagerly == [2, *[3] * 3 * (strategy.workers == 1)]


def test_the_first_batch_may_be_the_short_one() -> None:
    """As in a run that goes on from the end of an epoch: it runs as it would have without the interruption."""
    module = nn.Linear(2, 2)
    graph = CompiledModule(module, 4)
    chosen = [graph.forward(examples) is module for examples in (3, 4, 4, 3, 4)]
    assert chosen == [True, False, False, True, False]


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
