"""Processes on hosts that are reached by ssh: what they are told, who is refused, and how all end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.conftest import until
from engine.networks import network
from engine.ssh.servers import ssh_servers, there
from headrace.engine.ssh import launcher
from headrace.engine.ssh.agent import exit_code
from headrace.engine.ssh.launcher import SshCommand, SshHost, launch_over_ssh
from headrace.errors import HeadraceError, PeerLost, UnfitMachine, UsageError
from headrace.report.model.events import read_events
from headrace.spec.events import RunStarted

pytestmark = pytest.mark.slow

FAKE = f"{sys.executable} {Path(__file__).parent / 'fake_ssh.py'}"
COMMAND_LINE = (sys.executable, "-c", "from headrace.cli import main; main()")
SCRIPT = """
import glob, json, os, pathlib, sys, time
secret = os.environ["HEADRACE_SECRET"]
lines = [pathlib.Path(name).read_bytes() for name in glob.glob(f"/proc/{os.getppid()}/cmdline")]
told = {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "HEADRACE_HOST")}
told |= {"secret": secret, "seen": any(secret.encode() in line for line in lines), "arguments": sys.argv[1:]}
os.write(1, (json.dumps(told) + chr(10)).encode())
if sys.argv[1:] == ["fail"] and told["RANK"] == "0":
    sys.exit(7)
if sys.argv[1:] == ["lose"]:
    os.kill(os.getpid(), 9) if told["RANK"] != "0" else time.sleep(1)
elif sys.argv[1:] == ["lead"]:
    # The first host's agent is lost with its process, or the first process alone.
    os.kill(os.getppid() if told["WORLD_SIZE"] == "2" else os.getpid(), 9) if told["RANK"] == "0" else time.sleep(1)
elif sys.argv[1:]:
    time.sleep(60)
"""

AGENT = (sys.executable, "-m", "headrace.engine.ssh.agent", "script.py", "0")
SAID = {"HEADRACE_SECRET": "s", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "HEADRACE_HOST": "a"}

Launch = Callable[..., int]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path / "script.py"


def said(text: str) -> list[dict[str, Any]]:
    lines = [line.partition(": ") for line in text.splitlines() if ": {" in line]
    return sorted(({"label": label, **json.loads(line)} for label, _, line in lines), key=lambda one: one["RANK"])


def launch(script: Path, hosts: str, *arguments: str, workers: int = 2, **more: Any) -> int:
    command = SshCommand((str(script), *arguments), script, workers, script.parent, 0, tuple(FAKE.split()))
    command = replace(command, **more)
    return launch_over_ssh([SshHost(host) for host in hosts.split(",")], command)


def test_processes_are_told_who_they_are(script: Path, capfd: Capture) -> None:
    assert launch(script, "a,b", workers=3) == 0
    told = said(capfd.readouterr().out)
    assert [(one["label"], one["RANK"], one["LOCAL_RANK"], one["HEADRACE_HOST"]) for one in told] == [
        ("a", "0", "0", "host-a"),
        ("a", "1", "1", "host-a"),
        ("b", "2", "0", "host-b"),
    ]
    assert {(one["WORLD_SIZE"], one["MASTER_ADDR"], one["seen"]) for one in told} == {("3", "0.0.0.0", False)}
    (secret,) = {one["secret"] for one in told}
    assert len(secret) == 64


def test_ranks_are_dealt_out_by_turns(script: Path, capfd: Capture) -> None:
    assert launch(script, "a,b", workers=3, distribution="cyclic") == 0
    told = said(capfd.readouterr().out)
    assert [(one["label"], one["RANK"], one["LOCAL_RANK"]) for one in told] == [
        ("a", "0", "0"),
        ("b", "1", "0"),
        ("a", "2", "1"),
    ]


def test_one_that_fails_ends_all(script: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "GRACE_S", 0.1)
    assert launch(script, "a,b", "fail") == 7
    assert [one["arguments"] for one in said(capfd.readouterr().out)] == [["fail"]] * 2


@pytest.mark.parametrize("workers", [2, 3])
def test_one_that_is_killed_ends_no_other(script: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    monkeypatch.setattr(launcher, "GRACE_S", 0.1)
    assert launch(script, "a,b", "lose", workers=workers) == 0


@pytest.mark.parametrize("workers", [2, 3])
def test_the_others_keep_going_without_rank_0_if_they_shall(
    script: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    monkeypatch.setattr(launcher, "GRACE_S", 0.1)
    assert launch(script, "a,b", "lead", workers=workers, keeps_going=True) == 0


def test_without_that_the_loss_of_a_host_ends_all(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "GRACE_S", 0.1)
    with pytest.raises(PeerLost, match="rank 0 on a was lost: ssh ended"):
        launch(script, "a,b", "lead")


def test_a_host_that_does_not_answer_is_named(script: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> None:
    monkeypatch.setattr(launcher, "_START_S", 1.0)
    monkeypatch.setattr(launcher, "GRACE_S", 0.1)
    with pytest.raises(UnfitMachine, match="silent has not answered within 1 s; try: ssh silent true"):
        launch(script, "a,silent")
    assert said(capfd.readouterr().out) == []


def test_an_agent_ends_its_processes_when_the_launcher_is_silent(script: Path) -> None:
    told = {"command": [str(script), "wait"], "ranks": [0], "silent_s": 0.5, "environment": SAID}
    with subprocess.Popen(AGENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        agent.stdout.readline()
        agent.stdin.write(json.dumps(told).encode() + b"\n")
        agent.stdin.flush()
        # Its stdin stays open: only the silence can end it.
        assert json.loads(agent.stdout.readline())["RANK"] == "0"
        assert agent.wait(30) == 128 + signal.SIGTERM


@pytest.mark.usefixtures("real_python")
def test_ctrl_c_ends_all(script: Path) -> None:
    command = [*COMMAND_LINE, "launch", "--hosts", "a,b", "--ssh", FAKE, str(script), "wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert len(said("".join(lines))) == 2
    assert process.returncode == 130
    assert errors.count("KeyboardInterrupt") == 2
    assert errors.endswith("error: interrupted (SIGINT)\n")


@pytest.mark.parametrize(
    ("hosts", "kind", "message"),
    [
        ("a,nowhere", UnfitMachine, "nowhere cannot take part: ssh: Could not resolve hostname nowhere"),
        ("twin1,twin2", UsageError, "twin1 and twin2 have one name, twin"),
        ("loopback,b", UsageError, "loopback is reached at 127.0.0.1, where no other host reaches it"),
    ],
)
def test_hosts_that_are_refused(
    script: Path, hosts: str, kind: type[HeadraceError], message: str, capfd: Capture
) -> None:
    with pytest.raises(kind, match=message):
        launch(script, hosts)
    assert said(capfd.readouterr().out) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"versions": {"headrace": "1", "torch": "2", "python": "4"}}, "b has python 4, a 3; install the same on all"),
        ({"script": "other"}, "the script on b is not that on a; copy it to all hosts"),
    ],
)
def test_hosts_that_differ_are_refused(changes: dict[str, Any], message: str) -> None:
    hello = {
        "versions": {"headrace": "1", "torch": "2", "python": "3"},
        "script": "x",
        "refused": "",
        "address": "10.0.0.1",
    }
    agents: Any = [SimpleNamespace(label=label, name=label) for label in "ab"]
    launcher._compare(agents, [hello, hello])
    with pytest.raises(UnfitMachine, match=message):
        launcher._compare(agents, [hello, hello | changes])
    with pytest.raises(UnfitMachine, match="a: port 5 is in use; give another --port"):
        launcher._compare(agents, [hello | {"refused": "port 5 is in use"}, hello])


@pytest.mark.parametrize(("codes", "code"), [((0, 0), 0), ((4, 7), 7), ((0, 4), 4), ((-9, 4), 137), ((4, -15), 143)])
def test_the_code_is_that_of_the_one_that_failed(codes: tuple[int, ...], code: int) -> None:
    assert exit_code(codes) == code


@pytest.mark.parametrize(("codes", "code"), [((0, -9), 0), ((0, 4, 137, 255), 0), ((0, 4, 1), 1)])
def test_losses_do_not_count_where_rank_0_has_ended_well(codes: tuple[int, ...], code: int) -> None:
    assert exit_code(codes, leads=True) == code


@pytest.mark.net
@pytest.mark.usefixtures("real_python")
def test_over_real_ssh(script: Path, tmp_path: Path) -> None:
    path = f"PYTHONPATH={os.pathsep.join(sys.path)}"
    with network(2, kind="l") as hosts, ssh_servers(hosts, tmp_path, 2, path) as ssh:
        command = there(
            hosts, 0, [*COMMAND_LINE, "launch", "--hosts", "10.97.0.1,10.97.0.2", "--ssh", ssh, str(script)]
        )
        ended = subprocess.run(command, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        assert [(one["RANK"], one["HEADRACE_HOST"], one["MASTER_ADDR"]) for one in said(ended.stdout)] == [
            ("0", "host-0", "10.97.0.1"),
            ("1", "host-1", "10.97.0.1"),
        ]
        with subprocess.Popen([*command, "wait"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(2)]
            (client,) = with_words("ssh", "10.97.0.2")
            os.kill(client, signal.SIGKILL)
            _, errors = process.communicate(timeout=60)
        assert process.returncode == 4, errors
        assert len(said("".join(lines))) == 2
        assert "rank 1 on 10.97.0.2 was lost: ssh ended: " in errors
        # Its agent has seen the end of stdin.
        assert until(lambda: with_words(str(script)) == [], 20.0)


@pytest.mark.net
@pytest.mark.usefixtures("real_python")
@pytest.mark.full
def test_backups_of_servers_are_on_other_hosts_over_real_ssh(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("from engine.victims import make_job\n\njob = make_job()\n")
    path = f"PYTHONPATH={os.pathsep.join(sys.path)}"
    served = ["job.py", "--strategy", "parameter_server(servers=1, backups=1)", "--run-dir", "run"]
    with network(2, kind="l") as hosts, ssh_servers(hosts, tmp_path, 2, path) as ssh:
        several = ["--hosts", "10.97.0.1,10.97.0.2", "--workers", "4", "--ssh", ssh]
        command = there(hosts, 0, [*COMMAND_LINE, "launch", *several, *served])
        ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    (started,) = [event for event in read_events(tmp_path / "run") if isinstance(event, RunStarted)]
    roles = [(role["kind"], role["host"]) for role in started.plan["roles"]]
    assert roles == [("worker", "host-0"), ("worker", "host-1"), ("server", "host-0"), ("backup", "host-1")]


def with_words(*words: str) -> list[int]:
    """The processes whose command lines have all these words."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if {*words} <= {*(folder / "cmdline").read_text().split("\0")}:
                found.append(int(folder.name))
    return found
