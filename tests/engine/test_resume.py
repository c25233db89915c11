"""A run that is broken off and goes on ends where it would have ended, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as hr
from engine import lasting
from engine.lasting import OFTEN, ROUNDS, STRATEGIES, broken_off, files_of, lasting_job, left_by
from headrace.checkpoint import CheckpointFolder
from headrace.engine.local.engine import LocalEngine
from headrace.errors import PeerLost, RunFailed, WorkerFailed

Whole = Callable[[str, hr.Strategy], hr.Run]
EXACT = 1e-9


@pytest.fixture(scope="module")
def whole(engine: LocalEngine, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """`whole(kind, strategy)`: the run without interruption."""

    @functools.cache
    def train(kind: str, strategy: hr.Strategy) -> hr.Run:
        return hr.fit(lasting_job(kind), strategy, run_dir=tmp_path_factory.mktemp("whole"), engine=engine,
                      checkpoints=OFTEN)  # fmt: skip

    return train


def break_off(
    engine: LocalEngine, run_dir: Path, kind: str, strategy: hr.Strategy, deed: Callable[[], object], at: int,
    **asked: Any
) -> None:  # fmt: skip
    """Trains until the last rank does the deed after round `at`."""
    who = 0 if strategy.name == "one_device" else 1
    hr.launch(functools.partial(broken_off, deed, at, who), lasting_job(kind), strategy, run_dir=run_dir,
              engine=engine, checkpoints=OFTEN, **asked)  # fmt: skip


def go_on(engine: LocalEngine, run_dir: Path, kind: str, strategy: hr.Strategy) -> hr.Run:
    return hr.fit(lasting_job(kind), strategy, run_dir=run_dir, engine=engine, checkpoints=OFTEN, resume=True)


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("kind", ["cnn", "lstm"])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
@pytest.mark.parametrize(
    ("deed", "error", "at"),
    [(lasting.kill, PeerLost, 8), (lasting.kill, PeerLost, 13), (lasting.fail, WorkerFailed, 9)],
)  # the save after 4 rounds is on the disk when that after 8 begins
def test_after_a_worker_was_lost(
    engine: LocalEngine, whole: Whole, tmp_path: Path, kind: str, strategy: hr.Strategy, deed: Callable[[], object],
    error: type[RunFailed], at: int
) -> None:  # fmt: skip
    with pytest.raises(error):
        break_off(engine, tmp_path, kind, strategy, deed, at)
    run = go_on(engine, tmp_path, kind, strategy)
    assert left_by(run) == left_by(whole(kind, strategy))
    assert files_of(tmp_path)[0] == ROUNDS


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_after_a_worker_was_asked_to_end(
    engine: LocalEngine, whole: Whole, tmp_path: Path, strategy: hr.Strategy
) -> None:
    break_off(engine, tmp_path, "cnn", strategy, lasting.terminate, 6)
    assert ROUNDS > files_of(tmp_path)[0] >= 7, "every finished round is saved"
    assert left_by(go_on(engine, tmp_path, "cnn", strategy)) == left_by(whole("cnn", strategy))


@pytest.mark.slow
def test_after_several_kills(engine: LocalEngine, whole: Whole, tmp_path: Path) -> None:
    pair = hr.Mirrored(2)
    for attempt, at in enumerate((8, 9, 11, 12)):
        with pytest.raises(PeerLost):
            break_off(engine, tmp_path, "lstm", pair, lasting.kill, at, resume=attempt > 0)
    run = go_on(engine, tmp_path, "lstm", pair)
    assert left_by(run) == left_by(whole("lstm", pair))
    resumed = [event.resumed_step for event in run.events if event.kind == "run_started"]  # type: ignore[attr-defined]
    assert resumed[0] == 0
    assert resumed == sorted(resumed)
    times = [event.time_s for event in run.events]
    assert times == sorted(times), "one clock for all attempts"


# The strategies that one state passes between, of 1, 2, 3 workers.
CROSSED = (hr.OneDevice(), hr.Mirrored(2), hr.Mirrored(3), hr.CentralStorage(2), hr.CentralStorage(3))


def crossed_job(steps: int) -> hr.Job:
    return lasting_job("plain", steps=steps, epochs=None)


def label(strategy: hr.Strategy) -> str:
    return f"{strategy.name} {getattr(strategy, 'workers', 1)}"


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Run directories after 7 rounds, in the middle of an epoch."""
    found = {}
    for strategy in CROSSED:
        found[label(strategy)] = tmp_path_factory.mktemp("half")
        hr.fit(crossed_job(7), strategy, run_dir=found[label(strategy)], engine=hr.ThreadEngine())
    return found


@pytest.fixture(scope="module")
def uninterrupted() -> hr.Run:
    return hr.fit(crossed_job(14), engine=hr.ThreadEngine())


@pytest.mark.slow
@pytest.mark.parametrize("after", CROSSED, ids=label)
@pytest.mark.parametrize("before", CROSSED, ids=label)
def test_under_any_other_strategy_and_number_of_workers(
    halves: dict[str, Path], uninterrupted: hr.Run, tmp_path: Path, before: hr.Strategy, after: hr.Strategy
) -> None:
    run = hr.fit(crossed_job(14), after, run_dir=tmp_path, resume=halves[label(before)], engine=hr.ThreadEngine())
    expected = uninterrupted.model.state_dict()
    for name, tensor in run.model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=EXACT, atol=EXACT)
    assert run.metrics == pytest.approx(uninterrupted.metrics, abs=EXACT)
    assert files_of(tmp_path)[0] == 14
    assert files_of(halves[label(before)])[0] == 7, "where it came from stays as it was"


@pytest.mark.parametrize("steps", [3, 7])
def test_in_another_directory_from_one_checkpoint(tmp_path: Path, steps: int) -> None:
    threads = hr.ThreadEngine()
    every = hr.Checkpoints(every_steps=1, every_s=None, keep=20)
    first = hr.fit(crossed_job(9), run_dir=tmp_path / "a", engine=threads, checkpoints=every)
    place = tmp_path / "a" / "checkpoints" / f"step-{steps:08d}"
    run = hr.fit(crossed_job(9), run_dir=tmp_path / "b", engine=threads, resume=place, checkpoints=every)
    assert left_by(run) == left_by(first)
    assert CheckpointFolder(tmp_path / "b" / "checkpoints").steps() == tuple(range(steps + 1, 10))


@pytest.mark.slow
def test_a_relative_path_to_its_own_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    threads = hr.ThreadEngine()
    first = hr.fit(crossed_job(9), run_dir="a", engine=threads, checkpoints=OFTEN)
    for place in ("a/checkpoints/step-00000008", "a", "../" + tmp_path.name + "/a"):
        run = hr.fit(crossed_job(9), run_dir="a", engine=threads, resume=place, checkpoints=OFTEN)
        assert left_by(run) == left_by(first)


@pytest.mark.slow
def test_more_epochs_than_before(tmp_path: Path) -> None:
    threads = hr.ThreadEngine()
    hr.fit(lasting_job(epochs=1), run_dir=tmp_path / "a", engine=threads)
    run = hr.fit(lasting_job(epochs=3), run_dir=tmp_path / "a", engine=threads, resume=True)
    # One worker in a thread draws what one in a process draws.
    assert left_by(run) == left_by(hr.fit(lasting_job(epochs=3), run_dir=tmp_path / "b", engine=threads))


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_run_that_is_complete(tmp_path: Path, elsewhere: bool) -> None:
    threads = hr.ThreadEngine()
    first = hr.fit(lasting_job(), run_dir=tmp_path / "a", engine=threads)
    before = left_by(first)
    where = tmp_path / ("b" if elsewhere else "a")
    again = hr.fit(lasting_job(), run_dir=where, engine=threads, resume=tmp_path / "a")
    assert (again.status, files_of(where), (where / "model.safetensors").read_bytes()) == ("ok", before[:2], before[2])
    steps = [event.step for event in again.events if event.kind == "stepped"]  # type: ignore[attr-defined]
    assert steps == ([] if elsewhere else list(range(ROUNDS)))


def own_loop(until: int, worker: hr.Worker) -> None:
    for inputs, target in worker.batches():
        worker.backward(torch.nn.functional.cross_entropy(worker.model(inputs), target))
        worker.update()
        if worker.round + 1 == until:
            lasting.fail()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_a_loop_of_ones_own(engine: LocalEngine, tmp_path: Path, strategy: hr.Strategy) -> None:
    def launch(until: int, run_dir: Path, resume: bool = False) -> hr.Run:
        loop = functools.partial(own_loop, until)
        return hr.launch(loop, lasting_job(), strategy, run_dir=run_dir, engine=engine, checkpoints=OFTEN,
                         resume=resume)  # fmt: skip

    with pytest.raises(WorkerFailed):
        launch(9, tmp_path / "a")
    assert left_by(launch(0, tmp_path / "a", resume=True)) == left_by(launch(0, tmp_path / "b"))


def leaving(until: int, steps_first: bool, worker: hr.Worker) -> None:
    for batch in worker.batches():
        if steps_first:
            worker.step(batch)
        if worker.round == until:
            break
        if not steps_first:
            worker.step(batch)


@pytest.mark.parametrize("steps_first", [False, True])
@pytest.mark.parametrize("until", [0, 6])
def test_a_loop_that_is_left(tmp_path: Path, until: int, steps_first: bool) -> None:
    """A batch that it takes and leaves undone is the first of the loop that goes on."""

    def launch(until: int, run_dir: Path, resume: bool = False) -> hr.Run:
        loop = functools.partial(leaving, until, steps_first)
        return hr.launch(loop, lasting_job("plain"), hr.Mirrored(2), run_dir=run_dir, engine=hr.ThreadEngine(),
                         resume=resume)  # fmt: skip

    launch(until, tmp_path / "a")
    assert files_of(tmp_path / "a")[0] == until + steps_first
    on, whole = launch(-1, tmp_path / "a", resume=True), launch(-1, tmp_path / "b")
    assert (on.run_dir / "model.safetensors").read_bytes() == (whole.run_dir / "model.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
@pytest.mark.parametrize("at", [8, 9, 10])
def test_patience_and_evaluations_between_epochs(
    engine: LocalEngine, tmp_path: Path, strategy: hr.Strategy, at: int
) -> None:
    # Never better by so much: the first evaluation is the best, and four more are borne.
    patient = hr.EarlyStopping(patience=4, min_delta=100.0)
    job = lasting_job(options={"eval_every": 2, "early_stopping": patient}, epochs=30)
    whole = hr.fit(job, strategy, run_dir=tmp_path / "a", engine=engine, checkpoints=OFTEN)
    assert files_of(tmp_path / "a")[0] == 10
    deed = functools.partial(lasting.fail_once_saved, tmp_path / "b")
    loop = functools.partial(broken_off, deed, at - 1, 0)
    with pytest.raises(WorkerFailed):
        hr.launch(loop, job, strategy, run_dir=tmp_path / "b", engine=engine, checkpoints=OFTEN)
    run = hr.fit(job, strategy, run_dir=tmp_path / "b", engine=engine, checkpoints=OFTEN, resume=True)
    assert left_by(run) == left_by(whole)
    shown = [each.text for each in run.events if each.kind == "notice" and "ends early" in each.text]  # type: ignore[attr-defined]
    assert shown[-1].startswith("ends early: loss has got no better for 4 evaluations; best ")
    assert shown[-1].endswith(" after 2 steps")


def test_patience_that_is_over_stays_over(tmp_path: Path) -> None:
    threads = hr.ThreadEngine()
    patient = hr.EarlyStopping(patience=1, min_delta=100.0)
    job = lasting_job(options={"eval_every": 2, "early_stopping": patient}, epochs=30)
    before = left_by(hr.fit(job, run_dir=tmp_path, engine=threads))
    assert before[0] == 4
    assert left_by(hr.fit(job, run_dir=tmp_path, engine=threads, resume=True)) == before
