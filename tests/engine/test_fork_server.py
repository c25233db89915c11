"""A fork server that is forked off a command: nothing of the command's is left in it."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import headrace as hr
from engine.victims import make_job
from headrace.engine.local import fork_server_main
from headrace.engine.local.engine import _LIBRARIES, LocalEngine
from headrace.engine.local.fork_server import ForkServer, describe_end, environment_of_workers
from headrace.engine.local.process import redirect
from headrace.errors import UnfitMachine

_SCRIPT = """
import json, os, socket, sys, threading
from headrace.engine.local.fork_server import fork_fork_server

secret = open("/dev/zero")
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
stop = threading.Event()
if "threads" in sys.argv:
    threading.Thread(target=stop.wait).start()
child = fork_fork_server(theirs)
theirs.close()
ready = ours.recv(1000)
place = f"/proc/{child.pid}"
targets = {int(name): os.readlink(f"{place}/fd/{name}") for name in os.listdir(f"{place}/fd")}
print(json.dumps({
    "ready": json.loads(ready),
    "alive": child.poll() is None,
    "command": open(f"{place}/cmdline").read().split(chr(0))[:4],
    "session": os.getsid(child.pid) == child.pid,
    "targets": targets,
    "large": any(" hg" in line for line in open(f"{place}/smaps") if line.startswith("VmFlags")),
}))
ours.close()
print(child.wait(20), child.poll())
stop.set()
"""

_REFUSED = """
import os, sys
import headrace.engine.local.fork_server_main as main

fork, forks = os.fork, iter(range(100))

def refused():
    if next(forks) in (1, 2):
        raise BlockingIOError(11, os.strerror(11))
    return fork()

os.fork = refused
main.main(int(sys.argv[1]))
os._exit(0)
"""
"""A fork server to which the system grants the first process, and neither of the next two."""

_MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@cache
def born(*arguments: str) -> tuple[dict[str, object], str]:
    command = [sys.executable, "-c", _SCRIPT, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, stdin=subprocess.PIPE)
    told, last = ended.stdout.splitlines()
    return json.loads(told), last


@pytest.mark.usefixtures("real_python")
@pytest.mark.slow
def test_a_fork_holds_nothing_but_its_channel_and_ends_with_it() -> None:
    told, last = born()
    assert told["ready"] == {"ready": True}
    assert told["alive"] is True
    assert told["session"] is True
    assert "-c" in told["command"]  # type: ignore[operator]
    assert isinstance(told["targets"], dict)
    targets = dict(told["targets"])
    assert targets.pop("0") == "/dev/null"
    assert {targets.pop("1").split(":")[0], targets.pop("2").split(":")[0]} == {"pipe"}
    kinds = sorted(target.split(":")[0] for target in targets.values())
    # Its channel, and what tells it of a worker's end.
    assert kinds == ["pipe", "pipe", "socket"]
    assert last == "0 0"


@pytest.mark.usefixtures("real_python")
@pytest.mark.slow
def test_a_process_with_threads_is_not_forked() -> None:
    told, last = born("threads")
    assert told["ready"] == {"ready": True}
    command = told["command"]
    assert isinstance(command, list)
    assert command[1:] == ["-P", "-m", "headrace.engine.local.fork_server_main"]
    assert Path(command[0]).name.startswith("python")
    assert last == "0 0"


@pytest.mark.usefixtures("real_python")
@pytest.mark.slow
@pytest.mark.skipif(
    not _MODE.exists() or "[madvise]" not in _MODE.read_text(), reason="large pages are not for those who ask here"
)
@pytest.mark.parametrize("arguments", [(), ("threads",)], ids=["fork", "program"])
def test_asks_for_large_pages(arguments: tuple[str, ...]) -> None:
    assert born(*arguments)[0]["large"] is True


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (3, "ended with code 3"),
        (-9, "killed by signal 9 (SIGKILL)"),
        (-40, f"killed by signal 40 ({signal.strsignal(40)})"),
    ],
)
def test_every_end_has_words(code: int, said: str) -> None:
    assert describe_end(code) == said


def refused(channel: socket.socket) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _REFUSED, str(channel.fileno())]
    return subprocess.Popen(command, pass_fds=[channel.fileno()], env=environment_of_workers(), start_new_session=True)


@pytest.mark.usefixtures("real_python")
@pytest.mark.slow
def test_a_run_whose_processes_were_refused_leaves_nothing_to_the_next() -> None:
    with LocalEngine() as engine:
        engine._fork_server.close()
        engine._fork_server = ForkServer(refused)
        with pytest.raises(UnfitMachine, match="the system starts no further thread"):
            hr.fit(make_job(), hr.Mirrored(3), engine=engine)
        for _ in range(2):
            assert hr.fit(make_job(), hr.Mirrored(1), engine=engine).status == "ok"


def open_in_a_child(worker: hr.Worker) -> None:
    """Starts a program as user code may, without closing descriptors, and writes down which it has."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False) as child:
        # Once it answers, it has closed the libraries that it was loaded from.
        assert child.stdin
        assert child.stdout
        child.stdin.write(b"begun\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"begun\n"
        folder = f"/proc/{child.pid}/fd"
        Path("found").write_text(json.dumps({name: os.readlink(f"{folder}/{name}") for name in os.listdir(folder)}))
        child.kill()


def test_what_user_code_starts_inherits_no_descriptor_of_a_worker(
    engine: LocalEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    hr.launch(open_in_a_child, make_job(), hr.OneDevice(), engine=engine)
    assert json.loads(Path("found").read_text()).keys() == {"0", "1", "2"}


def note_variables(worker: hr.Worker) -> None:
    Path("found").write_text(json.dumps([os.environ.get(name) for name in ("SET_LATER", "REMOVED_LATER")]))


def test_environment_variables_that_are_set_after_the_engine_are_those_of_its_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("REMOVED_LATER", "1")
    with LocalEngine() as engine:
        monkeypatch.setenv("SET_LATER", "2")
        monkeypatch.delenv("REMOVED_LATER")
        hr.launch(note_variables, make_job(), hr.OneDevice(), engine=engine)
    assert json.loads(Path("found").read_text()) == ["2", None]


def note_libraries(worker: hr.Worker) -> None:
    Path("found").write_text(json.dumps("tokenizers" in sys.modules))


def test_a_library_that_the_caller_has_imported_is_imported_once_for_all_workers(
    engine: LocalEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    importlib.import_module("tokenizers")
    monkeypatch.chdir(tmp_path)
    hr.launch(note_libraries, make_job(), hr.OneDevice(), engine=engine)
    assert json.loads(Path("found").read_text()) is True
    counted = "import os, sys, {0}; print(len(os.listdir('/proc/self/task')))"
    for library in _LIBRARIES:
        if importlib.util.find_spec(library):
            command = [sys.executable, "-c", counted.format(library)]
            ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment_of_workers())
            assert ended.stdout.split()[-1] == "1", f"{library} starts threads, and cannot be forked"


def test_what_a_failed_worker_has_started_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    read_end, write_end = os.pipe()
    failed = subprocess.Popen(["sh", "-c", "sleep 60 & exit 3"], start_new_session=True, pass_fds=[write_end])
    os.close(write_end)
    wait = os.waitpid
    # Other tests' processes are none of its workers.
    monkeypatch.setattr(os, "waitpid", lambda _, options: wait(failed.pid, options))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    workers = {failed.pid: 7}
    with ours, theirs:
        while workers:
            fork_server_main._report(theirs, workers)
        assert json.loads(ours.recv(1000)) == {"ended": 7, "status": 3}
    failed.returncode = 3
    # Its end of the pipe has closed.
    assert select.select([read_end], [], [], 5)[0]
    os.close(read_end)


def test_a_log_goes_on_where_another_process_has_ended(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    log.write_text("the first process\n")
    child = os.fork()
    if child == 0:
        redirect(log)
        os.write(1, b"the next one\n")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert log.read_text() == "the first process\nthe next one\n"


def test_what_the_user_has_set_counts_for_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    given = environment_of_workers()
    assert (given["TOKENIZERS_PARALLELISM"], given["TRANSFORMERS_VERBOSITY"]) == ("true", "error")


def test_modules_are_imported_from_the_path_of_now(
    fork_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_a_later_path.py").write_text(
        "import pathlib\npathlib.Path(__file__).with_suffix('.done').touch()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    # More names than one message takes.
    others = [f"there_is_no_module_of_this_name_{number}" for number in range(2000)]
    fork_server.import_modules([*others, "of_a_later_path"])
    assert (tmp_path / "of_a_later_path.done").exists()
