"""Workers in lockstep that are lost, join and leave: the others go on, and a round that was not done has no effect."""

from __future__ import annotations

import functools
import os
import signal
import time
from pathlib import Path

import pytest
import torch

import headrace as hr
from engine.conftest import below, fork_servers
from engine.counting import EXAMPLES, Counter, counting_job
from engine.elastic_loops import ROUND, job, plant
from engine.test_elastic import MARK, Hand, check_counts, mean_of_one_killed
from engine.victims import rank
from headrace.checkpoint import CheckpointFolder
from headrace.engine.local.engine import LocalEngine
from headrace.errors import InfeasiblePlan, PeerLost, UsageError, WorkerFailed
from headrace.spec.cluster import Cluster, Host
from headrace.spec.events import Evaluated, Lost, Notice, WorkerStarted
from headrace.spec.model import ModelSpec, ParameterSpec

pytestmark = pytest.mark.slow


def lost_once(worker: hr.Worker) -> None:
    for batch in worker.batches():
        if worker.rank == 1 and worker.round == ROUND and not worker._session.is_replacement:
            plant("while it sums", worker)
        worker.step(batch)


def test_a_new_worker_repeats_a_round_that_the_others_have_begun(engine: LocalEngine) -> None:
    """Their loops are at the same place, though the others have been there before."""
    run = hr.launch(lost_once, job(), hr.Mirrored(3, min_workers=3, max_workers=3), engine=engine)
    said = [event.text for event in run.events if isinstance(event, Notice)]
    assert f"round {ROUND} begins with 3 workers: without rank 1, with a new rank 1" in said
    assert run.status == "ok"


def test_lost_and_frozen_workers_are_replaced_and_every_epoch_is_complete(engine: LocalEngine, tmp_path: Path) -> None:
    done = tmp_path / "done"
    hand = Hand({30: (0, signal.SIGKILL), 90: (2, signal.SIGSTOP)}, done=done)
    strategy = hr.Mirrored(3, min_workers=1, max_workers=3)
    run = hr.fit(counting_job(40, model=functools.partial(Counter, done)), strategy, engine=engine, on_event=hand,
                 timeout_s=2.0)  # fmt: skip
    check_counts(run, 40)
    assert sorted(lost.lost for lost in hand.lost) == [0, 2]
    assert sum(isinstance(event, WorkerStarted) for event in run.events) >= 4
    assert [below(server) for server in fork_servers()] == [[]] * len(fork_servers())


def test_a_worker_that_dies_while_all_evaluate_and_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, str(tmp_path / "mark"))
    monkeypatch.setenv(f"{MARK}_LAUNCHER", str(os.getpid()))
    data = (torch.eye(EXAMPLES, dtype=torch.float64), torch.zeros(EXAMPLES))
    counting = counting_job(3, eval_data=data, metrics={"mean": mean_of_one_killed})
    saves = hr.Checkpoints(every_steps=2, every_s=None, keep=100)
    with LocalEngine() as fresh:
        run = hr.fit(counting, hr.Mirrored(3, min_workers=2), engine=fresh, run_dir=tmp_path, checkpoints=saves)
    check_counts(run, 3)
    evaluations = [event for event in run.events if isinstance(event, Evaluated)]
    assert [event.examples for event in evaluations] == [EXAMPLES] * 3, "each example is evaluated once"
    assert sum(isinstance(event, Lost) for event in run.events) == 1
    newest, damaged = CheckpointFolder(tmp_path / "checkpoints").latest()
    assert newest is not None
    assert (newest.step, damaged) == (3 * EXAMPLES // 16, ())


def test_fewer_than_min_workers_end_the_run(engine: LocalEngine) -> None:
    hand = Hand({30: (1, signal.SIGKILL)})
    with pytest.raises(PeerLost, match="1 of the workers is left, and min_workers=2"):
        hr.fit(counting_job(10**6), hr.Mirrored(2, min_workers=2), engine=engine, on_event=hand)


def slow_to_come_back() -> torch.nn.Module:
    if os.environ.get(MARK) != str(os.getpid()) and rank() == 1:
        try:
            (Path(os.environ[f"{MARK}_FOLDER"]) / "came").touch(exist_ok=False)
        except FileExistsError:
            time.sleep(60)
    return Counter()


def test_min_workers_that_do_not_come_back_in_time_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, str(os.getpid()))
    monkeypatch.setenv(f"{MARK}_FOLDER", str(tmp_path))
    monkeypatch.setenv("HEADRACE_START_TIMEOUT_S", "1")
    message = "min_workers=2, and 1 worker has come within 1 s: rank 0; missing: rank 1"
    strategy = hr.Mirrored(2, min_workers=2, max_workers=2)
    job = counting_job(10**6, model=slow_to_come_back)
    with LocalEngine() as fresh, pytest.raises(WorkerFailed, match=message):
        hr.fit(job, strategy, engine=fresh, on_event=Hand({30: (1, signal.SIGKILL)}))


def test_the_loss_of_the_last_worker_that_has_the_state_ends_the_run(engine: LocalEngine) -> None:
    hand = Hand({30: (0, signal.SIGKILL)})
    with pytest.raises(PeerLost, match=r"rank 0 .*the last that had the trained state; resume=True goes on"):
        hr.fit(counting_job(10**6), hr.Mirrored(1, min_workers=1, max_workers=2), engine=engine, on_event=hand)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"workers": 2, "min_workers": 3}, "min_workers=3 is more than workers=2; use min_workers=2 or fewer"),
        ({"workers": 4, "min_workers": 2, "max_workers": 3}, "max_workers=3 is less than workers=4"),
        ({"workers": 4, "max_workers": 5}, "give min_workers"),
        ({"workers": 4, "min_workers": 0}, "min_workers must be a whole number of at least 1"),
        ({"min_workers": 1, "max_workers": 65}, "more than the 64"),
        ({"min_workers": 1, "balance": "speed"}, "lets them come and go; give one of them"),
    ],
)
def test_numbers_of_workers_that_do_not_fit_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        hr.Mirrored(**given)  # type: ignore[arg-type]


def test_too_few_workers_of_the_machine_are_refused(engine: LocalEngine) -> None:
    with pytest.raises(InfeasiblePlan, match="mirrored has 1 worker, fewer than min_workers=2; give workers=2"):
        hr.fit(counting_job(1), hr.Mirrored(min_workers=2), engine=engine)


@pytest.mark.parametrize(
    ("least", "most", "message"),
    [
        (1, 3, "max_workers=3, and the launcher has started 2 processes"),
        (3, None, "mirrored has 2 workers, fewer than min_workers=3; let the launcher start 3, or a lower min_workers"),
        (1, 1, "mirrored has 2 workers, more than max_workers=1; let the launcher start 1, or leave it out"),
    ],
)
def test_numbers_that_contradict_the_launcher_are_refused(least: int, most: int | None, message: str) -> None:
    model = ModelSpec((ParameterSpec("weight", (4,)),))
    hosts = tuple(Host(f"host-{rank}", 2, 1 << 30, ranks=(rank,)) for rank in range(2))
    with pytest.raises(InfeasiblePlan, match=message):
        hr.Mirrored(min_workers=least, max_workers=most).plan(model, Cluster(hosts, ranks=2))
