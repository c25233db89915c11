"""Processes that read: what they send, how they fail, and how they end."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from belongings import descriptors
from headrace.data import Loader, from_arrays
from headrace.data.loading import autotune, processes
from headrace.data.loading import batch_reader as running
from headrace.data.loading.processes import ReaderProcesses
from headrace.data.loading.reader import CpuBudget, ReadResult
from headrace.errors import DataError, RunFailed, UnfitMachine, UsageError
from headrace.machine.limits import explained

DEADLINE_S = 60.0
NONE = torch.zeros(0, dtype=torch.int64)


def sent(batch: Any) -> Any:
    """Returns a batch as it comes from another process."""
    readers = ReaderProcesses(
        lambda epoch, places: ReadResult(batch, 3, ("example 1: gone",), (0.25, 0.5)), 1, DEADLINE_S
    )
    try:
        read = readers.read(0, NONE)
    finally:
        readers.close()
    assert (read.examples, read.skipped, read.seconds) == (3, ("example 1: gone",), (0.25, 0.5))
    return read.batch


def test_batches_arrive_as_they_are() -> None:
    batch = {
        "image": torch.rand(3, 2, 2),
        "half": torch.rand(3).to(torch.bfloat16),
        "mask": torch.tensor([True, False, True]),
        "turned": torch.arange(6).view(2, 3).t(),
        "nothing": torch.zeros(0, 4),
        7: ["a", 1, None, 2.5, (torch.tensor(3), [])],
        "raw": (b"ab", np.array([1.5, 2.5])),
    }
    found = sent(batch)
    assert list(found) == list(batch)
    for name in ("image", "half", "mask", "turned", "nothing"):
        assert torch.equal(found[name], batch[name])  # type: ignore[arg-type]
        assert found[name].dtype == batch[name].dtype  # type: ignore[union-attr]
    assert found[7][:4] == ["a", 1, None, 2.5]
    assert isinstance(found[7][4], tuple)
    assert found[7][4][0] == 3
    assert found["raw"][0] == b"ab"  # type: ignore[index]
    assert found["raw"][1].tolist() == [1.5, 2.5]  # type: ignore[index]
    # It is this process's own memory now.
    found["image"].zero_()
    assert found["image"].sum() == 0
    assert sent((1, "two")) == (1, "two")


def test_what_cannot_be_shared_is_refused() -> None:
    pair = namedtuple("pair", "a b")
    for batch in (pair(1, 2), {(1, 2): 3}, torch.rand(2, 2).to_sparse()):
        with pytest.raises(UsageError, match=r"which cannot come from a reading process.*parallel='threads'"):
            sent(batch)


def test_each_reads_what_it_is_asked_for() -> None:
    readers = ReaderProcesses(
        lambda epoch, places: ReadResult((places * 2, epoch, os.getpid()), len(places), (), ()), 2, DEADLINE_S
    )
    try:
        found = [readers.read(epoch, torch.arange(epoch)) for epoch in range(6)]
    finally:
        readers.close()
    assert [read.batch[0].tolist() for read in found] == [list(range(0, 2 * epoch, 2)) for epoch in range(6)]
    assert [read.batch[1] for read in found] == list(range(6))
    assert len({read.batch[2] for read in found}) == 2


def busy(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def stands_still_elsewhere() -> Callable[[Any], Any]:
    """Returns a transform that waits in a fork for what only the process it comes from would do."""
    worker = os.getpid()

    def wait(example: tuple[Tensor]) -> Tensor:
        busy(0.002)
        if os.getpid() != worker:
            threading.Event().wait()
        return example[0]

    return wait


@pytest.mark.slow
def test_a_process_that_stands_still_is_told_apart_from_one_that_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    computing = ReaderProcesses(lambda epoch, places: (busy(1.5), ReadResult(places, 1, (), ()))[1], 1, 0.5)
    try:
        assert computing.read(0, torch.arange(1)).examples == 1
    finally:
        computing.close()
    monkeypatch.setattr(running, "_PATIENCE_S", 0.2)
    pipeline = from_arrays(torch.arange(100)).map(stands_still_elsewhere(), parallel="processes")
    with pytest.raises(RunFailed, match=r"neither answered nor computed for 0\.2 s; it may wait for threads"):
        list(Loader(pipeline, 0, 10, (1,), 0).rounds(0, 10))


@pytest.mark.slow
def test_where_processes_that_were_not_asked_for_stand_still_threads_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_UNASKED_PATIENCE_S", 0.2)
    # Processes are tried whatever a second thread gains, which on a busy machine is a matter of chance.
    monkeypatch.setattr(autotune, "_NEARLY_TWICE", float("inf"))
    said: list[str] = []
    pipeline = from_arrays(torch.arange(400)).map(stands_still_elsewhere())
    found: list[int] = []
    loader = Loader(pipeline, 0, 4, (1,), 0, cpu_budget=CpuBudget(cores=2, training=1, say=said.append))
    for share in loader.rounds():
        found += share.batch.tolist()
        if any("stood still" in line for line in said):
            break
    assert found == [place % 400 for place in range(len(found))]
    # One or two, by what was tried before.
    assert re.fullmatch(
        r"data: (1 thread reads|2 threads read) ahead \(at most 2\): processes stood still, as forks of threads may",
        said[-1],
    )
    # Nor are they tried again.
    forks: list[object] = []
    monkeypatch.setattr(running, "ReaderProcesses", lambda *made: forks.append(made))
    assert sum(share.examples for share in loader.rounds(0, 100)) == 400
    assert not forks


def refuses_forks(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """Lets the system fork so many processes and no more."""
    left, fork = iter(range(after)), os.fork

    def refused() -> int:
        if next(left, None) is None:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return fork()

    monkeypatch.setattr(os, "fork", refused)


def children() -> list[str]:
    return Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()


def test_where_the_system_starts_no_process_those_before_end(monkeypatch: pytest.MonkeyPatch) -> None:
    before, held = children(), descriptors()
    refuses_forks(monkeypatch, after=1)
    with pytest.raises(BlockingIOError):
        ReaderProcesses(lambda epoch, places: ReadResult(places, 1, (), ()), 3, 5.0)
    assert (children(), descriptors()) == (before, held)
    pipeline = from_arrays(torch.arange(100)).map(halved, parallel="processes")
    with pytest.raises(UnfitMachine, match="the system starts no further thread"):
        next(Loader(pipeline, 0, 10, (1,), 0).rounds(0, 10))


def test_where_the_system_starts_none_that_were_not_asked_for_threads_read(monkeypatch: pytest.MonkeyPatch) -> None:
    refuses_forks(monkeypatch, after=1)
    monkeypatch.setattr(autotune, "_NEARLY_TWICE", float("inf"))
    said: list[str] = []
    pipeline = from_arrays(torch.arange(400)).map(stands_still_elsewhere())
    loader = Loader(pipeline, 0, 4, (1,), 0, cpu_budget=CpuBudget(cores=2, training=1, say=said.append))
    found: list[int] = []
    for share in loader.rounds():
        found += share.batch.tolist()
        if any("starts no further process" in line for line in said):
            break
    assert found == [place % 400 for place in range(len(found))]
    assert said[-1].endswith("the system starts no further process (Resource temporarily unavailable)")


def descriptors_used() -> list[int]:
    """Returns the numbers of this process's descriptors, without that of the folder that lists them."""
    found = [int(name) for name in os.listdir("/proc/self/fd")]
    return [number for number in found if Path(f"/proc/self/fd/{number}").exists()]


def test_a_batch_whose_memory_cannot_be_opened_is_an_error() -> None:
    readers = ReaderProcesses(lambda epoch, places: ReadResult(torch.full((4,), 7.0), 4, (), ()), 1, 5.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = descriptors_used()
    limit = max(used) + 8
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(limit - len(used))]
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        with pytest.raises(OSError, match='Too many open files: "a batch\'s memory"') as caught:
            readers.read(0, torch.arange(4))
        assert isinstance(explained(caught.value), UnfitMachine)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)
        readers.close()


def halved(example: tuple[Tensor]) -> Tensor:
    if example[0] == 5:
        raise ZeroDivisionError("nothing to divide by")
    return example[0] / 2


def test_an_error_comes_back_with_its_example_and_the_users_traceback() -> None:
    loader = Loader(from_arrays(torch.arange(8)).map(halved, parallel="processes"), 0, 2, (1,), 0, ordered=True)
    shares = loader.sweep()
    assert [share.batch.tolist() for share in islice(shares, 2)] == [[0.0, 0.5], [1.0, 1.5]]
    with pytest.raises(DataError, match=r"^example 5 .*map\(halved\).*ZeroDivisionError: nothing to") as caught:
        next(shares)
    shown = str(caught.value.__cause__)
    assert "in halved" in shown
    assert 'raise ZeroDivisionError("nothing to divide by")' in shown


def test_a_reader_that_is_lost_is_an_error() -> None:
    def gone(example: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    loader = Loader(from_arrays(torch.arange(8)).map(gone, parallel="processes"), 0, 2, (1,), 0)
    with pytest.raises(RunFailed, match=r"a process that reads the data \(pid \d+\) was lost"):
        next(loader.rounds())


def test_none_is_left_when_a_loop_ends_early() -> None:
    pipeline = from_arrays(torch.arange(100)).map(lambda e: (e[0], os.getpid()), parallel="processes")
    before = descriptors()
    shares = Loader(pipeline, 0, 2, (1,), 0).rounds()
    pids = {int(share.batch[1][0]) for share in islice(shares, 5)}
    shares.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert descriptors() <= before


def test_half_an_answer_leaves_no_descriptor() -> None:
    before = descriptors()
    ours, theirs = socket.socketpair()
    with ours, theirs, tempfile.TemporaryFile() as file:
        socket.send_fds(theirs, [struct.pack("<qq", 10, 10) + b"{"], [file.fileno()])
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(EOFError):
            processes._answer(ours)
    assert descriptors() <= before


def test_batches_outlive_their_readers() -> None:
    pipeline = from_arrays(torch.arange(10)).map(lambda e: e[0] * 2, parallel="processes")
    batches = [share.batch for share in Loader(pipeline, 0, 4, (1,), 0, ordered=True).sweep()]
    assert [batch.tolist() for batch in batches] == [[0, 2, 4, 6], [8, 10, 12, 14], [16, 18]]


@pytest.mark.slow
def test_they_may_be_forked_after_training_on_many_threads() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        layer = torch.nn.Linear(256, 256)
        layer(torch.rand(512, 256)).sum().backward()
        # On more than one thread if it may.
        pipeline = from_arrays(torch.rand(64, 256, 256)).map(lambda e: (e[0] @ e[0]).exp().sum(0), parallel="processes")
        shares = list(Loader(pipeline, 0, 8, (1,), 0).sweep())
    finally:
        torch.set_num_threads(threads)
    assert [share.batch.shape for share in shares] == [(8, 256)] * 8


WORKER = """
import os, sys, time, torch, headrace as hr
def slow(example):
    open(f"{sys.argv[1]}/{os.getpid()}", "w").close()
    time.sleep(600)
pipeline = hr.data.from_arrays(torch.arange(100)).map(slow, parallel="processes")
next(hr.data.Loader(pipeline, 0, 2, (1,), 0).rounds())
"""


@pytest.mark.slow
def test_they_end_with_a_worker_that_is_killed(tmp_path: Path) -> None:
    worker = subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path)])
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not (pids := [int(path.name) for path in tmp_path.iterdir()]):
            assert worker.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        worker.kill()
        worker.wait()
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_they_end_where_a_script_ignores_the_ends_of_children() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        readers = ReaderProcesses(lambda epoch, places: ReadResult(NONE, 0, (), ()), 2, DEADLINE_S)
        readers.read(0, NONE)
        readers.close()
    finally:
        signal.signal(signal.SIGCHLD, before)


AT_ONCE = """
import os, sys, threading, time
import torch
from headrace.data.loading.processes import ReaderProcesses
from headrace.data.loading.reader import ReadResult

forking = set()

def enter():
    forking.add(threading.get_ident())
    time.sleep(0.05)

def refuse_two(event, arguments):
    if event == "os.fork" and forking:
        raise RuntimeError("two forks at once")

os.register_at_fork(before=enter, after_in_parent=forking.clear, after_in_child=forking.clear)
sys.addaudithook(refuse_two)

def start():
    readers = ReaderProcesses(lambda epoch, places: ReadResult(torch.ones(1), 1, (), ()), 2, 60.0)
    try:
        print(readers.read(0, torch.zeros(0, dtype=torch.int64)).examples, flush=True)
    finally:
        readers.close()

threads = [threading.Thread(target=start) for _ in range(3)]
[each.start() for each in threads]
[each.join() for each in threads]
"""


def test_threads_fork_readers_one_after_the_other() -> None:
    """As filelock 3.30 to 4.2 does, the script refuses a fork while another thread forks."""
    done = subprocess.run([sys.executable, "-c", AT_ONCE], capture_output=True, text=True, check=False, timeout=120)
    assert (done.stdout.split(), done.stderr) == (["1"] * 3, "")
