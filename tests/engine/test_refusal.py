"""A process that cannot take part in a run: rank 0 says why, the others point there, and none waits."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.ranks import TESTS, Ended, launcher, run_ranks
from headrace.engine.local.fork_server import ForkServer
from headrace.engine.torchrun import refusal
from headrace.errors import WorkerFailed

pytestmark = pytest.mark.slow

JOB = """
from engine.victims import make_job


def job(batch=8):
    return make_job(global_batch_size=batch)
"""
POINTER = f"error: rank 0 on {socket.gethostname()} failed: what it prints says why\n"

Start = Callable[..., Ended]


@pytest.fixture
def start(fork_server: ForkServer, tmp_path: Path) -> Start:
    """Returns `start(*arguments, also={}, awaited=3)`: `headrace train` in three ranks, some with more arguments."""
    (tmp_path / "job.py").write_text(JOB)

    def start(*arguments: str, also: dict[int, str], awaited: int = 3) -> Ended:
        environments = [{**one, "ALSO": also.get(rank, "")} for rank, one in enumerate(launcher(3, "127.0.0.1"))]
        script = TESTS / "engine" / "refused_script.py"
        return run_ranks(fork_server, tmp_path, script, ["train", "job.py", *arguments], environments, awaited)

    return start


def test_one_that_fails_alone_says_why_and_so_does_rank_0(start: Start) -> None:
    ended = start("--strategy", "mirrored", also={2: "--workers 7"})
    assert ended.codes == {0: 2, 1: 2, 2: 2}, ended.logs
    why = "mirrored asks for 7 workers and the launcher started 3 processes; leave workers out, or start 7\n"
    assert ended.logs == [f"error: rank 2 on {socket.gethostname()} failed: {why}", POINTER, f"error: {why}"]


@pytest.mark.parametrize("strategy", ["miror", "one_device", "mirrored(workers=4)"])
def test_what_all_refuse_is_said_by_rank_0(start: Start, strategy: str) -> None:
    ended = start("--strategy", strategy, also={})
    assert ended.codes == {0: 2, 1: 2, 2: 2}, ended.logs
    assert ended.logs[0].startswith("error: ")
    assert ended.logs[1:] == [POINTER] * 2


def test_rank_0_that_fails_alone_tells_the_others(start: Start) -> None:
    ended = start("--strategy", "mirrored", also={0: "--set nothing"})
    assert ended.codes == {0: 2, 1: 2, 2: 2}, ended.logs
    assert ended.logs == ["error: --set takes key=value, got 'nothing'\n", POINTER, POINTER]


def test_an_exception_that_ends_a_script_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: shown.append(error))
    monkeypatch.setattr(refusal, "tell", lambda error: WorkerFailed(0, "a", f"as {error}"))
    refusal.tell_uncaught()
    refusal.tell_uncaught()
    for error in (ValueError("x"), KeyboardInterrupt()):
        sys.excepthook(type(error), error, None)
    assert list(map(str, shown)) == ["rank 0 on a failed: as x", ""]
