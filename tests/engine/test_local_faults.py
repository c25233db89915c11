"""Workers that fail: the right error, of the right rank, in time, and an engine that is as good as new."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import headrace as hr
from engine import victims
from engine.conftest import below, fork_servers, new_fork_server, until
from engine.victims import NOTICED_S, faulty, long_job, make_job, planted_at
from headrace.engine.local.engine import LocalEngine
from headrace.errors import ForkServerLost, PeerLost, RunFailed, UnfitMachine, WorkerFailed
from headrace.spec.events import Event

pytestmark = pytest.mark.slow

TIMEOUT_S = 1.0
"""The least there is."""
PAIR = hr.Mirrored(2)


def lost(engine: LocalEngine, job: hr.Job, run_dir: Path, strategy: hr.Strategy = PAIR) -> tuple[PeerLost, float]:
    """Trains; returns the error and the seconds since a rank had left its mark."""
    with pytest.raises(PeerLost) as caught:
        hr.fit(job, strategy, engine=engine, run_dir=run_dir, timeout_s=TIMEOUT_S)
    return caught.value, time.monotonic() - min(float(mark.read_text()) for mark in run_dir.glob("logs/*.sent"))


@pytest.mark.parametrize(
    "changes",
    [
        {"model": faulty(victims.fail)},
        {"data": victims.BadExample()},
        {"optimizer": victims.BadStep},
        {"task": None, "loss": victims.bad_loss},
    ],
    ids=["forward", "data set", "optimizer", "loss"],
)
@pytest.mark.parametrize("strategy", [PAIR, hr.CentralStorage(2)], ids=lambda strategy: strategy.name)
def test_an_error_in_user_code(engine: LocalEngine, strategy: hr.Strategy, changes: dict[str, Any]) -> None:
    with pytest.raises(WorkerFailed) as caught:
        hr.fit(make_job(**changes), strategy, engine=engine)
    error = caught.value
    assert time.monotonic() - planted_at(str(error)) < NOTICED_S
    assert str(error).startswith(f"rank {error.rank} on {socket.gethostname()} failed: {error.cause}")
    assert "ValueError: planted at" in error.cause
    lines = error.traceback.splitlines()
    assert lines[0].startswith("Traceback")
    assert victims.__file__ in lines[1], "it begins with the user's frames"
    assert lines[-1].startswith("ValueError: planted at")
    assert error.worker_exit_code == (5 if "data" in changes else 1)


def test_an_error_in_a_loop_of_ones_own_in_one_rank(engine: LocalEngine) -> None:
    with pytest.raises(WorkerFailed, match=r"rank 1 .* planted") as caught:
        hr.launch(victims.bad_loop, make_job(), PAIR, engine=engine)
    assert caught.value.rank == 1
    assert "in bad_loop" in caught.value.traceback.splitlines()[1]


@pytest.mark.parametrize("strategy", [hr.OneDevice(), hr.Pipeline(2), hr.FullySharded(2)], ids=lambda each: each.name)
def test_a_loss_without_a_gradient(engine: LocalEngine, strategy: hr.Strategy) -> None:
    job = make_job(model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), victims.Detached()))
    with pytest.raises(WorkerFailed, match="the loss depends on no parameter that is trained"):
        hr.fit(job, strategy, engine=engine)


def test_an_error_of_a_library_below_no_user_code(engine: LocalEngine) -> None:
    targets = torch.arange(victims.EXAMPLES)
    job = make_job(task=hr.tasks.multiclass(3), model=lambda: torch.nn.Linear(4, 3), data=(victims.INPUTS, targets))
    with pytest.raises(WorkerFailed, match="IndexError: Target") as caught:
        hr.fit(job, PAIR, engine=engine)
    assert str(Path(hr.__file__).parent) not in caught.value.traceback


@pytest.mark.parametrize("trial", range(5))
def test_all_fail_at_once(engine: LocalEngine, trial: int) -> None:
    with pytest.raises(WorkerFailed, match="planted at"):
        hr.fit(make_job(model=faulty(victims.fail, None)), hr.Mirrored(3), engine=engine)


@pytest.mark.parametrize("victim", [1, None], ids=["one", "all"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS])
def test_a_signal_ends_a_worker(
    engine: LocalEngine, tmp_path: Path, number: signal.Signals, victim: int | None
) -> None:
    job = make_job(model=faulty(lambda: victims.send(number), victim))
    error, seconds = lost(engine, job, tmp_path)
    assert seconds < NOTICED_S
    assert error.exit_code == 4
    assert victim in (error.rank, None)
    assert error.what().endswith(f"was lost: killed by signal {int(number)} ({number.name})")


@pytest.mark.parametrize(
    "job",
    [make_job(model=lambda: victims.dies_when_built(9)), long_job(model=victims.DiesWhenEvaluated)],
    ids=["start-up", "evaluation"],
)
def test_a_worker_is_killed_at_other_moments(engine: LocalEngine, tmp_path: Path, job: hr.Job) -> None:
    error, seconds = lost(engine, job, tmp_path)
    assert (error.rank, seconds < NOTICED_S) == (1, True)


def test_a_worker_is_killed_while_the_other_waits_in_the_exchange(engine: LocalEngine, tmp_path: Path) -> None:
    with pytest.raises(PeerLost, match=r"rank 1 .* killed by signal 9"):
        hr.launch(victims.killed_between_meetings, make_job(), PAIR, engine=engine, run_dir=tmp_path)
    assert time.monotonic() - float((tmp_path / "logs" / "rank-1.sent").read_text()) < NOTICED_S


@pytest.mark.parametrize("trial", range(3))
def test_a_killed_worker_explains_more_than_anothers_error(engine: LocalEngine, tmp_path: Path, trial: int) -> None:
    with pytest.raises(PeerLost, match=r"rank 1 .* killed by signal 9"):
        hr.launch(victims.killed_beside_an_error, make_job(), PAIR, engine=engine, run_dir=tmp_path)


@pytest.mark.parametrize(("workers", "victim"), [(1, 0), (2, 1), (2, None)])
@pytest.mark.parametrize("code", [0, 3])
def test_os_exit_in_user_code_is_no_end(engine: LocalEngine, workers: int, victim: int | None, code: int) -> None:
    def leave() -> None:
        print("so long")  # noqa: T201
        os._exit(code)

    with pytest.raises(WorkerFailed, match=f"exit code {code} without an error of its own") as caught:
        hr.fit(make_job(model=faulty(leave, victim)), hr.Mirrored(workers), engine=engine)
    assert caught.value.exit_code == 1
    assert caught.value.traceback == "so long\n"


def test_sys_exit_in_user_code_is_an_error(engine: LocalEngine) -> None:
    with pytest.raises(WorkerFailed, match=r"rank 1 .* SystemExit: 0"):
        hr.fit(make_job(model=faulty(lambda: sys.exit(0))), PAIR, engine=engine)


@pytest.mark.parametrize(
    ("model", "victim"),
    [(faulty(lambda: victims.send(19)), 1), (faulty(lambda: victims.send(19), None), None),
     (lambda: victims.dies_when_built(19), 1)],
    ids=["one", "all", "start-up"],
)  # fmt: skip
def test_a_frozen_worker_is_lost(
    engine: LocalEngine, tmp_path: Path, model: Callable[[], torch.nn.Module], victim: int | None
) -> None:
    error, seconds = lost(engine, make_job(model=model), tmp_path)
    # Its last sign was up to a beat, and on a busy machine some, before it left its mark.
    assert TIMEOUT_S / 2 < seconds < NOTICED_S
    assert victim in (error.rank, None)
    assert "gave no sign of life for " in str(error)


def holds_the_interpreter() -> None:
    assert sum(range(100_000_000)) > 0


def backtracks() -> None:
    began = time.monotonic()
    length = 20
    while time.monotonic() - began < 2 * TIMEOUT_S:
        assert re.fullmatch(r"(a+)+b", "a" * length) is None
        length += 1


@pytest.mark.parametrize("deed", [lambda: time.sleep(2.2 * TIMEOUT_S), holds_the_interpreter, backtracks])
def test_a_step_may_take_as_long_as_it_takes(engine: LocalEngine, deed: Callable[[], None]) -> None:
    assert hr.fit(make_job(model=faulty(deed), steps=3, epochs=None), PAIR, engine=engine, timeout_s=1).status == "ok"


def test_the_engine_is_as_good_as_new(engine: LocalEngine) -> None:
    """After all of the above."""
    run = hr.fit(make_job(), PAIR, engine=engine)
    assert run.status == "ok"
    assert [below(server) for server in fork_servers()] == [[]] * len(fork_servers())


def test_a_fork_server_that_is_killed_is_another_one_in_the_next_run() -> None:
    others = fork_servers()
    with LocalEngine() as engine:
        fork_server = new_fork_server(others)

        def kill(event: Event) -> None:
            if event.kind == "worker_started" and event.rank == 0:
                os.kill(fork_server, signal.SIGKILL)

        killed = r"the process that starts the workers was lost, and they with it: killed by signal 9 \(SIGKILL\)"
        with pytest.raises(ForkServerLost, match=killed):
            hr.fit(long_job(), PAIR, engine=engine, on_event=kill)
        assert hr.fit(make_job(), PAIR, engine=engine).status == "ok"


@pytest.mark.parametrize("dies", [False, True])
def test_a_fork_server_that_is_stopped_is_lost_and_so_is_a_worker_that_dies(dies: bool) -> None:
    others = fork_servers()
    with LocalEngine() as engine:
        workers: list[int] = []
        hr.fit(make_job(), PAIR, engine=engine)
        fork_server = new_fork_server(others)

        def stop(event: Event) -> None:
            if event.kind == "stepped" and not workers:
                workers.extend(below(fork_server))
                os.kill(fork_server, signal.SIGSTOP)
                if dies:
                    os.kill(workers[0], signal.SIGKILL)

        # With exit code 4, as each process that is lost.
        with pytest.raises(RunFailed if dies else ForkServerLost, match=None if dies else "was stopped for 1.0 s"):
            hr.fit(long_job(), PAIR, engine=engine, on_event=stop, timeout_s=TIMEOUT_S)
        assert until(lambda: below(fork_server) == [], 30)


def test_a_trained_model_that_cannot_be_saved_is_kept_elsewhere(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "elsewhere"))
    (tmp_path / "elsewhere").mkdir()
    # As a full disk does it: the file cannot take its place.
    (tmp_path / "run" / "model.safetensors" / "kept").mkdir(parents=True)
    where = rf"rank 0 on .* cannot save the trained model, 20 bytes, in {tmp_path}/run: .*directory.*; "
    with pytest.raises(UnfitMachine, match=where + rf"it is kept in {tmp_path}/elsewhere/") as failed:
        hr.fit(make_job(), run_dir=tmp_path / "run", engine=hr.ThreadEngine())
    kept = load_file(str(failed.value).rpartition(" ")[2])
    assert sum(tensor.numel() for tensor in kept.values()) == 5
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(UnfitMachine, match=where + "make room there"):
        hr.fit(make_job(), run_dir=tmp_path / "run", engine=hr.ThreadEngine(), resume=True)
    assert not list(tmp_path.glob("*/model.safetensors.part-*"))


@pytest.mark.parametrize("replaced", [False, True], ids=["deleted", "replaced"])
def test_a_run_directory_that_is_gone_at_the_end_is_said(tmp_path: Path, monkeypatch: Any, replaced: bool) -> None:
    run_dir, gone = tmp_path / "run", []

    def take_away(event: Event) -> None:
        if event.kind == "stepped" and not gone:
            gone.append(run_dir.rename(tmp_path / "moved"))
            shutil.rmtree(tmp_path / "moved")
            if replaced:
                run_dir.write_text("in its place")

    said = "its log are gone with the run's directory" if replaced else "was deleted or moved while the run trained"
    with pytest.raises(RunFailed, match=said):
        hr.fit(long_job(), PAIR, run_dir=run_dir, on_event=take_away, seconds=1.0, checkpoints=False)
    assert replaced or load_file(run_dir / "model.safetensors")
