"""What listens where, as `headrace doctor` finds it: real sockets of real processes."""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

import headrace as hr
from engine.victims import faulty, make_job
from headrace.cli import run
from headrace.cli.commands.doctor import Verdict, examine
from headrace.cli.listening import Listener, listeners
from headrace.engine.local.engine import LocalEngine
from headrace.transport.base import Slots
from headrace.transport.local_server import LocalServerTransport
from headrace.transport.remote_server import RemoteServerTransport

SLOTS = Slots([8])
SECRET = b"what a test may know of secrets."


def own(before: Collection[Listener] = ()) -> list[Listener]:
    return [each for each in listeners() if each.pid == os.getpid() and each not in before]


@pytest.fixture
def before() -> list[Listener]:
    """What other tests of this process have left."""
    return own()


@pytest.fixture
def local() -> Iterator[LocalServerTransport]:
    port = LocalServerTransport(SLOTS, SLOTS)
    yield port
    port.close()


def test_a_server_of_this_machine_is_found(before: list[Listener], local: LocalServerTransport) -> None:
    assert own(before) == [Listener(os.getpid(), local.address, True, False)]


@pytest.mark.parametrize(
    ("address", "shown", "loopback"),
    [
        ("tcp://127.0.0.1:0", r"tcp://127\.0\.0\.1:\d+", True),
        ("tcp://[::1]:0", r"tcp://\[::1\]:\d+", True),
        ("tcp://0.0.0.0:0", r"tcp://0\.0\.0\.0:\d+", False),
    ],
)
def test_a_server_of_the_network_is_found_and_encrypts(
    before: list[Listener], address: str, shown: str, loopback: bool
) -> None:
    port = RemoteServerTransport(SLOTS, SLOTS, address=address, secret=SECRET)
    (found,) = own(before)
    assert re.fullmatch(shown, found.address)
    assert (found.loopback, found.encrypted) == (loopback, True)
    port.close()
    assert own(before) == []


@pytest.mark.parametrize(("host", "loopback"), [("127.0.0.1", True), ("0.0.0.0", False), ("::", False)])
def test_what_does_not_encrypt_is_found(
    before: list[Listener], local: LocalServerTransport, host: str, loopback: bool
) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family):
        (found,) = [each for each in own(before) if each.address.startswith("tcp")]
    assert (found.loopback, found.encrypted) == (loopback, False)


def show(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *found: Listener
) -> tuple[int, list[dict[str, str]]]:
    monkeypatch.setattr(sys.modules["headrace.cli.commands.doctor"], "listeners", lambda: list(found))
    code = run(["doctor", "--json"])
    checks = json.loads(capsys.readouterr().out)["checks"]
    return code, [check for check in checks if check["name"] == "listens"]


def test_what_lets_everybody_in_from_everywhere_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, (check,) = show(monkeypatch, capsys, Listener(7, "tcp://0.0.0.0:5", False, False))
    assert (code, check["verdict"]) == (3, "problem")
    assert check["found"] == "process 7: tcp://0.0.0.0:5, reached from other machines, not encrypted"
    assert "firewall" in check["remedy"]


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (Listener(7, "tcp://127.0.0.1:5", True, False), "warning"),
        (Listener(7, "tcp://10.0.0.1:5", False, True), "ok"),
        (Listener(7, "tcp://127.0.0.1:5", True, True), "ok"),
        (Listener(0, "local:headrace-0", True, False), "ok"),
    ],
)
def test_what_only_a_few_reach_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], found: Listener, verdict: str
) -> None:
    code, (check,) = show(monkeypatch, capsys, found)
    assert (code, check["verdict"]) == (0, verdict)


@pytest.mark.slow
def test_it_fits_into_eighty_columns(
    local: LocalServerTransport, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    port = RemoteServerTransport(SLOTS, SLOTS)
    run(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    port.close()
    assert max(map(len, lines)) <= 80
    shown = " ".join(" ".join(line.split()) for line in lines)
    assert f"process {os.getpid()}: {port.address}, loopback, encrypted" in shown
    assert "listens by default no network address" in shown


def look(folder: Path) -> None:
    """What a worker sees in the middle of a run."""
    checks = [check for check in examine() if check.name == "listens"]
    lines = [[check.verdict.value, check.found] for check in checks]
    part = folder / f"{os.getpid()}.part"
    part.write_text(json.dumps(lines))
    part.rename(folder / "seen.json")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["tcp", "shared_memory"])
def test_a_run_listens_to_its_own_machine_alone(tmp_path: Path, transport: str) -> None:
    job = make_job(model=faulty(functools.partial(look, tmp_path), victim=None, when=1))
    strategy = hr.ParameterServer(2, 2, transport=transport)
    with LocalEngine() as engine:
        done = hr.fit(job, strategy, engine=engine, run_dir=tmp_path / "run")
    servers = {event.pid for event in done.events if event.__class__.__name__ == "ServerStarted"}
    seen = json.loads((tmp_path / "seen.json").read_text())
    ours = [(verdict, found) for verdict, found in seen if any(f"process {pid}:" in found for pid in servers)]
    assert len(ours) == 2
    assert {verdict for verdict, _ in ours} == {Verdict.OK}
    for _, found in ours:
        assert ("127.0.0.1" in found and found.endswith("encrypted, with the run's secret")) or "local:" in found
