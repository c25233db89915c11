"""What ends the processes of a host: the launcher's silence, and its signals; no ssh, and no process that trains."""

from __future__ import annotations

import signal
from pathlib import Path
from time import monotonic
from typing import Any, cast

import pytest

from headrace.engine.base import Terminated
from headrace.engine.ssh import agent, launcher
from headrace.engine.ssh.launcher import SshCommand, SshHost, launch_over_ssh


class Silence:
    """Orders that do not come any more, from a launcher whose connection stays open."""

    ended = False

    def __init__(self, since_s: float) -> None:
        self.heard = monotonic() - since_s
        self.asked = 0

    def next(self, within_s: float) -> str:
        self.asked += 1
        assert self.asked < 100
        return ""


def test_an_agent_ends_its_processes_when_nothing_was_heard_for_long() -> None:
    request = {"command": ["-c", "import time; time.sleep(60)"], "ranks": [0], "silent_s": 5.0, "environment": {}}
    assert agent._run(request, cast("Any", Silence(6.0))) == 128 + signal.SIGTERM


class Agent:
    """An agent whose processes end by the signal that it is told."""

    every: list[Agent]

    def __init__(self, host: SshHost, wanted: SshCommand) -> None:
        self.told: list[str] = []
        self.send = self.told.append
        self.code = 130
        self.every.append(self)

    def close(self) -> None:
        """It has ended."""


@pytest.mark.parametrize(("error", "number"), [(KeyboardInterrupt, signal.SIGINT), (Terminated, signal.SIGTERM)])
def test_every_host_gets_the_launchers_signal(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], number: signal.Signals
) -> None:
    def interrupted(agents: list[Agent]) -> None:
        raise error

    Agent.every = []
    monkeypatch.setattr(launcher, "_Agent", Agent)
    monkeypatch.setattr(launcher, "_hellos", interrupted)
    with pytest.raises(error):
        launch_over_ssh([SshHost("a"), SshHost("b")], SshCommand(("script.py",), Path("script.py"), 2, Path()))
    assert [each.told for each in Agent.every] == [[str(number.value)]] * 2
