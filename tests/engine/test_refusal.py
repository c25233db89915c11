"""A process that cannot take part in a run: rank 0 says why, the others point there, and none waits."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import headrace as hr
from engine.ranks import TESTS, Ended, launcher, run_ranks
from engine.victims import INPUTS, TARGETS, make_job
from headrace.api.checks import inspect_job
from headrace.api.launched import facts_of
from headrace.data.pipeline.source import ArraySource
from headrace.engine.local.fork_server import ForkServer
from headrace.engine.torchrun import refusal
from headrace.engine.torchrun.agreement import compare
from headrace.errors import UsageError, WorkerFailed

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
    ended = start("--strategy", "mirrored", also={2: "--checkpoint-every x"})
    assert ended.codes == {0: 2, 1: 2, 2: 2}, ended.logs
    why = "--checkpoint-every takes steps (100) or seconds (30s), got 'x'\n"
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


def test_another_job_is_refused(start: Start) -> None:
    ended = start("--strategy", "mirrored", also={2: "--set batch=16"})
    assert ended.codes == {0: 2, 1: 2, 2: 2}, ended.logs
    host = socket.gethostname()
    differs = f"global_batch_size differs: rank 2 on {host} has 16, rank 0 on {host} has 8; every host needs the same"
    assert ended.logs == [f"error: {differs}\n", POINTER, POINTER]


def test_what_differs_is_named_with_its_hosts() -> None:
    same: list[tuple[str, str, dict[str, str]]] = [(host, host, {"torch": "2.13"}) for host in "abcdef"]
    compare(same)
    with pytest.raises(
        UsageError, match=r"^torch differs: rank 1 on b has 2\.12, rank 0 on a has 2\.13; every host needs"
    ):
        compare([same[0], ("b", "b", {"torch": "2.12"})])
    with pytest.raises(UsageError, match=r"rank 3 on d has none \(and 2 more\), rank 0 on a has 2.13"):
        compare([same[0], *((host, host, {}) for host in "bcdef")])
    with pytest.raises(UsageError, match=r"^rank 0 and rank 1 are on two machines.* both called a; .* HEADRACE_HOST"):
        compare([same[0], ("a", "another", {"torch": "2.13"})])


def test_a_few_examples_tell_data_apart() -> None:
    images, labels = torch.randn(1000, 3), torch.arange(1000)
    digests = [
        facts_of(inspect_job(make_job(data=(inputs, targets))), hr.Mirrored(), True)["the data"]
        for inputs, targets in ((INPUTS, TARGETS), (INPUTS.clone(), TARGETS), (INPUTS + 1, TARGETS))
    ]
    assert digests[0] == digests[1] != digests[2]
    assert digests[0].startswith("64 examples, some with digest ")
    one = ArraySource((images, labels)).sample_digest()
    assert ArraySource((images.double(), labels)).sample_digest() != one
    assert ArraySource((images[:-1], labels[:-1])).sample_digest() != one


def test_an_exception_that_ends_a_script_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: shown.append(error))
    monkeypatch.setattr(refusal, "tell", lambda error: WorkerFailed(0, "a", f"as {error}"))
    refusal.tell_uncaught()
    refusal.tell_uncaught()
    for error in (ValueError("x"), KeyboardInterrupt()):
        sys.excepthook(type(error), error, None)
    assert list(map(str, shown)) == ["rank 0 on a failed: as x", ""]
