"""Pods of an Indexed Job: their command and probes as they are written, and what their processes do for them."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.conftest import until
from engine.schedulers.named_hosts import JOB, environment, named_hosts
from headrace.cli import run
from headrace.engine.schedulers.alive import ALIVE_FILE, show_alive
from headrace.engine.torchrun import address
from headrace.errors import UsageError
from headrace.report.model.summary import summarize

KUBERNETES = ("kubernetes", "job.py", "--image", "registry/digits:1", "--claim", "runs")


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The documents of a file, by kind; the working directory holds it and the job."""
    (tmp_path / "job.py").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    assert run(["launch-files", *KUBERNETES, "--run-dir", "a", "--output", "pods.yaml"]) == 0
    return {each["kind"]: each for each in yaml.safe_load_all(Path("pods.yaml").read_text())}


@pytest.mark.slow
@pytest.mark.net
@pytest.mark.full
def test_the_command_of_the_pods_trains(written: dict[str, Any], tmp_path: Path) -> None:
    job, secret = written["Job"], written["Secret"]["stringData"]
    name, (container,) = job["metadata"]["name"], job["spec"]["template"]["spec"]["containers"]
    variables = {
        each["name"]: each["value"] if "value" in each else secret[each["valueFrom"]["secretKeyRef"]["key"]]
        for each in container["env"]
    }
    pods = [f"{name}-{index}.{name}" for index in range(job["spec"]["completions"])]
    with named_hosts(tmp_path, *pods) as hosts:
        started = [
            subprocess.Popen(
                hosts.on(index, *container["command"]),
                env={
                    **environment(tmp_path),
                    **variables,
                    "JOB_COMPLETION_INDEX": str(index),
                    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
                    ALIVE_FILE: f"alive-{index}",
                },
            )
            for index in range(len(pods))
        ]
        assert [process.wait(240) for process in started] == [0, 0]
    assert summarize(tmp_path / "a").started.workers == 2
    assert (tmp_path / "alive-0").exists()
    assert (tmp_path / "alive-1").exists()


def test_the_probes_read_when_the_process_was_last_alive(written: dict[str, Any], tmp_path: Path) -> None:
    (container,) = written["Job"]["spec"]["template"]["spec"]["containers"]
    probes = [container[name]["exec"]["command"] for name in ("startupProbe", "livenessProbe")]
    (written_for,) = {each["value"] for each in container["env"] if each["name"] == ALIVE_FILE}

    def passes() -> list[bool]:
        here = [[word.replace(written_for, str(tmp_path / "alive")) for word in probe] for probe in probes]
        return [subprocess.run(command, capture_output=True).returncode == 0 for command in here]

    assert passes() == [False, False]
    (tmp_path / "alive").touch()
    assert passes() == [True, True]
    os.utime(tmp_path / "alive", times=(time.time() - 61, time.time() - 61))
    assert passes() == [True, False]


def test_a_process_touches_its_file_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.schedulers.alive.TOUCH_EVERY_S", 0.01)
    path = tmp_path / "alive"
    monkeypatch.setenv(ALIVE_FILE, str(path))
    show_alive.cache_clear()
    show_alive()
    assert until(path.exists, 10)
    os.utime(path, times=(0, 0))
    assert until(lambda: path.stat().st_mtime > 0, 10)


def test_a_file_that_cannot_be_touched_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(ALIVE_FILE, str(tmp_path / "none" / "alive"))
    show_alive.cache_clear()
    show_alive()
    said: list[str] = []

    def heard() -> bool:
        said.append(capsys.readouterr().err)
        return "cannot be touched" in "".join(said)

    assert until(heard, 10)


def test_a_pod_waits_for_the_first_ones_name(monkeypatch: pytest.MonkeyPatch) -> None:
    unknown = iter([socket.gaierror("unknown")] * 2)

    def look_up(name: str, port: int, **_: object) -> list[Any]:
        for error in unknown:
            raise error
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("10.0.0.1", port))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(address, "_LOOK_UP_EVERY_S", 0.001)
    monkeypatch.setenv("MASTER_ADDR", "digits-0.digits")
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(UsageError, match=r"MASTER_ADDR=digits-0.digits MASTER_PORT=29500 on .* is no address: unknown"):
        address.master()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    assert address.master() == "10.0.0.1"
