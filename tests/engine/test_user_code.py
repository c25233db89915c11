"""What user code may do in a worker: print, move about, start threads and processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import headrace as hr
from belongings import named_shared_memory
from engine import victims
from engine.conftest import ended, until
from engine.victims import EXAMPLES, INPUTS, TARGETS, faulty, make_job
from headrace.engine.local.engine import LocalEngine
from headrace.errors import PeerLost, WorkerFailed

pytestmark = pytest.mark.slow

PAIR = hr.Mirrored(2)


def logs(run_dir: Path) -> list[str]:
    return [(run_dir / "logs" / f"rank-{rank}.log").read_text() for rank in range(2)]


def speak() -> None:
    print(f"rank {victims.rank()} says hello")  # noqa: T201
    print("and complains", file=sys.stderr)  # noqa: T201


def test_what_a_rank_prints_is_in_its_log(engine: LocalEngine, tmp_path: Path) -> None:
    hr.fit(make_job(model=faulty(speak, None)), PAIR, engine=engine, run_dir=tmp_path)
    assert logs(tmp_path) == [f"rank {rank} says hello\nand complains\n" for rank in range(2)]


def test_what_a_killed_rank_has_printed_is_there_too(engine: LocalEngine, tmp_path: Path) -> None:
    def last_words() -> None:
        speak()
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(PeerLost):
        hr.fit(make_job(model=faulty(last_words)), PAIR, engine=engine, run_dir=tmp_path)
    assert logs(tmp_path)[1] == "rank 1 says hello\nand complains\n"


def test_ten_megabytes_of_prints(engine: LocalEngine, tmp_path: Path) -> None:
    def chatter() -> None:
        for _ in range(10):
            print("x" * 999_999)  # noqa: T201

    hr.fit(make_job(model=faulty(chatter, None)), PAIR, engine=engine, run_dir=tmp_path)
    assert [len(log) for log in logs(tmp_path)] == [10_000_000] * 2


def test_it_goes_elsewhere(engine: LocalEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative run directory means where `fit` was called, for the launcher and for its workers."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)

    def wander() -> nn.Module:
        os.chdir(tmp_path / "elsewhere")
        return nn.Linear(4, 1)

    run = hr.fit(make_job(model=wander), PAIR, engine=engine, run_dir="here")
    assert run.run_dir == tmp_path / "here"
    assert (tmp_path / "here" / "model.safetensors").is_file()
    assert os.listdir(tmp_path / "elsewhere") == []


def test_it_starts_threads(engine: LocalEngine) -> None:
    def start() -> None:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        threading.Thread(target=torch.randn, args=(1000,)).start()

    assert hr.fit(make_job(model=faulty(start, None)), PAIR, engine=engine).status == "ok"


def test_it_runs_processes(engine: LocalEngine, tmp_path: Path) -> None:
    def start() -> None:
        assert subprocess.run(["echo", "hi"], capture_output=True, text=True).stdout == "hi\n"

    assert hr.fit(make_job(model=faulty(start, None)), PAIR, engine=engine).status == "ok"


@pytest.mark.parametrize("number", [None, signal.SIGKILL, signal.SIGSTOP])
def test_its_processes_go_with_a_worker_that_fails(
    engine: LocalEngine, tmp_path: Path, number: signal.Signals | None
) -> None:
    """Those of both workers: of the one that failed, and of the one that had to end because of it."""

    def start() -> None:
        sleeper = subprocess.Popen(["sleep", "60"])
        (tmp_path / f"{victims.rank()}.pid").write_text(str(sleeper.pid))
        if victims.rank() == 1:
            # Else the other one would end before it has begun one.
            assert until(lambda: any(file.stat().st_size for file in tmp_path.glob("0.pid")), 30)
            victims.fail() if number is None else os.kill(os.getpid(), number)

    with pytest.raises((PeerLost, WorkerFailed)):
        hr.fit(make_job(model=faulty(start, None)), PAIR, engine=engine, timeout_s=1)
    sleepers = [int(file.read_text()) for file in tmp_path.glob("*.pid")]
    assert len(sleepers) == 2
    assert until(lambda: all(map(ended, sleepers)), 30)


class Examples(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        assert torch.utils.data.get_worker_info() is not None or victims.rank() < 0
        return INPUTS[index], TARGETS[index]


def test_it_reads_with_a_data_loaders_processes(engine: LocalEngine) -> None:
    loader = DataLoader(Examples(), batch_size=3, num_workers=2)
    run = hr.fit(make_job(data=loader), PAIR, engine=engine)
    plain = hr.fit(make_job(), PAIR, engine=engine)
    torch.testing.assert_close(run.model.state_dict(), plain.model.state_dict(), rtol=0, atol=0)


def test_a_worker_begins_with_everything_imported(engine: LocalEngine, tmp_path: Path) -> None:
    """The first optimizer of a process imports for more than a second; not in every worker."""
    before: set[str] = set()

    class Peeking(torch.optim.SGD):
        def __init__(self, *arguments: object, **options: object) -> None:
            before.update(sys.modules)
            super().__init__(*arguments, lr=0.1)  # type: ignore[arg-type]
            print(len(set(sys.modules) - before))  # noqa: T201

    hr.fit(make_job(optimizer=Peeking), PAIR, engine=engine, run_dir=tmp_path)
    # Each makes it twice: to compare it with the caller's, and to train.
    assert [int(count) for log in logs(tmp_path) for count in log.split()] == [0] * 4


@pytest.mark.full
def test_nothing_grows_over_many_runs(engine: LocalEngine) -> None:
    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    hr.fit(make_job(), PAIR, engine=engine)
    before, threads, shared = files(), threading.active_count(), named_shared_memory()
    for trial in range(30):
        if trial % 3:
            hr.fit(make_job(steps=1, epochs=None), PAIR, engine=engine)
        else:
            with pytest.raises(WorkerFailed):
                hr.fit(make_job(model=faulty(victims.fail)), PAIR, engine=engine)
    # Fewer there may be: what an earlier test has left, or the first run's last thread on its way out.
    assert until(lambda: files() <= before and threading.active_count() <= threads, 10), (
        f"{before} files and {threads} threads before, {files()} and {threading.enumerate()} after"
    )
    # Other tests at the same time may have some there for a moment.
    assert until(lambda: named_shared_memory() <= shared, 10), named_shared_memory() - shared
