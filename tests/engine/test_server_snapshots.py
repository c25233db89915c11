"""Servers without backups: a dead one ends the run, which goes on from snapshots that were taken between two pushes."""

from __future__ import annotations

import errno
import functools
import itertools
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as hr
from engine.counting import BATCH, EXAMPLES, HURRIED, Counter, counting_job
from engine.test_elastic import check_counts, every_strategy
from headrace.checkpoint.storage import Storage
from headrace.engine.local.engine import LocalEngine
from headrace.errors import PeerLost
from headrace.spec.events import Event, Notice, RunStarted, Saved, ServerStarted, SnapshotTaken, Stepped, WorkerStarted

pytestmark = pytest.mark.slow

EPOCHS = 30
OFTEN = hr.Checkpoints(every_s=None, every_steps=60, snapshots_every_s=0.05)


def made_job(awaited: Path | None = None) -> hr.Job:
    """Its workers meet more often than they save; from the epoch `HURRIED` on they wait for a file, if any."""
    held_out = (torch.eye(EXAMPLES, dtype=torch.float64), torch.zeros(EXAMPLES))
    model = functools.partial(Counter, awaited)
    return counting_job(EPOCHS, model=model, eval_data=held_out, options=hr.Options(eval_every=40))


def lasting_job() -> hr.Job:
    """Outlasts what shall happen meanwhile."""
    return made_job(Path("never"))


class Killer:
    """Kills a rank when each server has taken some snapshots of what workers have trained since the last checkpoint.

    Not before steps are slow: then the next checkpoint, which makes these snapshots useless, is seconds away, however
    late this process hears of them.
    """

    def __init__(self, victim: int, servers: Sequence[int], snapshots: int = 4) -> None:
        self._victim = victim
        self._wanted = dict.fromkeys(servers, snapshots)
        self._left = dict(self._wanted)
        self._pids: dict[int, int] = {}
        self._is_slow = False
        self.done = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, ServerStarted | WorkerStarted):
            self._pids[event.rank] = event.pid
        if isinstance(event, Stepped):
            self._is_slow |= event.step > (HURRIED + 1) * EXAMPLES // BATCH
        if isinstance(event, Saved):
            self._left = dict(self._wanted)
        if isinstance(event, SnapshotTaken) and self._is_slow:
            self._left[event.rank] -= 1
            if max(self._left.values()) <= 0 and not self.done:
                self.done = True
                os.kill(self._pids[self._victim], signal.SIGKILL)


def servers_of(strategy: hr.Strategy) -> range:
    workers: int = getattr(strategy, "workers")  # noqa: B009  (of both kinds)
    return range(workers, workers + getattr(strategy, "servers"))  # noqa: B009


def killer_of(strategy: hr.Strategy, which: int = 0) -> Killer:
    """Kills one of a strategy's servers."""
    servers = servers_of(strategy)
    return Killer(servers[which % len(servers)], servers)


@every_strategy
def test_a_run_goes_on_from_snapshots_and_no_example_is_lost_or_doubled(
    engine: LocalEngine, make: Callable[..., hr.Strategy], tmp_path: Path
) -> None:
    strategy = make()
    # Once more where the next one to die is another server.
    for attempt in range(min(2, len(servers_of(strategy)))):
        killer = killer_of(strategy, attempt)
        with pytest.raises(PeerLost, match="goes on from the servers' last snapshots"):
            hr.fit(
                lasting_job(),
                strategy,
                engine=engine,
                on_event=killer,
                run_dir=tmp_path,
                checkpoints=OFTEN,
                resume=attempt > 0,
            )
        assert killer.done
    run = hr.fit(made_job(), strategy, engine=engine, run_dir=tmp_path, checkpoints=OFTEN, resume=True)
    check_counts(run, EPOCHS)
    events = list(run.events)
    starts = [event for event in events if isinstance(event, RunStarted)]
    assert all(0 <= before.resumed_step <= after.resumed_step for before, after in itertools.pairwise(starts))
    assert any("the servers go on from snapshots" in event.text for event in events if isinstance(event, Notice))
    assert run.summary.training.examples == EPOCHS * EXAMPLES
    assert run.summary.steps == EPOCHS * EXAMPLES // BATCH


def killed(engine: LocalEngine, run_dir: Path, strategy: hr.Strategy) -> None:
    with pytest.raises(PeerLost):
        hr.fit(lasting_job(), strategy, engine=engine, on_event=killer_of(strategy), run_dir=run_dir, checkpoints=OFTEN)


def notices(run: hr.Run) -> str:
    return "\n".join(event.text for event in run.events if isinstance(event, Notice))


@pytest.fixture(scope="module")
def of_one_server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of a run under ParameterServer(2) whose server was killed."""
    run_dir = tmp_path_factory.mktemp("killed") / "run"
    with LocalEngine() as engine:
        killed(engine, run_dir, hr.ParameterServer(2))
    return run_dir


def test_a_damaged_snapshot_is_left_out_and_told(engine: LocalEngine, tmp_path: Path, of_one_server: Path) -> None:
    strategy = hr.ParameterServer(2)
    shutil.copytree(of_one_server, tmp_path, dirs_exist_ok=True)
    snapshots = tmp_path / "snapshots"
    # The server may have been killed while it wrote the next one.
    newest = max(path for path in snapshots.iterdir() if path.suffix != ".part")
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    # Files that were not complete when their writers died: of this server, and of one that this run does not have.
    for left_over in ("server-0-00009999.part", "server-1-00000003.part"):
        (snapshots / left_over).write_bytes(b"not complete")
    run = hr.fit(made_job(), strategy, engine=engine, run_dir=tmp_path, checkpoints=OFTEN, resume=True)
    check_counts(run, EPOCHS)
    assert list(snapshots.glob("*.part")) == []
    assert f"damaged, left out: {newest}" in notices(run)
    assert "the servers go on from snapshots" in notices(run)


@pytest.mark.parametrize("other", [hr.ParameterServer(2, servers=2), hr.ParameterServer(3), hr.Mirrored(2)])
def test_another_strategy_goes_on_from_the_checkpoint_alone(
    engine: LocalEngine, tmp_path: Path, of_one_server: Path, other: hr.Strategy
) -> None:
    shutil.copytree(of_one_server, tmp_path, dirs_exist_ok=True)
    run = hr.fit(made_job(), other, engine=engine, run_dir=tmp_path, checkpoints=False, resume=True)
    check_counts(run, EPOCHS)
    assert "the servers go on from snapshots" not in notices(run)
    assert list((tmp_path / "snapshots").iterdir()) == [], "a later run does not resume from them"


def test_one_checkpoint_is_not_mixed_with_snapshots(engine: LocalEngine, tmp_path: Path, of_one_server: Path) -> None:
    strategy = hr.ParameterServer(2)
    shutil.copytree(of_one_server, tmp_path / "a")
    oldest = min((tmp_path / "a" / "checkpoints").iterdir())
    run = hr.fit(made_job(), strategy, engine=engine, run_dir=tmp_path / "b", checkpoints=OFTEN, resume=oldest)
    check_counts(run, EPOCHS)
    assert "the servers go on from snapshots" not in notices(run)
    both = hr.fit(made_job(), strategy, engine=engine, run_dir=tmp_path / "c", checkpoints=OFTEN, resume=tmp_path / "a")
    check_counts(both, EPOCHS)
    assert "the servers go on from snapshots" in notices(both)


def test_no_snapshots_where_none_are_wanted_or_a_backup_has_all(engine: LocalEngine, tmp_path: Path) -> None:
    for name, strategy, checkpoints in (
        ("unwanted", hr.ParameterServer(1), hr.Checkpoints(snapshots_every_s=None)),
        ("backup", hr.ParameterServer(1, backups=1), OFTEN),
    ):
        run = hr.fit(counting_job(30), strategy, engine=engine, run_dir=tmp_path / name, checkpoints=checkpoints)
        assert not any(isinstance(event, SnapshotTaken) for event in run.events)
        assert not (tmp_path / name / "snapshots").exists()


class Full(Storage):
    """A disk without room for snapshots."""

    def create(self, name: str) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_told_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.parameter_server.server.snapshots.Storage", Full)
    run = hr.fit(counting_job(60), hr.ParameterServer(2), engine=hr.ThreadEngine(), run_dir=tmp_path, checkpoints=OFTEN)
    check_counts(run, 60)
    assert "no snapshot of the server on rank 2: No space left on device" in notices(run)
    assert not any(isinstance(event, SnapshotTaken) for event in run.events)
