"""The command: it listens for this machine alone, ends after it has answered, and says what is wrong."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import run
from serving.folders import scaled
from web.servers import command_server

Capture = pytest.CaptureFixture[str]


@contextmanager
def server(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """Yields a server of its own process, its port, and that of its probes or 0."""
    with command_server("serve", "--port", "0", *arguments) as (process, told):
        port, health = (int(told.get(each, ":0").rpartition(":")[2]) for each in ("url", "health_url"))
        yield process, port, health


def infer(port: int) -> Any:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}
    return json.loads(ask(port, "/v2/models/m/infer", json.dumps({"inputs": [tensor]})))["outputs"][0]["data"]


def metrics(port: int) -> str:
    return ask(port, "/metrics").decode()


def ask(port: int, path: str, content: str | None = None) -> bytes:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request("POST" if content else "GET", path, content)
        reply = connection.getresponse()
        assert reply.status == 200
        return reply.read()


@pytest.mark.slow
def test_it_answers_and_imports_no_torch(tmp_path: Path, real_python: None) -> None:
    with server(str(scaled(tmp_path / "a", 2.0)), "--health-port", "0") as (process, port, health):
        assert infer(port) == [2.0, 4.0, 6.0]
        assert json.loads(ask(health, "/v2/health/ready")) == {"ready": True}
        assert json.loads(ask(health, "/v2/health/live")) == {"live": True}
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "onnxruntime" in maps
        assert "libtorch" not in maps


@pytest.mark.slow
def test_what_has_come_before_sigterm_is_answered(tmp_path: Path, real_python: None) -> None:
    """Requests wait for two seconds for others to be computed with: at the signal, none has been answered."""
    folder = scaled(tmp_path / "a", 2.0)
    with server(str(folder), "--max-batch", "100", "--max-wait-ms", "2000") as (process, port, _):
        found: list[Any] = []
        threads = [threading.Thread(target=lambda: found.append(infer(port))) for _ in range(5)]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 30
        while 'queue_requests{model="m",version="1"} 5.0' not in metrics(port):
            assert time.monotonic() < until
        assert not found
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
        assert found == [[2.0, 4.0, 6.0]] * 5
        assert process.wait(30) == 0


def test_other_machines_are_let_in_by_a_token_or_by_name_alone(tmp_path: Path, capsys: Capture) -> None:
    folder = str(scaled(tmp_path / "a", 2.0))
    assert run(["serve", folder, "--host", "0.0.0.0"]) == 2
    assert "give a token by --token-file FILE, or say --public" in capsys.readouterr().err
    token = tmp_path / "token"
    token.write_text("a" * 20)
    token.chmod(0o644)
    assert run(["serve", folder, "--token-file", str(token)]) == 2
    assert f"chmod 600 {token}" in capsys.readouterr().err
    token.chmod(0o600)
    token.write_text("short\n")
    assert run(["serve", folder, "--token-file", str(token)]) == 2
    assert "has 5 characters; it needs 16 at least" in capsys.readouterr().err


def test_what_cannot_be_served_is_said(tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(["serve", str(tmp_path / "gone"), "--port", "0"]) == 2
    assert "does not exist; name exported models" in capsys.readouterr().err
    assert run(["serve", str(tmp_path), "--port", "0"]) == 5
    assert "name a folder that `headrace export` has written" in capsys.readouterr().err
    folder = str(scaled(tmp_path / "a", 2.0))
    assert run(["serve", folder, "--host", "192.0.2.77", "--public"]) == 2
    assert "cannot listen on 192.0.2.77 port 8000" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = str(taken.getsockname()[1])
        assert run(["serve", folder, "--port", "0", "--health-port", number]) == 2
        told = capsys.readouterr().err
        assert f"cannot listen on 127.0.0.1 port {number}" in told
        assert "name another --health-port, 0 for a free one" in told
    assert run(["serve", folder, "--cluster", "ray://auto", "--health-port", "0"]) == 2
    assert "Ray Serve probes and ends its replicas itself" in capsys.readouterr().err


def test_megabytes_of_a_body_are_millions(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("headrace.serving.running.run_server", lambda *what: asked.extend(what))
    assert run(["serve", "m", "--max-body-mb", "2.5"]) == 0
    assert asked[1].max_body_bytes == 2_500_000
