"""`fit` without an engine keeps its fork server for the next call, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

import headrace as hr
from belongings import belongings, left_since, private_bytes
from engine.conftest import below, ended, fork_servers, until
from engine.victims import make_job
from headrace.engine.local.engine import close_kept_engine, kept_engine
from headrace.spec.events import Event, Stepped

FITS = 20
GROWTH_BYTES = 24 << 20

_OUTLIVED = """
import os, sys, time
from headrace.engine.local.engine import kept_engine

with kept_engine() as engine:
    server = engine._fork_server._process.pid
child = os.fork()
if child == 0:
    with kept_engine() as own:
        os.write(1, f"{server} {os.getpid()} {own._fork_server._process.pid}\\n".encode())
    os.close(1)
    time.sleep(60)
    os._exit(0)
time.sleep(0.2)
if "killed" in sys.argv:
    os.kill(os.getpid(), 9)
"""


_FORKED = """
import functools, os, torch
import headrace as hr

torch.set_num_threads(2)
job = hr.Job(
    model=functools.partial(torch.nn.Linear, 16, 4), task=hr.tasks.multiclass(4), optimizer=torch.optim.Adam,
    data=(torch.randn(256, 16), torch.zeros(256, dtype=torch.long)), global_batch_size=32, epochs=1,
)
hr.fit(job, hr.Mirrored(2))
child = os.fork()
if child == 0:
    os.write(1, hr.fit(job, hr.Mirrored(2)).status.encode())
    os._exit(0)
os.waitpid(child, 0)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("real_python")
def test_a_child_of_the_users_fits() -> None:
    """It has none of the threads with which its parent has computed."""
    done = subprocess.run([sys.executable, "-c", _FORKED], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "ok"


@pytest.fixture(autouse=True)
def _none_kept() -> Iterator[None]:
    close_kept_engine()
    yield
    close_kept_engine()


def is_alive(pid: int) -> bool:
    return not ended(pid)


@pytest.mark.slow
def test_many_fits_use_one_fork_server_and_leave_nothing() -> None:
    job = make_job()
    hr.fit(job)
    before = belongings()
    others = set(fork_servers())
    sizes, servers = [], set()
    for fit in range(FITS):
        assert hr.fit(job, hr.Mirrored(workers=2) if fit % 4 == 0 else "one_device").status == "ok"
        (server,) = set(fork_servers()) - others
        assert below(server) == []
        servers.add(server)
        sizes.append(private_bytes() + private_bytes(server))
    assert len(servers) == 1
    assert sizes[-1] - sizes[FITS // 2] < GROWTH_BYTES
    assert left_since(before, within_s=5) == {}


@pytest.mark.slow
def test_a_kept_fork_server_that_was_killed_is_replaced() -> None:
    with kept_engine() as first:
        pid = first._fork_server._process.pid
    os.kill(pid, signal.SIGKILL)
    assert until(lambda: not first._fork_server.is_alive(), 10)
    with kept_engine() as second:
        assert second is not first
    assert not is_alive(pid)


@pytest.mark.slow
def test_another_environment_needs_another_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    with kept_engine() as first:
        pass
    with kept_engine() as again:
        assert again is first
    monkeypatch.setenv("HEADRACE_TEST_SETTING", "1")
    with kept_engine() as second:
        assert second is not first
    assert not first._fork_server.is_alive()


@pytest.mark.slow
def test_two_fits_at_once_have_an_engine_each_and_one_is_kept() -> None:
    others = set(fork_servers())
    together = threading.Barrier(2, timeout=60)
    used = []

    def use() -> None:
        with kept_engine() as engine:
            used.append(engine)
            together.wait()

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert used[0] is not used[1]
    assert len(set(fork_servers()) - others) == 1


@pytest.mark.slow
def test_what_a_function_raises_that_is_told_of_events_leaves_no_worker_and_keeps_the_engine() -> None:
    class Enough(Exception):
        pass

    def tell(event: Event) -> None:
        if isinstance(event, Stepped):
            raise Enough

    others = set(fork_servers())
    for _ in range(2):
        with pytest.raises(Enough):
            hr.fit(make_job(), hr.Mirrored(workers=2), on_event=tell)
    (server,) = set(fork_servers()) - others
    assert below(server) == []
    assert hr.fit(make_job(), hr.Mirrored(workers=2)).status == "ok"
    assert set(fork_servers()) - others == {server}


def test_what_is_no_error_of_a_run_ends_the_engine() -> None:
    with pytest.raises(KeyboardInterrupt), kept_engine() as engine:
        raise KeyboardInterrupt
    assert not engine._fork_server.is_alive()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ends", "killed"])
def test_a_child_of_the_users_has_its_own_and_does_not_keep_the_parents_alive(how: str) -> None:
    started = subprocess.Popen([sys.executable, "-c", _OUTLIVED, how], stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    server, child, own = map(int, started.stdout.readline().split())
    try:
        assert started.wait(30) == (0 if how == "ends" else -signal.SIGKILL)
        assert own != server
        assert until(lambda: not is_alive(server), 20)
        assert is_alive(child)
    finally:
        os.kill(child, signal.SIGKILL)
        started.stdout.close()
    assert until(lambda: not is_alive(own), 20)
