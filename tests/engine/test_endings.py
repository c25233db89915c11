"""Ways for a run to end: terminal, watch, report, notebook and `run` say cause and remedy in the same words."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headrace as hr
from engine import victims
from engine.conftest import fork_servers
from engine.test_interrupts import press
from engine.test_parameter_server import at_step
from engine.test_termination import environment
from engine.victims import faulty, long_job, make_job
from headrace.cli.output import write_error
from headrace.engine.local.engine import LocalEngine
from headrace.report.model.glance import glanced
from headrace.report.model.summary import summarize
from headrace.report.trackers.curves import EventCurves, TrackedText
from headrace.report.views.page import page_fragment, write_page
from headrace.spec.events import RunEnded, RunStarted
from headrace.watch.state import WatchedRun
from watch.made import read

pytestmark = pytest.mark.slow
PAIR = hr.Mirrored(2)
OFTEN = hr.Checkpoints(every_steps=2)
OOM, CRASHED = "out-of-memory killer", "PYTHONFAULTHANDLER=1"
RESUME = "resume=True (--resume) goes on from the last checkpoint"
LINE, RATE = "victims.py, line", "lower the learning rate"


def root_loss(output: Tensor, target: Tensor) -> Tensor:
    """0, with a gradient that is not finite."""
    return (0.0 * (output - target)).sum().sqrt()


class Stops(hr.Callback):
    def on_step(self, moment: hr.Moment) -> None:
        if moment.step == 4:
            moment.stop("it is enough")


class Writes(torch.nn.Linear):
    """Changes a parameter on rank 1 alone."""

    def __init__(self) -> None:
        super().__init__(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and victims.rank() == 1:
            with torch.no_grad():
                self.bias.add_(1.0)
        return super().forward(inputs)


@dataclass(frozen=True)
class Way:
    """A job and what ends it: `cause` and `remedy` are parts of what is said, `fit` are arguments."""

    status: str
    cause: str
    remedy: str
    fit: dict[str, Any]
    strategy: hr.Strategy = PAIR
    job: Callable[[], hr.Job] = make_job


def kills(number: int) -> dict[str, Any]:
    return {"on_event": at_step(6, lambda pids: os.kill(pids[1], number), ranks=2)}


def ends(**changes: Any) -> Callable[[], hr.Job]:
    return partial(long_job, **changes)


WAYS = {
    "killed": Way("failed", "killed by signal 9 (SIGKILL)", OOM, kills(9), job=long_job),
    "killed with checkpoints": Way(
        "failed", "killed by signal 9", RESUME, {**kills(9), "checkpoints": OFTEN}, job=long_job
    ),
    "segmentation fault": Way("failed", "killed by signal 11 (SIGSEGV)", CRASHED, kills(11), job=long_job),
    "bus error": Way("failed", "killed by signal 7 (SIGBUS)", CRASHED, kills(7), job=long_job),
    "frozen": Way("failed", "no sign of life", "--timeout", {**kills(signal.SIGSTOP), "timeout_s": 1.0}, job=long_job),
    "error of the model": Way("failed", "ValueError: planted", LINE, {}, job=ends(model=faulty(victims.fail))),
    "error of the data": Way("failed", "ValueError: planted", "repair", {}, job=ends(data=victims.BadExample())),
    "error of the optimizer": Way("failed", "ValueError: planted", LINE, {}, job=ends(optimizer=victims.BadStep)),
    "error of the loss": Way("failed", "ValueError: planted", LINE, {}, job=ends(task=None, loss=victims.bad_loss)),
    "loss is not finite": Way(
        "failed", "the loss is", RATE, {}, job=ends(optimizer=partial(torch.optim.SGD, lr=1e30))
    ),
    "gradient is not finite": Way("failed", "not finite", RATE, {}, job=ends(task=None, loss=root_loss)),
    "copies differ": Way("failed", "keeps them equal", "on one worker alone", {"check": False}, job=ends(model=Writes)),
    "os._exit(7)": Way("failed", "exit code 7", "logs/rank-1.log", {}, job=ends(model=faulty(partial(os._exit, 7)))),
    "os._exit(0)": Way("failed", "exit code 0", "logs/rank-1.log", {}, job=ends(model=faulty(partial(os._exit, 0)))),
    "sys.exit": Way("failed", "SystemExit", LINE, {}, job=ends(model=faulty(partial(sys.exit, 3)))),
    "a server is killed": Way(
        "failed",
        "killed by signal 9",
        OOM,
        {"on_event": at_step(5, lambda pids: os.kill(pids[2], 9))},
        hr.ParameterServer(2),
        long_job,
    ),
    "a stage is killed": Way(
        "failed", "(stage 1 of 2)", OOM, kills(9), hr.Pipeline(2), ends(model=victims.split_model, epochs=10**5)
    ),
    "a worker of Downpour dies at once": Way(
        "failed", "the 5th time in a row", OOM, {}, hr.Downpour(2), ends(model=faulty(partial(victims.send, 9), 1, 1))
    ),
    "Ctrl-C": Way("interrupted", "Ctrl-C (SIGINT)", RESUME, {"on_event": press(1)[1]}, job=long_job),
    "Ctrl-C without checkpoints": Way(
        "interrupted", "Ctrl-C", "", {"on_event": press(1)[1], "checkpoints": False}, job=long_job
    ),
    "Ctrl-C twice": Way("failed", "interrupted (SIGINT)", "nothing was saved", {"on_event": press(2)[1]}, job=long_job),
    "time": Way("ok", "the time that it was given is over (seconds=0.5)", "", {"seconds": 0.5}, job=long_job),
    "a callback": Way("ok", "a callback asked for it: it is enough", "", {"callbacks": [Stops()]}, job=long_job),
    "no better": Way(
        "ok", "loss has got no better for 1", "", {},
        job=ends(options=hr.Options(early_stopping=hr.EarlyStopping("loss", patience=1, min_delta=1e9))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WAYS)
def test_all_say_it_in_the_same_words(
    engine: LocalEngine, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    way, run, terminal = WAYS[name], None, io.StringIO()
    try:
        run = hr.fit(way.job(), way.strategy, engine=engine, run_dir=tmp_path / "run", **way.fit)
    except (hr.errors.HeadraceError, KeyboardInterrupt) as error:
        write_error(terminal, error)
    ended = same_words(tmp_path / "run", capsys.readouterr().err + terminal.getvalue())
    assert ended.status == way.status
    assert way.cause in ended.words
    assert way.remedy in ended.remedy
    assert bool(way.remedy) == bool(ended.remedy), ended
    if run is not None:
        assert (run.status, run.cause, run.remedy) == (ended.status, ended.cause, ended.remedy)


def same_words(run_dir: Path, terminal: str, pages: Path | None = None) -> RunEnded:
    """Checks that each place says how a run has ended in the same words; returns the event."""
    summary = summarize(run_dir)
    ended = RunEnded(-1, 0.0, summary.status, summary.outcome.cause, summary.outcome.remedy)
    assert ended.cause
    assert ended.words in terminal or not terminal, terminal
    watched = read(WatchedRun(run_dir))
    assert (watched.row()["status"], watched.details(-1)["run"]["words"]) == (ended.status, ended.words)
    assert glanced(run_dir)["status"] == ended.status
    page = write_page((pages or run_dir.parent) / "page.html", [summary]).read_text()
    for first in (page.partition("</header>")[0], page_fragment([summary])):
        assert escape(ended.words) in re.sub("</?code>", "`", first)
    return ended


def test_a_tracker_says_it(tmp_path: Path) -> None:
    started = RunStarted(-1, 0.0, "mirrored", 2, "cpu", 1, 8, 64, "", {}, {})
    told = list(EventCurves(started).take(RunEnded(-1, 2.0, "failed", "it was killed", "begin anew")))
    assert told == [TrackedText("ended", "failed: it was killed; begin anew", 0, told[0].time_s)]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, "interrupted"), (signal.SIGKILL, "unfinished")])
def test_a_signal_ends_the_launcher(tmp_path: Path, number: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script = [
        sys.executable,
        "-m",
        "engine.lasting",
        "lstm",
        "mirrored",
        str(tmp_path / "run"),
        "new",
        str(number),
        "9",
    ]
    done = subprocess.run(script, env=environment(), text=True, capture_output=True, timeout=120)
    assert done.returncode == -number, done.stderr
    # What is gone is looked for where nothing was written for a while.
    monkeypatch.setattr("headrace.watch.state._QUIET_S", 0.0)
    ended = same_words(tmp_path / "run", done.stderr if number == signal.SIGTERM else "")
    assert ended.status == status
    assert ("SIGTERM" if number == signal.SIGTERM else "it was killed") in ended.cause
    assert RESUME in ended.remedy


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_disk(engine: LocalEngine, tmp_path: Path) -> None:
    """Training goes on, and the model is saved elsewhere; the last event has a place of its own on the disk."""
    from storm.disks import Disk
    from storm.schedule import Fault

    disk, terminal = Disk(tmp_path / "disk", 2 << 20), io.StringIO()
    fault = Fault("full disk", 0, 0)
    try:
        fill = at_step(6, lambda _: disk.fail(fault), ranks=2)
        run_dir = disk.folder / "run"
        with pytest.raises(hr.errors.WorkerFailed) as caught:
            hr.fit(make_job(epochs=25), PAIR, engine=engine, run_dir=run_dir, checkpoints=OFTEN, on_event=fill)
        assert caught.value.worker_exit_code == 3
        kept = Path(caught.value.remedy.partition("it is kept in ")[2].partition(";")[0])
        assert kept.is_file()
        shutil.rmtree(kept.parent)
        write_error(terminal, caught.value)
        ended = same_words(run_dir, terminal.getvalue(), tmp_path)
        assert "No space left on device" in ended.cause
    finally:
        disk.close()


def test_the_fork_server_is_killed(tmp_path: Path) -> None:
    terminal = io.StringIO()
    before = set(fork_servers())
    with LocalEngine() as engine:
        kill = at_step(6, lambda _: [os.kill(each, 9) for each in set(fork_servers()) - before], ranks=2)
        with pytest.raises(hr.errors.ForkServerLost) as caught:
            hr.fit(long_job(), PAIR, engine=engine, run_dir=tmp_path / "run", on_event=kill)
    write_error(terminal, caught.value)
    assert OOM in same_words(tmp_path / "run", terminal.getvalue()).remedy
