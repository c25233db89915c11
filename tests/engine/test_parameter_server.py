"""Servers beside workers: they start, fail, freeze, save, stop and go on as one run."""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as hr
from engine import victims
from engine.conftest import below, fork_servers
from engine.lasting import EXAMPLES, ROUNDS, lasting_job, left_by, rounds_of, stopped_at
from engine.victims import NOTICED_S, long_job, make_job, planted_at
from headrace.checkpoint import CheckpointFolder
from headrace.engine.base import Engine
from headrace.engine.local.engine import LocalEngine
from headrace.errors import HeadraceError, PeerLost, WorkerFailed
from headrace.spec.events import Evaluated, Event, Saved, ServerStarted, Stepped, WorkerStarted

TIMEOUT_S = 1.0
PAIR = hr.ParameterServer(2, staleness_bound=0)
REGIMES = {
    "lock-step": PAIR,
    "bound 2": hr.ParameterServer(2, staleness_bound=2),
    "asynchronous": hr.ParameterServer(2),
    "downpour": hr.Downpour(2, push_every=2, fetch_every=3),
}
EVERY_FOUR = hr.Checkpoints(every_steps=4, every_s=None, keep=9)

every_regime = pytest.mark.parametrize("strategy", REGIMES.values(), ids=list(REGIMES))


@pytest.fixture(params=["threads", "processes"])
def any_engine(request: pytest.FixtureRequest, engine: LocalEngine) -> Engine:
    return engine if request.param == "processes" else hr.ThreadEngine()


def far(one: hr.Run, other: hr.Run) -> float:
    tensors = other.model.state_dict()
    return max(float((value - tensors[name]).abs().max()) for name, value in one.model.state_dict().items())


def unclipped(kind: str = "plain", **changes: Any) -> hr.Job:
    """A job of 15 rounds that workers in lock-step do as one device does."""
    return lasting_job(kind, {"clip_norm": None}, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 2])
def test_processes_in_lock_step_are_one_device(engine: LocalEngine, servers: int) -> None:
    run = hr.fit(unclipped(), hr.ParameterServer(3, servers, staleness_bound=0), engine=engine)
    one = hr.fit(unclipped(), hr.OneDevice(), engine=hr.ThreadEngine())
    assert far(run, one) < 1e-9
    assert run.metrics == pytest.approx(one.metrics, abs=1e-9)
    started = {event.rank: event.pid for event in run.events if isinstance(event, ServerStarted | WorkerStarted)}
    assert len(set(started.values())) == 3 + servers
    assert os.getpid() not in started.values()
    assert sorted(event.rank for event in run.events if isinstance(event, ServerStarted)) == list(range(3, 3 + servers))


@pytest.mark.slow
@every_regime
def test_an_optimizers_error_on_a_server_is_that_of_its_rank(any_engine: Engine, strategy: hr.Strategy) -> None:
    with pytest.raises(WorkerFailed, match=r"rank 2 .* ValueError: planted at") as caught:
        hr.fit(make_job(optimizer=victims.BadStep), strategy, engine=any_engine)
    error = caught.value
    assert time.monotonic() - planted_at(str(error)) < NOTICED_S
    assert (error.rank, error.worker_exit_code) == (2, 1)
    shown = error.traceback or "".join(traceback.format_exception(error))
    assert victims.__file__ in shown
    if isinstance(any_engine, LocalEngine):
        assert victims.__file__ in shown.splitlines()[1], "it begins with the user's frames"


@pytest.mark.slow
@every_regime
def test_a_workers_error_is_that_of_its_rank(any_engine: Engine, strategy: hr.Strategy) -> None:
    def loop(worker: hr.Worker) -> None:
        for batch in worker.batches():
            worker.step(batch)
            if worker.rank == 1:
                victims.fail()

    with pytest.raises(WorkerFailed, match=r"rank 1 .* ValueError: planted at") as caught:
        hr.launch(loop, long_job(), strategy, engine=any_engine)
    assert time.monotonic() - planted_at(str(caught.value)) < NOTICED_S
    assert caught.value.rank == 1


def at_step(count: int, deed: Callable[[dict[int, int]], None], ranks: int = 3) -> Callable[[Event], None]:
    """Returns a callback that does a deed at the run's `count`-th step, with the processes' ids by rank."""
    pids: dict[int, int] = {}
    steps = 0

    def on_event(event: Event) -> None:
        nonlocal steps
        if isinstance(event, ServerStarted | WorkerStarted):
            pids[event.rank] = event.pid
        # No worker waits for all to begin, and each one's events come by themselves.
        steps += isinstance(event, Stepped) and len(pids) >= ranks
        if isinstance(event, Stepped) and steps == count:
            steps += 1
            deed(pids)

    return on_event


@pytest.mark.slow
@every_regime
def test_a_server_without_a_backup_that_is_killed_is_named(engine: LocalEngine, strategy: hr.Strategy) -> None:
    killed = []

    def kill(pids: dict[int, int]) -> None:
        killed.append(time.monotonic())
        os.kill(pids[2], signal.SIGKILL)

    with pytest.raises(PeerLost) as caught:
        hr.fit(long_job(), strategy, engine=engine, on_event=at_step(5, kill))
    assert caught.value.what() == f"rank 2 (a server) on {socket.gethostname()} was lost: killed by signal 9 (SIGKILL)"
    assert time.monotonic() - killed[0] < NOTICED_S
    assert [below(server) for server in fork_servers()] == [[]] * len(fork_servers())


@pytest.mark.slow
def test_one_of_two_servers_is_killed(engine: LocalEngine) -> None:
    with pytest.raises(PeerLost, match=r"rank 3 .* killed by signal 9"):
        hr.fit(
            long_job(),
            hr.ParameterServer(2, servers=2),
            engine=engine,
            on_event=at_step(5, lambda pids: os.kill(pids[3], signal.SIGKILL), ranks=4),
        )


@pytest.mark.slow
def test_a_server_that_is_frozen_is_lost(engine: LocalEngine) -> None:
    stopped = []

    def stop(pids: dict[int, int]) -> None:
        stopped.append(time.monotonic())
        os.kill(pids[2], signal.SIGSTOP)

    with pytest.raises(PeerLost, match=r"rank 2 .* gave no sign of life for "):
        hr.fit(long_job(), PAIR, engine=engine, timeout_s=TIMEOUT_S, on_event=at_step(5, stop))
    # Its last sign was up to a beat, and on a busy machine some, before it left its mark.
    assert TIMEOUT_S / 2 < time.monotonic() - stopped[0] < NOTICED_S


def assert_ended_in_order(run: hr.Run) -> None:
    assert run.status == "interrupted"
    first, saved = (event for event in run.events if isinstance(event, Saved))
    assert CheckpointFolder(run.run_dir / "checkpoints").steps() == (first.step, saved.step)
    assert first.step == 0 < saved.step
    assert rounds_of(run) == dict.fromkeys(range(saved.step), 8), "whole rounds"


@pytest.mark.slow
@every_regime
def test_ctrl_c_ends_the_run_in_order(any_engine: Engine, strategy: hr.Strategy, tmp_path: Path) -> None:
    press = at_step(5, lambda _: os.kill(os.getpid(), signal.SIGINT))
    assert_ended_in_order(
        hr.fit(long_job(eval_data=None), strategy, engine=any_engine, run_dir=tmp_path, on_event=press)
    )


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 2])
def test_to_ask_one_process_to_end_is_to_ask_the_run(engine: LocalEngine, rank: int, tmp_path: Path) -> None:
    ask = at_step(5, lambda pids: os.kill(pids[rank], signal.SIGTERM))
    assert_ended_in_order(hr.fit(long_job(), REGIMES["asynchronous"], engine=engine, run_dir=tmp_path, on_event=ask))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cnn", "plain"])
@pytest.mark.parametrize("workers", [1, 2])
def test_to_go_on_in_lock_step_is_no_interruption(tmp_path: Path, workers: int, kind: str, engine: LocalEngine) -> None:
    strategy = hr.ParameterServer(workers, staleness_bound=0)

    def train(until: int, folder: str, resume: bool = False) -> hr.Run:
        loop, arguments = functools.partial(stopped_at, until), {"checkpoints": EVERY_FOUR, "resume": resume}
        return hr.launch(loop, lasting_job(kind), strategy, engine=engine, run_dir=tmp_path / folder, **arguments)

    whole = train(99, "whole")
    assert train(5, "parts").summary.steps == 5
    run = train(99, "parts", resume=True)
    assert left_by(run) == left_by(whole)
    assert left_by(run)[0] == ROUNDS


@pytest.mark.slow
@pytest.mark.parametrize("strategy", list(REGIMES.values())[1:], ids=list(REGIMES)[1:])
def test_to_go_on_by_oneself_visits_every_example_once(tmp_path: Path, strategy: hr.Strategy) -> None:
    arguments: dict[str, Any] = {"engine": hr.ThreadEngine(), "run_dir": tmp_path, "checkpoints": EVERY_FOUR}
    first = hr.launch(functools.partial(stopped_at, 5), lasting_job("plain"), strategy, **arguments)
    assert rounds_of(first) == {**dict.fromkeys(range(4), 12), 4: 2}
    run = hr.launch(functools.partial(stopped_at, 99), lasting_job("plain"), strategy, **arguments, resume=True)
    assert rounds_of(run) == {round_: 2 if round_ % 5 == 4 else 12 for round_ in range(ROUNDS)}
    assert sum(rounds_of(run).values()) == 3 * EXAMPLES
    assert run.summary.steps == ROUNDS


WAYS: list[tuple[hr.Strategy, hr.Strategy]] = [
    (PAIR, hr.Mirrored(2)),
    (hr.Mirrored(2), PAIR),
    (hr.ParameterServer(3, 2, staleness_bound=0, sharding="max_size:64B"), hr.CentralStorage(2)),
    (hr.CentralStorage(3), hr.ParameterServer(2, 2, staleness_bound=0)),
    (hr.OneDevice(), hr.ParameterServer(3, 3, staleness_bound=0, sharding="fixed_shards:2")),
    (hr.ParameterServer(1, staleness_bound=0), hr.OneDevice()),
    (PAIR, hr.ParameterServer(3, 2, staleness_bound=0, placement="round_robin")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("saver", "loader"), WAYS, ids=lambda strategy: strategy.name)
def test_a_checkpoint_goes_on_under_any_other_strategy(tmp_path: Path, saver: hr.Strategy, loader: hr.Strategy) -> None:
    arguments: dict[str, Any] = {"engine": hr.ThreadEngine(), "run_dir": tmp_path, "checkpoints": EVERY_FOUR}
    hr.fit(dataclasses.replace(unclipped(), epochs=None, steps=8), saver, **arguments)
    run = hr.fit(unclipped(), loader, **arguments, resume=True)
    whole = hr.fit(unclipped(), hr.OneDevice(), engine=hr.ThreadEngine())
    assert far(run, whole) < 1e-9
    assert run.metrics == pytest.approx(whole.metrics, abs=1e-9)


@pytest.mark.slow
def test_asynchronous_weights_go_on_on_one_device(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"engine": hr.ThreadEngine(), "run_dir": tmp_path, "checkpoints": EVERY_FOUR}
    before = hr.fit(unclipped(), hr.ParameterServer(3), **arguments)
    after = hr.fit(unclipped(), hr.OneDevice(), **arguments, resume=True)
    assert far(before, after) == 0.0
    assert before.metrics == pytest.approx(after.metrics, abs=1e-12)


@pytest.mark.slow
@every_regime
def test_a_run_that_was_over_goes_on_to_nothing_but_its_metrics(tmp_path: Path, strategy: hr.Strategy) -> None:
    arguments: dict[str, Any] = {"engine": hr.ThreadEngine(), "run_dir": tmp_path}
    before = hr.fit(lasting_job("plain"), strategy, **arguments)
    after = hr.fit(lasting_job("plain"), strategy, **arguments, resume=True)
    assert after.metrics == pytest.approx(before.metrics, abs=1e-12)
    assert far(before, after) == 0.0


@pytest.mark.each_value
@pytest.mark.slow
@every_regime
@pytest.mark.parametrize("every", [None, 1, 4])
def test_evaluations_are_due_as_on_one_device(strategy: hr.Strategy, every: int | None) -> None:
    job = lasting_job("plain", {"eval_every": every, "clip_norm": None})
    due = [
        [event.step for event in hr.fit(job, each, engine=hr.ThreadEngine()).events if isinstance(event, Evaluated)]
        for each in (hr.OneDevice(), strategy)
    ]
    assert due[0] == due[1]
    assert due[0][-1] == ROUNDS


@pytest.mark.slow
@every_regime
def test_patience_comes_to_its_end(any_engine: Engine, strategy: hr.Strategy) -> None:
    """Nothing gets better at a learning rate of 0."""
    wish = hr.EarlyStopping(patience=2)
    job = make_job(
        epochs=50,
        eval_data=(victims.INPUTS, victims.TARGETS),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.0),
        options=hr.Options(early_stopping=wish),
    )
    run = hr.fit(job, strategy, engine=any_engine)
    assert run.status == "ok"
    assert run.summary.steps == 8 * 3
    assert rounds_of(run) == dict.fromkeys(range(24), 8)


def leaves(worker: hr.Worker) -> None:
    # Where rank 0 has trained on the whole epoch before rank 1 came, rank 1 leaves at the fence, and rank 0 misses it.
    for batch in worker.batches():
        worker.step(batch)
        if worker.rank == 1:
            break


def leaves_together(worker: hr.Worker) -> None:
    for batch in worker.batches():
        worker.step(batch)
        break


def leaves_alone_where_all_meet(worker: hr.Worker) -> None:
    for batch in worker.batches():
        worker.step(batch)
        if worker.epoch_ended and worker.rank == 1:
            break


def does_not_step(worker: hr.Worker) -> None:
    for batch in worker.batches():
        if worker.rank == 1:
            continue
        worker.step(batch)


def does_not_begin(worker: hr.Worker) -> None:
    if worker.rank != 1:
        for batch in worker.batches():
            worker.step(batch)


def evaluates_alone(worker: hr.Worker) -> None:
    for batch in worker.batches():
        worker.step(batch)
        worker.evaluate()


@pytest.mark.slow
@pytest.mark.each_value
@every_regime
@pytest.mark.parametrize(
    ("loop", "reason"),
    [
        (leaves, "the loop on rank 1 ended after .* rounds(, where its leases| and rank 0 still waits)"),
        (leaves_together, "ended after .* rounds, where its leases of the data are not done"),
        (leaves_alone_where_all_meet, "the loop on rank 1 ended after 8 rounds and .* still waits for it"),
        (does_not_step, r"the loop on rank \d went on without worker.step\(\)"),
        (does_not_begin, "the loop on rank 1 ended after 0 rounds, where its leases"),
        (evaluates_alone, r"calls worker.evaluate\(\) after .* evaluate and break there, on every worker"),
    ],
)
def test_a_loop_that_leaves_others_waiting_is_refused(
    any_engine: Engine, strategy: hr.Strategy, loop: Callable[[hr.Worker], None], reason: str
) -> None:
    with pytest.raises(HeadraceError, match=reason):
        hr.launch(loop, long_job(), strategy, engine=any_engine)


@pytest.mark.slow
@every_regime
def test_a_loop_may_end_where_all_meet(any_engine: Engine, strategy: hr.Strategy, tmp_path: Path) -> None:
    run = hr.launch(functools.partial(stopped_at, 8), long_job(), strategy, engine=any_engine, run_dir=tmp_path)
    assert run.status == "ok"
    assert rounds_of(run) == dict.fromkeys(range(8), 8)
    assert CheckpointFolder(tmp_path / "checkpoints").steps() == (0, 8)
