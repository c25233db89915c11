"""SIGTERM: the run ends in order, with a checkpoint of the last finished step, and goes on from there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import headrace as hr
from engine import lasting
from engine.conftest import below, ended, state, until
from engine.lasting import OFTEN, ROUNDS, STRATEGIES, files_of, lasting_job, left_by
from engine.ranks import free_port
from headrace.checkpoint import CheckpointFolder
from headrace.engine import base
from headrace.engine.base import ECHO_S, TERMINATED, orderly_interrupts, terminate
from headrace.engine.local.engine import LocalEngine
from headrace.shared_memory.control_page import ControlPage
from headrace.spec.events import RunEnded, Stepped
from warm.programs import ROOT

pytestmark = pytest.mark.slow

TESTS = Path(__file__).resolve().parent.parent
JOB = """
import functools, os, time, torch, headrace as hr
from torch import nn

class Pausing(nn.Linear):
    def forward(self, inputs):
        log = os.path.basename(os.readlink("/proc/self/fd/1"))
        if log.startswith("rank-"):
            open(os.path.join({folder!r}, log), "w").close()
            time.sleep({pause})
        return super().forward(inputs)

time.sleep({importing})
data = (torch.randn(64, 4), torch.randn(64, 1))
job = hr.Job(model=functools.partial(Pausing, 4, 1), task=hr.tasks.regression(), optimizer=torch.optim.Adam,
             data=data, global_batch_size=8, epochs=10**6)
"""


def environment(**names: object) -> dict[str, str]:
    path = os.pathsep.join([str(TESTS), str(ROOT / "src")])
    return {**os.environ, "PYTHONPATH": path, "CI": "true", **{name: str(value) for name, value in names.items()}}


@contextmanager
def command(
    folder: Path, *options: str, pause: float = 0.002, importing: float = 0.0
) -> Iterator[subprocess.Popen[str]]:
    """`headrace train` on a job of hours."""
    job = folder / "job.py"
    job.write_text(JOB.format(folder=str(folder), pause=pause, importing=importing))
    arguments = [Path(sys.executable).with_name("headrace"), "train", str(job), "--run-dir", folder / "run", *options]
    with subprocess.Popen(arguments, env=environment(), text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


def wait_for(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    """Waits until a command has come so far; what it said if it ends before, or is too slow."""
    if not until(lambda: process.poll() is not None or condition(), 60) or process.poll() is not None:
        process.kill()
        pytest.fail("\n".join(process.communicate()))


def finished(run_dir: Path, workers: int) -> int:
    """How many rounds every worker has finished, by the events."""
    from headrace.report.model.events import read_events

    done = [0] * workers
    for event in read_events(run_dir):
        if isinstance(event, Stepped):
            done[event.rank] = event.step + 1
    assert len(set(done)) == 1, "all in the same round"
    return done[0]


def check_left(process: subprocess.Popen[str], children: list[int], run_dir: Path, workers: int) -> None:
    """Looks at what a command that was asked to end has left."""
    _, said = process.communicate(timeout=120)
    assert process.returncode == 143, said
    assert "terminated (SIGTERM)" in said
    assert until(lambda: all(state(pid) == "" for pid in children), 30)
    step, _ = files_of(run_dir)
    assert step == finished(run_dir, workers) > 0
    assert CheckpointFolder(run_dir / "checkpoints").latest()[1] == ()
    assert not list((run_dir / "checkpoints").glob("*.part"))
    assert (run_dir / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "workers"),
    [
        ((), 1),
        (("--strategy", "mirrored", "--workers", "2"), 2),
        (("--strategy", "central_storage", "--workers", "2"), 2),
    ],
    ids=["one_device", "mirrored", "central_storage"],
)
def test_the_command_ends_with_a_checkpoint(tmp_path: Path, options: tuple[str, ...], workers: int) -> None:
    """While it saves after each second round, and once again after it went on."""
    run_dir = tmp_path / "run"
    for attempt in range(2):
        resume = ("--resume",) if attempt else ()
        before = files_of(run_dir)[0] if attempt else 0
        with command(tmp_path, "--checkpoint-every", "2", *options, *resume) as process:
            folder = CheckpointFolder(run_dir / "checkpoints")
            wait_for(process, lambda folder=folder, before=before: max(folder.steps(), default=0) > before + 10)
            children = below(process.pid)
            process.send_signal(signal.SIGTERM)
            check_left(process, children, run_dir, workers)
        assert files_of(run_dir)[0] > before


@pytest.mark.usefixtures("real_python")
@pytest.mark.parametrize("after_s", [0.0, 0.3, 1.0, 1.6])
def test_before_it_has_begun(tmp_path: Path, after_s: float) -> None:
    """While it imports; what it leaves can be gone on with, or there is nothing."""
    with command(tmp_path, "--checkpoint-every", "2", importing=0.5) as process:
        time.sleep(after_s)
        children = below(process.pid)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    # Before Python has come to our first line, the system ends it.
    assert process.returncode in (143, -signal.SIGTERM)
    # No process goes on importing. When ended processes are reaped is up to the system.
    assert until(lambda: all(map(ended, children)), 30)
    run_dir = tmp_path / "run"
    there = CheckpointFolder(run_dir / "checkpoints").latest()
    assert there[1] == ()
    if (run_dir / "events" / "rank-0.jsonl").exists() and finished(run_dir, 1):
        assert there[0] is not None
        assert there[0].step == finished(run_dir, 1)


def test_while_it_restores(tmp_path: Path) -> None:
    with command(tmp_path, "--checkpoint-every", "2") as process:
        folder = CheckpointFolder(tmp_path / "run" / "checkpoints")
        wait_for(process, lambda: len(folder.steps()) > 1)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    before = files_of(tmp_path / "run")[0]
    with command(tmp_path, "--resume") as process:
        launcher = tmp_path / "run" / "events" / "launcher.jsonl"
        wait_for(process, lambda: launcher.read_text().count('"run_started"') == 2)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    assert process.returncode == 143
    assert files_of(tmp_path / "run")[0] >= before, "what was restored is not lost"


def test_a_second_one_ends_it_at_once(tmp_path: Path) -> None:
    """The round takes longer than the test waits."""
    with command(tmp_path, "--strategy", "mirrored", "--workers", "2", pause=60) as process:
        wait_for(process, lambda: {path.name for path in tmp_path.glob("*.log")} == {"rank-0.log", "rank-1.log"})
        children = below(process.pid)
        process.send_signal(signal.SIGTERM)
        time.sleep(ECHO_S + 0.1)
        assert process.poll() is None, "it waits for the round's end"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 143
    assert until(lambda: all(state(pid) == "" for pid in children), 30)


def test_to_a_worker_alone(tmp_path: Path) -> None:
    with command(tmp_path, "--strategy", "mirrored", "--workers", "2", "--checkpoint-every", "2") as process:
        folder = CheckpointFolder(tmp_path / "run" / "checkpoints")
        wait_for(process, lambda: len(folder.steps()) > 1)
        children = below(process.pid)
        workers = [pid for child in children for pid in below(child)]
        os.kill(workers[1], signal.SIGTERM)
        process.communicate(timeout=120)
    assert process.returncode == 130
    assert until(lambda: all(state(pid) == "" for pid in children), 30)
    assert files_of(tmp_path / "run")[0] == finished(tmp_path / "run", 2)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_to_a_worker_of_a_script(engine: LocalEngine, tmp_path: Path, strategy: hr.Strategy) -> None:
    def loop(worker: hr.Worker) -> None:
        lasting.broken_off(lasting.terminate, 5, worker.world - 1, worker)

    run = hr.launch(loop, lasting_job("cnn", epochs=1000), strategy, run_dir=tmp_path, engine=engine, checkpoints=OFTEN)
    assert (run.status, run.interrupted) == ("interrupted", True)
    assert files_of(tmp_path)[0] == finished(tmp_path, run.plan.workers) >= 6


SCRIPT = """
import os, signal, sys, headrace as hr
from engine.lasting import *

came = []
if sys.argv[1] == "own":
    signal.signal(signal.SIGTERM, lambda *_: came.append(1))

def on_event(event):
    if event.kind == "stepped" and event.rank == 0 and event.step == 5:
        os.kill(os.getpid(), signal.SIGTERM)

run = hr.fit(lasting_job("cnn"), hr.Mirrored(2), run_dir=sys.argv[2], checkpoints=OFTEN, on_event=on_event)
print(run.status, came)
"""


@pytest.mark.parametrize("handler", ["own", "none"])
def test_a_script_keeps_its_own_answer(tmp_path: Path, handler: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, handler, tmp_path / "run"], env=environment(), text=True,
                          capture_output=True, timeout=120)  # fmt: skip
    if handler == "own":
        assert (done.returncode, done.stdout) == (0, "ok [1]\n"), done.stderr
        assert files_of(tmp_path / "run")[0] == ROUNDS
    else:
        # As if it had not been caught, but for the order in which it ended.
        assert (done.returncode, done.stdout) == (-signal.SIGTERM, ""), done.stderr
        assert 6 <= files_of(tmp_path / "run")[0] == finished(tmp_path / "run", 2)


def test_the_launcher_dies_and_the_run_goes_on(engine: LocalEngine, tmp_path: Path) -> None:
    """Killed, with all workers; asked to end; then to the end: as without any of it."""
    script = [sys.executable, "-m", "engine.lasting", "lstm", "mirrored"]
    for resume, number, at, code in (("new", 9, 9, -9), ("resume", 15, 11, -15)):
        arguments = [*script, str(tmp_path / "a"), resume, str(number), str(at)]
        done = subprocess.run(arguments, env=environment(), text=True, capture_output=True, timeout=120)
        assert done.returncode == code, done.stderr
    run = hr.fit(
        lasting_job("lstm"), hr.Mirrored(2), run_dir=tmp_path / "a", engine=engine, checkpoints=OFTEN, resume=True
    )
    whole = hr.fit(lasting_job("lstm"), hr.Mirrored(2), run_dir=tmp_path / "b", engine=engine, checkpoints=OFTEN)
    assert left_by(run) == left_by(whole)
    ended = [event.status for event in run.events if isinstance(event, RunEnded)]
    assert ended == ["interrupted", "ok"]


Ranks = Callable[..., list[tuple[int, str]]]


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    """`ranks(resume, signal, at)`: exit codes and standard error of two processes as torchrun starts them."""
    started: list[subprocess.Popen[str]] = []

    def start(resume: str, number: int, at: int) -> list[tuple[int, str]]:
        port = free_port()
        pair = []
        for rank in range(2):
            names = environment(RANK=rank, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            arguments = [
                sys.executable,
                "-m",
                "engine.lasting",
                "lstm",
                "mirrored",
                str(tmp_path / "a"),
                resume,
                str(number),
                str(at),
            ]
            pair.append(subprocess.Popen(arguments, env=names, text=True, stdout=subprocess.DEVNULL,
                                         stderr=subprocess.PIPE))  # fmt: skip
        started.extend(pair)
        said = [process.communicate(timeout=120)[1] for process in pair]
        return [(process.returncode, text) for process, text in zip(pair, said, strict=True)]

    yield start
    for process in started:
        process.kill()


def test_ranks_of_a_launcher_go_on(engine: LocalEngine, ranks: Ranks, tmp_path: Path) -> None:
    """Rank 0 is killed; then asked to end, and all end in order with it; then they end where one run ends."""
    (zero, _), (one, said) = ranks("new", 9, 9)
    assert zero == -signal.SIGKILL
    assert one != 0
    assert "PeerLost" in said
    (zero, _), (one, _) = ranks("resume", 15, 11)
    assert (zero, one) == (-signal.SIGTERM, 0), "the rank that was asked ends; the other has been interrupted"
    codes = [code for code, _ in ranks("resume", 0, 0)]
    assert codes == [0, 0]
    whole = hr.fit(lasting_job("lstm"), hr.Mirrored(2), run_dir=tmp_path / "b", engine=engine, checkpoints=OFTEN)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (whole.run_dir / "model.safetensors").read_bytes()


def test_ranks_that_have_nothing_to_resume(ranks: Ranks) -> None:
    (zero, said), (one, pointer) = ranks("resume", 0, 0)
    assert 0 not in (zero, one)
    assert "there is nothing to resume from" in said
    assert "failed: what it prints says why" in pointer


@pytest.fixture
def page() -> Iterator[ControlPage]:
    page = ControlPage.create(1)
    yield page
    page.segment.close()


@pytest.fixture
def codes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The codes with which this process would have ended."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    # What the other tests' engine has started is not this command's.
    monkeypatch.setattr(base, "_companions", set())
    before = signal.signal(signal.SIGTERM, terminate)
    yield ended
    signal.signal(signal.SIGTERM, before)


def kill_after_the_echo(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.monotonic()
    monkeypatch.setattr(base, "monotonic", lambda: now + ECHO_S + 0.01)
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_second_signal_ends_the_process_at_once(
    page: ControlPage, codes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with orderly_interrupts(page) as interrupts:
        os.kill(os.getpid(), signal.SIGTERM)
        assert (page.stop, interrupts.terminated, interrupts.status(page)) == (1, True, TERMINATED)
        assert codes == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert codes == [], "an echo of the first"
        kill_after_the_echo(monkeypatch)
        assert codes == [143]


def test_an_echo_after_the_run_does_not_break_off_the_commands_end(
    page: ControlPage, codes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with orderly_interrupts(page):
        os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    assert codes == []
    kill_after_the_echo(monkeypatch)
    assert codes == [143]


def test_one_that_comes_to_the_group_too(tmp_path: Path) -> None:
    """As `timeout` sends it: to the process, then to its group."""
    with command(tmp_path, "--checkpoint-every", "2") as process:
        folder = CheckpointFolder(tmp_path / "run" / "checkpoints")
        wait_for(process, lambda: len(folder.steps()) > 1)
        children = below(process.pid)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.003)
        process.send_signal(signal.SIGTERM)
        check_left(process, children, tmp_path / "run", 1)


def test_an_ignored_one_stays_ignored(page: ControlPage) -> None:
    """As nohup does it with others."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with orderly_interrupts(page):
            os.kill(os.getpid(), signal.SIGTERM)
        assert page.stop == 0
    finally:
        signal.signal(signal.SIGTERM, before)


def test_json_says_what_happened(tmp_path: Path) -> None:
    with command(tmp_path, "--json") as process:
        wait_for(process, (tmp_path / "rank-0.log").exists)
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 143
    error = json.loads(out)["error"]
    assert (error["message"], error["exit_code"]) == ("terminated (SIGTERM)", 143)
    assert error["notes"] == [f"to go on: --run-dir {tmp_path / 'run'} --resume"]
