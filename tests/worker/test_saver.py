"""Checkpoints of a run: when, how many, beside training, and on disks that fail."""

from __future__ import annotations

import errno
import functools
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import headrace as hr
from api.test_run_directory import mounted
from checkpoint.faulty import FaultyStorage
from engine.conftest import until
from engine.lasting import ROUNDS, lasting_job, left_by
from headrace.checkpoint import Checkpoint, CheckpointFolder, Storage
from headrace.engine.local.engine import LocalEngine
from headrace.errors import HeadraceError, WorkerFailed
from headrace.spec.events import Event, Notice, Saved
from headrace.worker import saving as module

STRATEGIES = (hr.OneDevice(), hr.Mirrored(2))
Make = Callable[[Path], Storage]


def plain_job(**changes: Any) -> hr.Job:
    return lasting_job("plain", **changes)


def fit(run_dir: Path, strategy: hr.Strategy | None = None, job: hr.Job | None = None, **asked: Any) -> hr.Run:
    return hr.fit(job or plain_job(), strategy or hr.OneDevice(), run_dir=run_dir, engine=hr.ThreadEngine(), **asked)


def saved(run: hr.Run) -> list[int]:
    return [event.step for event in run.events if isinstance(event, Saved)]


def warnings(run: hr.Run) -> list[str]:
    return [event.text for event in run.events if isinstance(event, Notice) and event.text.startswith("no checkpoint")]


def steps(run_dir: Path) -> tuple[int, ...]:
    return CheckpointFolder(run_dir / "checkpoints").steps()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
@pytest.mark.parametrize(
    ("every", "keep", "at"),
    [(4, 2, [4, 8, 12, 15]), (5, 3, [5, 10, 15]), (1, 1, list(range(1, 16))), (100, 3, [15]), (None, 3, [15])],
)
def test_by_steps(tmp_path: Path, strategy: hr.Strategy, every: int | None, keep: int, at: list[int]) -> None:
    run = fit(tmp_path, strategy, checkpoints=hr.Checkpoints(every, None, keep))
    assert saved(run) == at
    assert steps(tmp_path) == tuple(at[-keep:])
    for event in run.events:
        if isinstance(event, Saved):
            assert 0 < event.stall_s < 10
            assert event.write_s > 0
            assert event.bytes > 500


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_by_the_clock(tmp_path: Path, strategy: hr.Strategy) -> None:
    told = 0

    def enough(event: Event) -> None:
        nonlocal told
        told += isinstance(event, Saved)
        if isinstance(event, Saved) and told == 5:
            os.kill(os.getpid(), signal.SIGINT)

    often = hr.Checkpoints(every_s=0.05)
    run = fit(tmp_path, strategy, plain_job(epochs=10**6, eval_data=None), checkpoints=often, on_event=enough)
    done = [event for event in run.events if isinstance(event, Saved)]
    assert len(done) >= 5
    assert len(steps(tmp_path)) == 3
    # Told when it is on the disk. The last is that of the run's end, whenever that is.
    latest = [event.time_s - event.stall_s - event.write_s for event in done[:-1]]
    assert all(later > 0.05 * number for number, later in enumerate(latest, 1))


def test_by_both(tmp_path: Path) -> None:
    both = hr.Checkpoints(every_steps=7, every_s=1e-9, keep=100)
    assert set(steps(fit(tmp_path, checkpoints=both).run_dir)) >= {7, 14, ROUNDS}


@pytest.mark.parametrize("checkpoints", [None, False])
def test_none(tmp_path: Path, checkpoints: bool | None) -> None:
    run = hr.fit(plain_job(), run_dir=None if checkpoints is None else tmp_path, engine=hr.ThreadEngine(),
                 checkpoints=checkpoints)  # fmt: skip
    assert not (run.run_dir / "checkpoints").exists()
    assert saved(run) == []


def place(monkeypatch: pytest.MonkeyPatch, make: Make) -> None:
    """Lets the savers of this process use another storage."""
    monkeypatch.setattr(module, "CheckpointFolder", lambda path: CheckpointFolder(path, make(path)))


class Slow(FaultyStorage):
    """Waits before it makes a folder's names lasting, which a commit does last."""

    def __init__(self, path: Path, wait: Callable[[], object]) -> None:
        super().__init__(Storage(path), -1, 0)
        self.wait = wait

    def sync(self, folder: str) -> None:
        if folder:
            self.wait()
        super().sync(folder)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_a_save_waits_for_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: hr.Strategy
) -> None:
    expected = left_by(fit(tmp_path / "a", strategy))
    asked, wait = threading.Semaphore(0), module.Saver.wait

    def waiting(saver: module.Saver) -> None:
        if saver._group.rank == 0 and saver._thread.busy:
            asked.release()
        wait(saver)

    def disk() -> None:
        # Until a save waits for it, and then some time.
        assert asked.acquire(timeout=30)
        time.sleep(0.05)

    monkeypatch.setattr(module.Saver, "wait", waiting)
    place(monkeypatch, lambda path: Slow(path, disk))
    run = fit(tmp_path / "b", strategy, checkpoints=hr.Checkpoints(2, None, 100))
    assert saved(run) == [2, 4, 6, 8, 10, 12, 14, 15]
    assert left_by(run) == expected
    stalls = [event.stall_s for event in run.events if isinstance(event, Saved)]
    assert min(stalls[1:]) >= 0.05, "told as a stall, because it is one"


@pytest.mark.slow
def test_the_clock_does_not_ask_for_a_save_while_one_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk waits for training to go on for longer than until the next save, which would wait for the disk."""
    rounds, enough = 0, False

    def disk() -> None:
        before, began = rounds, time.monotonic()
        assert until(lambda: enough or (rounds > before + 2 and time.monotonic() > began + 0.05), 30)

    def loop(worker: hr.Worker) -> None:
        nonlocal rounds, enough
        for batch in worker.batches():
            worker.step(batch)
            rounds += 1
            enough = len(steps(tmp_path)) >= 3
            if enough:
                break

    place(monkeypatch, lambda path: Slow(path, disk))
    job = plain_job(epochs=10**6, eval_data=None)
    run = hr.launch(loop, job, run_dir=tmp_path, engine=hr.ThreadEngine(), checkpoints=hr.Checkpoints(every_s=0.01))
    assert run.status == "ok"


def test_training_goes_on_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk waits for a round that comes after the save."""
    further = threading.Event()

    def disk() -> None:
        assert further.wait(30)

    def loop(worker: hr.Worker) -> None:
        for batch in worker.batches():
            worker.step(batch)
            if worker.round == 9:
                further.set()

    place(monkeypatch, lambda path: Slow(path, disk))
    run = hr.launch(loop, plain_job(), run_dir=tmp_path, engine=hr.ThreadEngine(),
                    checkpoints=hr.Checkpoints(7, None))  # fmt: skip
    assert saved(run) == [7, 14, 15]


def tensors(checkpoint: Checkpoint) -> dict[str, list[Any]]:
    """What is in a checkpoint, but for generators' states: threads share one generator."""
    return {
        f"{rank}/{name}": tensor.tolist()
        for rank in checkpoint.ranks
        for name, tensor in checkpoint.read(rank).items()
        if not name.startswith("random/")
    }


Sound = Callable[[hr.Strategy], tuple[bytes, dict[str, list[Any]]]]
FEW = hr.Checkpoints(every_steps=3, every_s=None, keep=1)


def short(run_dir: Path, strategy: hr.Strategy) -> hr.Run:
    """Five rounds, two saves, the first of which gives way."""
    return fit(run_dir, strategy, plain_job(epochs=1, eval_data=None), checkpoints=FEW)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    """What a run leaves on a good disk: its model's file and its last checkpoint."""

    @functools.cache
    def train(strategy: hr.Strategy) -> tuple[bytes, dict[str, list[Any]]]:
        run = short(tmp_path_factory.mktemp("sound"), strategy)
        last = CheckpointFolder(run.run_dir / "checkpoints").open(5)
        return (run.run_dir / "model.safetensors").read_bytes(), tensors(last)

    return train


def check(run: hr.Run, good: tuple[bytes, dict[str, list[Any]]], number: int) -> None:
    """Looks at what one fault has left of a run."""
    told, there = warnings(run), CheckpointFolder(run.run_dir / "checkpoints").latest()
    assert run.status == "ok"
    assert (run.run_dir / "model.safetensors").read_bytes() == good[0]
    assert sorted([*saved(run), *(3 if "step 3:" in text else 5 for text in told)]) == [3, 5], "each says what became"
    assert len(told) <= 1
    for text in told:
        assert f": {os.strerror(number)} in {run.run_dir / 'checkpoints'}; training goes on, and the" in text
    assert there[1] == ()
    assert there[0] is not None
    assert there[0].step >= max(saved(run))
    assert there[0].step == 3 or tensors(there[0]) == good[1]


@pytest.mark.one
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "strategy"),
    [
        pytest.param(number, strategy, id=f"{name}-{strategy.name}", marks=[pytest.mark.full] * (name not in usual))
        for strategy, usual in zip(STRATEGIES, (("short",), ("ENOSPC",)), strict=True)
        for name, number in (("ENOSPC", errno.ENOSPC), ("EIO", errno.EIO), ("EROFS", errno.EROFS), ("short", 0))
    ],
)
def test_a_fault_at_every_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sound: Sound, strategy: hr.Strategy, number: int
) -> None:
    """Training goes on to its right end, with one warning a failed save, over an older checkpoint that is intact."""
    for first in itertools.count():
        run_dir = tmp_path / str(first)
        # All ranks count the operations of one disk.
        disk = FaultyStorage(Storage(run_dir / "checkpoints"), number, first)
        with monkeypatch.context() as patch:
            place(patch, lambda _, disk=disk: disk)
            run = short(run_dir, strategy)
        check(run, sound(strategy), number)
        if not disk.struck:
            break
    assert first > 30


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_a_disk_that_fails_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sound: Sound, strategy: hr.Strategy
) -> None:
    # Trained now if no other test has asked before, on a disk that works.
    expected = sound(strategy)[0]
    place(monkeypatch, lambda path: FaultyStorage(Storage(path), errno.ENOSPC, 0, lasting=True))
    run = short(tmp_path, strategy)
    assert run.status == "ok"
    assert (run.run_dir / "model.safetensors").read_bytes() == expected
    assert [text.partition(":")[0] for text in warnings(run)] == [f"no checkpoint at step {n}" for n in (3, 5)]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_an_error_that_is_no_disks_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: hr.Strategy
) -> None:
    """On whichever rank: the others do not wait for it."""

    class Broken(FaultyStorage):
        def create(self, place: str) -> Any:
            if place.endswith(f"rank-{strategy.name == 'mirrored':d}.safetensors"):
                raise ZeroDivisionError("planted")
            return super().create(place)

    place(monkeypatch, lambda path: Broken(Storage(path), -1, 0))
    with pytest.raises(WorkerFailed, match="ZeroDivisionError: planted"):
        fit(tmp_path, strategy, checkpoints=hr.Checkpoints(5, None))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_a_state_that_cannot_be_saved_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, strategy: hr.Strategy
) -> None:
    monkeypatch.setattr(module.CheckpointFolder, "commit", lambda *_: (_ for _ in ()).throw(HeadraceError("planted")))
    with pytest.raises(HeadraceError, match="planted"):
        fit(tmp_path, strategy, checkpoints=hr.Checkpoints(5, None))


def crowd(folder: Path, worker: hr.Worker) -> None:
    """The usual loop on a disk that another program fills, and frees some rounds later."""
    other = folder / "other"
    for batch in worker.batches():
        worker.step(batch)
        if worker.rank == 0 and 20 <= worker.round < 60:
            with other.open("ab", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(4096))
        if worker.rank == 0 and worker.round == 60:
            other.unlink()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk")
@pytest.mark.parametrize(
    "strategy",
    [hr.Mirrored(2), hr.LocalSGD(2, period=5), hr.LocalSGD(2, period=5, via="server")],
    ids=["mirrored", "averaging", "served"],
)
def test_a_disk_that_is_full_for_a_while(engine: LocalEngine, tmp_path: Path, strategy: hr.Strategy) -> None:
    """In processes, whose events are on the same disk."""
    disk = tmp_path / "disk"
    with mounted(disk, "size=4m"):
        job = plain_job(epochs=20, eval_data=None, options={"ema_decay": None})
        run = hr.launch(functools.partial(crowd, disk), job, strategy, run_dir=disk / "run", engine=engine,
                        checkpoints=hr.Checkpoints(10, None, 100))  # fmt: skip
        assert run.status == "ok"
        told = warnings(run)
        failed = [step for step in range(10, 101, 10) if step not in saved(run)]
        assert [text.partition(":")[0] for text in told] == [f"no checkpoint at step {step}" for step in failed]
        assert {40, 50} <= set(failed) <= {20, 30, 40, 50, 60}
        assert all("No space left on device in " in text for text in told)
        assert CheckpointFolder(disk / "run" / "checkpoints").latest()[1] == ()
        # Where a run may be begun again at once, it begins with a checkpoint.
        assert set(steps(disk / "run")) - {0} == set(range(10, 101, 10)) - set(failed)
        done = [(event.rank, event.step) for event in run.events if event.kind == "stepped"]  # type: ignore[attr-defined]
        assert sorted(done) == [(rank, step) for rank in range(2) for step in range(100)], "no event is lost"


def test_settings() -> None:
    for wrong in ({"every_steps": 0}, {"keep": 0}, {"every_s": 0}, {"every_steps": True}, {"every_s": "30"}):
        with pytest.raises(HeadraceError, match=f"{next(iter(wrong))} must be"):
            hr.Checkpoints(**wrong)  # type: ignore[arg-type]


def test_a_rollback_passes_over_a_checkpoint_whose_bytes_have_changed(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    for step in (100, 120, 140):
        folder.begin(step)
        folder.commit(step, [folder.write(step, 0, {"parameter/weight": torch.ones(8)})], {}, keep=3)
    file = tmp_path / "step-00000120" / "rank-0.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    # 140 is of another history.
    saver = cast("module.Saver", SimpleNamespace(folder=folder, saved=120))
    assert module.Saver.newest(saver).step == 100


def test_a_part_whose_writer_was_lost_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.0)
    looks = iter(range(100))
    lost = {1}
    group = SimpleNamespace(is_gone=lost.__contains__, check=lambda: next(looks))
    ranks = [
        SimpleNamespace(saved=SimpleNamespace(step_plus_1=121)),
        SimpleNamespace(saved=SimpleNamespace(step_plus_1=0)),
    ]
    saver = cast("module.Saver", SimpleNamespace(_group=group, _page=SimpleNamespace(ranks=ranks)))
    assert module.Saver._await(saver, 120, [0, 1]) == 1
    # It had written its part before.
    ranks[1].saved.step_plus_1 = 121
    assert module.Saver._await(saver, 120, [0, 1]) is None
