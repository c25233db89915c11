"""`headrace launch`: a plain script in several processes."""

from __future__ import annotations

import io
import socket
from pathlib import Path

import pytest

from headrace.engine.local.engine import launch_script
from headrace.engine.local.fork_server import ForkServer

pytestmark = pytest.mark.slow

SCRIPT = """
import atexit, os, signal, sys, threading, time
rank, world = os.environ["RANK"], os.environ["WORLD_SIZE"]
assert (os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]) == (rank, world)
assert os.path.basename(sys.argv[0]) == "script.py" and __name__ == "__main__"
import beside
atexit.register(print, "the end of", rank)
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread of", rank))).start()
print("rank", rank, "of", world, sys.argv[1:])
if rank == sys.argv[1]:
    deed = sys.argv[2]
    if deed == "raise": raise KeyError("lost")
    if deed == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if deed == "leave": sys.exit(int(sys.argv[3]))
    if deed == "input": input()
    if deed == "stdin": print(hasattr(sys.stdin, "buffer")); sys.stdin.buffer.read()
    if deed == "words": sys.exit("I had enough")
"""


class Lent:
    """A fork server that outlives its borrower."""

    def __init__(self, fork_server: ForkServer) -> None:
        self.spawn, self.ended, self.kill = fork_server.spawn, fork_server.ended, fork_server.kill

    def close(self) -> None:
        """Everybody has ended."""


@pytest.fixture(autouse=True)
def _one_fork_server(fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.local.engine.ForkServer", lambda: Lent(fork_server))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_rank_0_speaks_and_all_come_to_their_end(script: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert launch_script(script, ["-", "now"], 3) == 0
    out, err = capfd.readouterr()
    assert out == "rank 0 of 3 ['-', 'now']\na thread of 0\nthe end of 0\n"
    assert err == ""


def test_what_it_prints_stays_in_its_two_streams(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "both.py"
    path.write_text("import sys\nprint('a result')\nprint('a remark', file=sys.stderr)")
    results = io.StringIO()
    assert launch_script(path, [], 2, results) == 0
    assert results.getvalue() == "a result\n"
    assert capfd.readouterr() == ("", "a remark\n")


@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize(
    ("deed", "code", "last"),
    [
        (["raise"], 1, "KeyError: 'lost'"),
        (["kill"], 4, f"on {socket.gethostname()} was lost: killed by signal 9 (SIGKILL)"),
        (["leave", "7"], 7, ""),
        (["input"], 2, "reads standard input (input(), sys.stdin), which the processes of a run do not have"),
        (["stdin"], 2, "in a file, or by an environment variable"),
        (["words"], 1, "I had enough"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_who_fails_explains(
    script: Path, capfd: pytest.CaptureFixture[str], rank: str, deed: list[str], code: int, last: str
) -> None:
    assert launch_script(script, [rank, *deed], 2) == code
    out, err = capfd.readouterr()
    shown = out + err
    assert f"rank {rank} of 2" in shown
    assert last in shown
    assert "engine/process.py" not in shown, "the user's frames alone"
