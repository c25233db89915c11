"""Processes that are lost while the run goes on: every example is trained on once, and no process remains."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

import headrace as hr
from engine.conftest import below, fork_servers, until
from engine.counting import BATCH, EPOCHS, EXAMPLES, Counter, counting_job
from headrace.checkpoint import CheckpointFolder
from headrace.engine.local.engine import LocalEngine
from headrace.engine.local.scaling import ask_for_workers
from headrace.errors import PeerLost, UsageError
from headrace.parameter_server.server.server import Server
from headrace.spec.events import BackupReady, Evaluated, Event, Lost, ServerStarted, Stepped, WorkerEnded, WorkerStarted
from headrace.spec.plan import Plan
from headrace.strategies.served import ServerContext

pytestmark = pytest.mark.slow

MARK = "HEADRACE_TEST_MARK"


def mean_of_one_killed(output: Tensor, _: Tensor) -> Tensor:
    """Ends the first worker that computes it."""
    kill_once("evaluation")
    return output.mean()


def kill_once(what: str) -> None:
    if os.environ.get(f"{MARK}_LAUNCHER") == str(os.getpid()):
        # It checks a job before a worker trains it.
        return
    try:
        os.close(os.open(f"{os.environ[MARK]}-{what}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def check_counts(run: hr.Run, epochs: int = EPOCHS) -> None:
    assert run.status == "ok"
    off = (run.model.count - epochs).abs().max().item()  # type: ignore[operator]
    assert off < 1e-9, f"every epoch visits every example once, and one was off by {off}"


class Hand:
    """Does something to processes of a run, once each, when so many steps have been made.

    Args:
        deeds: by step: rank and signal.
        after: steps count from when this rank has started,
        backups: and so many backups can follow their servers.
        done: the file to make after the last deed.
    """

    def __init__(
        self, deeds: dict[int, tuple[int, int]], after: int = 0, done: Path | None = None, backups: int = 0
    ) -> None:
        self._after = after
        self._backups = backups
        self._done = done
        self.lost: list[Lost] = []
        self._deeds = dict(deeds)
        self.pids: dict[int, int] = {}
        self._steps = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, WorkerStarted | ServerStarted):
            self.pids[event.rank] = event.pid
        elif isinstance(event, Lost):
            self.lost.append(event)
        elif isinstance(event, BackupReady):
            self._backups -= 1
        elif isinstance(event, Stepped) and self._after in self.pids and self._backups <= 0:
            self._steps += 1
            # Another rank may step before the one that is meant has started; then its turn is a step later.
            due = [step for step, (rank, _) in self._deeds.items() if step <= self._steps and rank in self.pids]
            for step in due:
                rank, number = self._deeds.pop(step)
                os.kill(self.pids[rank], number)
            if self._done is not None and not self._deeds:
                self._done.touch()


@dataclass(frozen=True)
class Counted(hr.ParameterAveraging):
    """Moves the average by all that was trained on, however many have contributed to it, so that it can be counted."""

    via: str = "server"
    period: int = 2

    def server(self, plan: Plan, rank: int, context: ServerContext, *, by_share: bool = True) -> Server:
        return super().server(plan, rank, context, by_share=by_share)


STRATEGIES: dict[str, Callable[..., hr.Strategy]] = {
    "asynchronous": functools.partial(hr.ParameterServer, 3),
    "bound 1": functools.partial(hr.ParameterServer, 3, staleness_bound=1),
    "lock-step": functools.partial(hr.ParameterServer, 3, staleness_bound=0),
    "two servers over tcp": functools.partial(hr.ParameterServer, 3, servers=2, transport="tcp"),
    "averaging": functools.partial(Counted, 3),
    "downpour": functools.partial(hr.Downpour, 3, push_every=2, fetch_every=2),
}

# A bound of one round shares its code with a bound of none and with no bound.
every_strategy = pytest.mark.parametrize(
    "make",
    [pytest.param(make, id=name, marks=[pytest.mark.full] * (name == "bound 1")) for name, make in STRATEGIES.items()],
)


@every_strategy
def test_killed_workers_are_replaced_and_no_example_is_lost_or_doubled(
    engine: LocalEngine, make: Callable[..., hr.Strategy], tmp_path: Path
) -> None:
    done = tmp_path / "done"
    hand = Hand({30: (1, signal.SIGKILL), 80: (0, signal.SIGKILL)}, done=done)
    job = counting_job(25, model=functools.partial(Counter, done))
    check_counts(hr.fit(job, make(), engine=engine, on_event=hand), 25)
    assert sorted(lost.lost for lost in hand.lost) == [0, 1]
    assert all("SIGKILL" in lost.cause for lost in hand.lost)
    assert [below(server) for server in fork_servers()] == [[]] * len(fork_servers())


@every_strategy
def test_a_killed_server_with_a_backup_is_followed_by_it(
    engine: LocalEngine, make: Callable[..., hr.Strategy], tmp_path: Path
) -> None:
    strategy, done = make(backups=1), tmp_path / "done"
    servers = getattr(strategy, "servers")  # noqa: B009  (of both kinds)
    hand = Hand({30: (3, signal.SIGKILL)}, done=done, backups=servers)
    job = counting_job(25, model=functools.partial(Counter, done))
    check_counts(hr.fit(job, strategy, engine=engine, on_event=hand), 25)
    assert [lost.lost for lost in hand.lost] == [3]
    assert [below(server) for server in fork_servers()] == [[]] * len(fork_servers())


@pytest.mark.parametrize("victim", [0, 2, 3], ids=["worker", "server", "backup"])
def test_who_is_frozen_is_ended_and_replaced(engine: LocalEngine, victim: int, tmp_path: Path) -> None:
    done = tmp_path / "done"
    hand = Hand({60: (victim, signal.SIGSTOP)}, done=done, backups=1)
    strategy, job = hr.ParameterServer(2, backups=1), counting_job(40, model=functools.partial(Counter, done))
    check_counts(hr.fit(job, strategy, engine=engine, on_event=hand, timeout_s=3.0), 40)
    assert [lost.lost for lost in hand.lost] == [victim]
    assert "no sign of life" in hand.lost[0].cause


def test_a_worker_that_dies_while_all_evaluate(
    engine: LocalEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MARK, str(tmp_path / "mark"))
    monkeypatch.setenv(f"{MARK}_LAUNCHER", str(os.getpid()))
    job = counting_job(3, eval_data=(torch.eye(EXAMPLES, dtype=torch.float64), torch.zeros(EXAMPLES)))
    job = hr.Job(**{**vars(job), "metrics": {"mean": mean_of_one_killed}})
    with LocalEngine() as fresh:
        run = hr.fit(job, hr.ParameterServer(3), engine=fresh)
    check_counts(run, 3)
    evaluations = [event for event in run.events if isinstance(event, Evaluated)]
    assert [event.examples for event in evaluations] == [EXAMPLES] * 3, "each example is evaluated once"
    assert sum(isinstance(event, Lost) for event in run.events) == 1


def test_checkpoints_go_on_when_a_worker_dies(engine: LocalEngine, tmp_path: Path) -> None:
    hand = Hand({30: (1, signal.SIGKILL), 90: (0, signal.SIGKILL)})
    saves = hr.Checkpoints(every_steps=6, every_s=None, keep=100)
    run = hr.fit(
        counting_job(), hr.ParameterServer(3), engine=engine, on_event=hand, run_dir=tmp_path / "a", checkpoints=saves
    )
    check_counts(run)
    newest, damaged = CheckpointFolder(tmp_path / "a" / "checkpoints").latest()
    assert damaged == ()
    assert newest is not None
    assert newest.step == EPOCHS * EXAMPLES // BATCH
    more = hr.fit(
        counting_job(EPOCHS + 5), hr.ParameterServer(2), engine=engine, run_dir=tmp_path / "b", resume=tmp_path / "a"
    )
    check_counts(more, EPOCHS + 5)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    "delay_s", [0.0, pytest.param(0.004, marks=pytest.mark.full), 0.008, pytest.param(0.012, marks=pytest.mark.full)]
)
def test_a_worker_that_dies_while_all_save_before_their_first_round(
    engine: LocalEngine, victim: int, delay_s: float, tmp_path: Path
) -> None:
    hand, done = Hand({}, after=victim), tmp_path / "done"

    def kill() -> None:
        os.kill(hand.pids[victim], signal.SIGKILL)
        done.touch()

    timer = threading.Timer(delay_s, kill)

    def follow(event: Event) -> None:
        hand(event)
        if isinstance(event, WorkerStarted) and event.rank == victim and not timer.ident:
            timer.start()

    job = counting_job(25, model=functools.partial(Counter, done))
    run = hr.fit(job, hr.ParameterServer(2), engine=engine, on_event=follow, run_dir=tmp_path / "run")
    check_counts(run, 25)
    assert [lost.lost for lost in hand.lost] == [victim]
    newest, damaged = CheckpointFolder(tmp_path / "run" / "checkpoints").latest()
    assert newest is not None
    assert (newest.step, damaged) == (25 * EXAMPLES // BATCH, ())


class Doomed(Counter):
    """Ends whatever process builds it, but the one that looks at it first."""

    def __init__(self) -> None:
        super().__init__()
        if os.environ.get(MARK) != str(os.getpid()):
            os.kill(os.getpid(), signal.SIGKILL)


def test_workers_that_die_before_they_do_anything_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, str(os.getpid()))
    with LocalEngine() as fresh, pytest.raises(PeerLost, match="the 5th time in a row before it did anything"):
        hr.fit(counting_job(model=Doomed), hr.ParameterServer(1), engine=fresh)


@pytest.mark.parametrize(
    ("strategy", "joins"),
    [(hr.ParameterServer(2), 3), (Counted(2), 3), (hr.Mirrored(2, min_workers=1, max_workers=3), 2)],
    ids=["servers", "averaging", "mirrored"],
)
def test_workers_join_and_leave_a_run_that_goes_on(strategy: hr.Strategy, joins: int, tmp_path: Path) -> None:
    said: list[str] = []
    run_dir, done = tmp_path / "run", tmp_path / "done"

    def staff() -> None:
        assert until(lambda: any((run_dir / "events").glob("rank-1.jsonl")), 60)
        said.append(ask_for_workers(run_dir, 1, 60))
        new = run_dir / "events" / f"rank-{joins}.jsonl"
        assert until(lambda: new.exists() and '"stepped"' in new.read_text(), 60)
        said.append(ask_for_workers(run_dir, -2, 60))
        with pytest.raises(UsageError, match="a run has 1 to"):
            ask_for_workers(run_dir, -1, 60)
        done.touch()

    thread = threading.Thread(target=staff)
    thread.start()
    with LocalEngine() as fresh:
        run = hr.fit(counting_job(40, model=functools.partial(Counter, done)), strategy, engine=fresh, run_dir=run_dir)
    thread.join()
    check_counts(run, 40)
    assert [line.split(":")[0] for line in said] == ["3 workers from now on", "1 worker from now on"]
    ended = [event.rank for event in run.events if isinstance(event, WorkerEnded)]
    assert sorted(ended) == [0, 1, joins]
    assert ended[-1] == 0 or isinstance(strategy, Counted), "those that were asked to leave ended before"


def test_a_run_in_which_workers_wait_for_each_other_takes_no_further_ones(engine: LocalEngine, tmp_path: Path) -> None:
    refused: list[UsageError] = []

    def staff() -> None:
        assert until(lambda: any((tmp_path / "events").glob("rank-0.jsonl")), 60)
        with pytest.raises(UsageError) as caught:
            ask_for_workers(tmp_path, 1, 60)
        refused.append(caught.value)
        done.touch()

    done = tmp_path / "done"
    thread = threading.Thread(target=staff)
    thread.start()
    job = counting_job(25, model=functools.partial(Counter, done))
    hr.fit(job, hr.ParameterServer(2, staleness_bound=0), engine=engine, run_dir=tmp_path)
    thread.join()
    assert "no workers can join or leave" in str(refused[0])


def test_there_is_no_answer_where_nothing_runs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run has answered"):
        ask_for_workers(tmp_path, 1, timeout_s=0.2)
    with pytest.raises(UsageError, match="is no directory of a run"):
        ask_for_workers(tmp_path / "nowhere", 1)


def test_a_run_ends_after_its_time_with_workers_replaced(engine: LocalEngine) -> None:
    hand = Hand({1: (0, signal.SIGKILL)})
    run = hr.fit(counting_job(10**6), hr.ParameterServer(1), engine=engine, on_event=hand, seconds=2.0)
    first, second = (event.time_s for event in run.events if isinstance(event, WorkerStarted))
    (ended,) = (event.time_s for event in run.events if isinstance(event, WorkerEnded))
    assert first < second
    assert 1.5 < ended < second + 2.0, "its time does not begin anew"
