"""The command: what cannot be shown is said; it waits for a run; it goes with the run that it was started beside."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.cli import run
from headrace.cli.watching import watching
from watch.test_page import server

Capture = pytest.CaptureFixture[str]


@pytest.mark.slow
def test_what_cannot_be_shown_is_said(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    for path in ("empty", "gone"):
        assert run(["watch", str(tmp_path / path), "--port", "0"]) == 2
        assert f"{path} holds no run: there is no events/*.jsonl in it" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert run(["watch", str(tmp_path), "--wait", "--port", port]) == 2
        assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err
    assert run(["watch", str(tmp_path), "--wait", "--host", "0.0.0.0"]) == 2
    assert "give a token by --token-file FILE, or say --public" in capsys.readouterr().err


@pytest.mark.slow
def test_it_waits_for_a_run_and_ends_in_order(tmp_path: Path, real_python: None) -> None:
    with server(str(tmp_path / "later"), "--wait", "--port", "0") as (process, url):
        assert url.startswith("http://127.0.0.1:")
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "orjson" in maps
        assert "libtorch" not in maps
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


@pytest.mark.slow
def test_the_page_beside_a_run_ends_with_it(tmp_path: Path, capfd: Capture, real_python: None) -> None:
    with watching(tmp_path / "later", wanted=False):
        pass
    assert capfd.readouterr().err == ""
    with watching(tmp_path / "later", wanted=True):
        err = ""
        while "watch the run at http://127.0.0.1:" not in err:
            err += capfd.readouterr().err
        port = int(err.partition("127.0.0.1:")[2].split()[0])
        socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


@pytest.mark.slow
def test_the_page_ends_where_the_command_was_killed(tmp_path: Path, real_python: None) -> None:
    read, write = os.pipe()
    program = "from headrace.cli.watching import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdin=read, stderr=subprocess.PIPE
    ) as process:
        os.close(read)
        assert process.stderr is not None
        assert b"watch the run at" in process.stderr.readline()
        # As the kernel does for a process that was killed.
        os.close(write)
        assert process.wait(20) == 0
