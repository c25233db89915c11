"""A fork server that is forked off a command: nothing of the command's is left in it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from headrace.engine.local.fork_server import describe_end

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
