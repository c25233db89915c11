"""Tensor parallelism beyond the contract: dropout, checkpoints for other strategies, rules, refusals."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import headrace as hr
from headrace.engine.base import Engine
from headrace.engine.local.engine import LocalEngine
from headrace.errors import UnknownName, UsageError
from headrace.spec.events import Notice
from strategies.contract_runs import Outcome, distance, train

TWO = hr.TensorParallel(devices=2)
HYBRID = hr.Hybrid(hr.Mirrored(workers=2), TWO)
AVERAGING = hr.ParameterAveraging(workers=2, period=3)
AVERAGING_SLICES = hr.Hybrid(AVERAGING, TWO)
ADAM = functools.partial(torch.optim.Adam, lr=0.01)


def dense(dropout: float = 0.0) -> nn.Module:
    layers = (nn.Linear(8, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 8), nn.Dropout(dropout), nn.Linear(8, 4))
    return nn.Sequential(*layers).double()


def job(model: Callable[[], nn.Module] = dense, steps: int = 8, **options: object) -> hr.Job:
    generator = torch.Generator().manual_seed(0)
    data = (torch.randn(32, 8, generator=generator).double(), torch.randint(0, 4, (32,), generator=generator))
    return hr.Job(
        model=model,
        loss=nn.functional.cross_entropy,
        optimizer=ADAM,
        data=data,
        eval_data=data,
        global_batch_size=8,
        steps=steps,
        seed=1,
        options=hr.Options(**options),  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def processes() -> Iterator[LocalEngine]:
    with LocalEngine() as engine:
        yield engine


@pytest.mark.slow
def test_every_device_drops_what_one_device_drops(processes: Engine) -> None:
    """Behind the first layer each has half of the values, and behind the second all have all of them."""
    dropping = functools.partial(dense, 0.5)
    one, two = (train(job(dropping), strategy, processes) for strategy in (hr.OneDevice(), TWO))
    assert distance(two.tensors, one.tensors) <= 1e-9
    assert two.metrics == pytest.approx(one.metrics, rel=1e-9)
    assert distance(train(job(dropping), TWO, processes).tensors, two.tensors) == 0
    assert distance(train(job(), TWO, processes).tensors, two.tensors) > 1e-3


def resumed(first: hr.Strategy, then: hr.Strategy, folder: Path, engine: Engine, **options: object) -> Outcome:
    hr.fit(job(steps=4, **options), first, device="cpu", run_dir=folder, engine=engine)
    run = hr.fit(job(**options), then, device="cpu", run_dir=folder, engine=engine, resume=True)
    return Outcome(run.model.state_dict(), (), run.metrics)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        *((TWO, TWO), (TWO, hr.OneDevice()), (hr.TensorParallel(devices=4), TWO), (hr.CentralStorage(workers=2), TWO)),
        *((HYBRID, HYBRID), (HYBRID, hr.Mirrored(workers=2)), (TWO, HYBRID)),
    ],
)
def test_a_checkpoint_holds_whole_tensors_and_goes_on_anywhere(
    first: hr.Strategy, then: hr.Strategy, tmp_path: Path
) -> None:
    options = {"clip_norm": 0.5, "ema_decay": 0.9}
    whole = train(job(**options), hr.OneDevice())
    outcome = resumed(first, then, tmp_path, hr.ThreadEngine(), **options)
    assert distance(outcome.tensors, whole.tensors) <= 1e-9
    assert outcome.metrics == pytest.approx(whole.metrics, rel=1e-9)


@pytest.mark.slow
def test_replicas_that_average_go_on_with_what_is_their_own(tmp_path: Path) -> None:
    """Each has momenta of its own."""
    sliced, whole = (
        resumed(strategy, strategy, tmp_path / str(index), hr.ThreadEngine())
        for index, strategy in enumerate((AVERAGING_SLICES, AVERAGING))
    )
    assert distance(sliced.tensors, whole.tensors) <= 1e-9


def test_rules_by_hand_are_one_device_too() -> None:
    rules = {"0": "row", "3": "column", "5": "column"}
    outcome = train(job(), hr.TensorParallel(devices=2, rules=rules))
    assert distance(outcome.tensors, train(job(), hr.OneDevice()).tensors) <= 1e-9


@pytest.mark.parametrize("strategy", [TWO, HYBRID], ids=["slices", "hybrid"])
def test_a_step_without_a_number_is_left_out_by_all(strategy: hr.Strategy) -> None:
    good = job(on_nonfinite="skip")
    inputs, target = good.data  # type: ignore[misc]
    broken = inputs.clone()
    broken[5] = float("nan")
    poisoned = dataclasses.replace(good, data=(broken, target))
    outcome, one = train(poisoned, strategy), train(poisoned, hr.OneDevice())
    assert distance(outcome.tensors, one.tensors) <= 1e-9
    assert distance(outcome.tensors, train(good, hr.OneDevice()).tensors) > 1e-3


def test_each_device_keeps_half_of_what_is_split() -> None:
    seen = {}

    def look(worker: hr.Worker) -> None:
        seen[worker.rank] = [tuple(parameter.shape) for parameter in worker.model.parameters()]
        for batch in worker.batches():
            worker.step(batch)

    train(job(), TWO, loop=look)
    assert seen == {rank: [(8, 8), (8,), (8, 8), (8,), (4, 8), (4,)] for rank in (0, 1)}


def notices(model: Callable[[], nn.Module], devices: int, folder: Path) -> list[str]:
    strategy = hr.TensorParallel(devices=devices)
    run = hr.fit(job(model, steps=1), strategy, device="cpu", run_dir=folder, engine=hr.ThreadEngine())
    return [event.text for event in run.events if isinstance(event, Notice)]


def test_a_run_says_what_it_has_split(tmp_path: Path) -> None:
    split = "split over 2 devices: column 0; row 3; each holds 57% of the parameters"
    assert split in notices(dense, 2, tmp_path / "two")
    nothing = "nothing of the model can be divided evenly among 3 devices: each computes all of it"
    assert nothing in notices(dense, 3, tmp_path / "three")


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: hr.TensorParallel(devices=0), UsageError, "devices must be a whole number of at least 1"),
        (lambda: hr.TensorParallel(rules="all"), UsageError, "'auto' or a dict"),
        (lambda: hr.TensorParallel(rules={"0": "colum"}), UnknownName, "did you mean 'column'"),
        (lambda: hr.Hybrid(hr.OneDevice(), TWO), UsageError, "outer strategy of a hybrid must be"),
        (lambda: hr.Hybrid(hr.Mirrored(), hr.Mirrored()), UsageError, "inner strategy of a hybrid must be"),
        (lambda: hr.Hybrid(hr.ParameterAveraging(via="server"), TWO), UsageError, "the ranks of a replica cannot"),
        (lambda: hr.Hybrid(hr.ParameterAveraging(period="auto"), TWO), UsageError, "give a number such as period=16"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(
    make: Callable[[], hr.Strategy], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        make()


def test_a_hybrid_without_numbers_is_refused() -> None:
    with pytest.raises(UsageError, match=r"2 replicas on \? devices each, and no launcher says how many"):
        train(job(), hr.Hybrid(hr.Mirrored(workers=2), hr.TensorParallel()))


def test_what_split_layers_cannot_do_is_refused() -> None:
    with pytest.raises(UsageError, match="use compile=False"):
        train(job(compile=True), TWO)
    with pytest.raises(UsageError, match="'2' draws random numbers, and the workers of ThreadEngine share"):
        train(job(functools.partial(dense, 0.5)), TWO)
    with pytest.raises(UsageError, match="4 outputs, which 3 devices cannot share evenly"):
        train(job(), hr.TensorParallel(devices=3, rules={"5": "column"}))
