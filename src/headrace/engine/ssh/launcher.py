"""Starts an agent on each host by ssh, checks that all have the same, and ends all where one ends badly."""

from __future__ import annotations

import json
import os
import queue
import secrets
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import IO, Any

from headrace.engine.base import Terminated
from headrace.engine.ssh.agent import GRACE_S, HELLO, exit_code, is_loss
from headrace.errors import PeerLost, UnfitMachine, UsageError
from headrace.policies.roles import bounds

_START_S = 60.0
_BEAT_EVERY_S = 0.2
_SILENT_S = 15.0
"""Without a line from the launcher after which an agent takes it for lost."""
_SSH_FAILED = 255
# A connection that answers nothing for 10 s has broken; ssh must not ask for a password.
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=2")


@dataclass(frozen=True)
class SshHost:
    """A host: what ssh calls it, and the name that it has in the run; "" for its own."""

    destination: str
    name: str = ""


@dataclass(frozen=True)
class SshCommand:
    """What runs on every host.

    Attributes:
        command: arguments of Python.
        script: a file that must be the same on all hosts.
        workers: processes on all hosts together.
        directory: in which they run.
        port: MASTER_PORT; 0 for a free one of the first host.
        ssh: the program and its options.
        python: the interpreter on every host.
        distribution: "block" gives each host ranks that follow each other, "cyclic" deals them out by turns.
        keeps_going: whether the others go on when a host or rank 0 is lost, and one that ends well is enough.
    """

    command: tuple[str, ...]
    script: Path
    workers: int
    directory: Path
    port: int = 0
    ssh: tuple[str, ...] = ("ssh",)
    python: str = sys.executable
    distribution: str = "block"
    keeps_going: bool = False


def launch_over_ssh(hosts: Sequence[SshHost], wanted: SshCommand) -> int:
    """Runs a command in processes on several hosts; returns the exit code of the first that failed.

    What they print appears with the host's name before each line. On Ctrl-C and SIGTERM all get the same signal, and
    have the time to end in order.

    Raises:
        UsageError: two hosts have one name, or the first one's address reaches no other.
        UnfitMachine: a host is not reached, lacks something, or has another version or script than the first.
        PeerLost: the connection to a host has broken.
    """
    agents = [_Agent(host, wanted) for host in hosts]
    try:
        hellos = _hellos(agents)
        _compare(agents, hellos)
        _order(agents, hellos, wanted)
        return _follow(agents, wanted.keeps_going)
    except (KeyboardInterrupt, Terminated) as error:
        number = signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM
        for agent in agents:
            agent.send(str(int(number)))
        _wait(agents)
        raise
    finally:
        for agent in agents:
            agent.close()


class _Agent:
    """The agent of one host, as seen from here."""

    def __init__(self, host: SshHost, wanted: SshCommand) -> None:
        self.label = host.name or host.destination
        self.name = host.name
        self.first_rank = 0
        self.hello: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self.last_error = ""
        agent = shlex.join([wanted.python, "-m", "headrace.engine.ssh.agent", str(wanted.script), str(wanted.port)])
        remote = f"cd {shlex.quote(str(wanted.directory))} && exec {agent}"
        self._process = subprocess.Popen(
            [*wanted.ssh, *(f"-o{option}" for option in _OPTIONS), host.destination, remote],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # Ctrl-C must not end ssh before the processes have ended.
            start_new_session=True,
        )
        stdin, output, errors = self._process.stdin, self._process.stdout, self._process.stderr
        assert stdin is not None
        assert output is not None
        assert errors is not None
        self._stdin = stdin
        self._threads = [self._thread(self._copy_output, output), self._thread(self._copy_errors, errors)]

    @property
    def code(self) -> int | None:
        """The exit code of ssh, which is the agent's or 255; None while it runs."""
        return self._process.poll()

    def send(self, line: str) -> None:
        """Sends a line; an agent that has ended does not get it."""
        with suppress(BrokenPipeError):
            self._stdin.write(line.encode() + b"\n")
            self._stdin.flush()

    def close(self) -> None:
        """Lets the agent end its processes; ends ssh if that takes too long."""
        with suppress(BrokenPipeError):  # it has ended
            self._stdin.close()
        try:
            self._process.wait(GRACE_S + 2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join()

    def _thread(self, copy: Callable[[IO[bytes]], None], stream: IO[bytes]) -> threading.Thread:
        thread = threading.Thread(target=copy, args=(stream,), name="headrace-ssh", daemon=True)
        thread.start()
        return thread

    def _copy_output(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                text = line.decode(errors="replace").rstrip("\n")
                if text.startswith(HELLO):
                    self.hello.put(json.loads(text.removeprefix(HELLO)))
                else:
                    self._say(1, text)

    def _copy_errors(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                self.last_error = line.decode(errors="replace").rstrip("\n")
                self._say(2, self.last_error)

    def _say(self, descriptor: int, text: str) -> None:
        # Whole lines, so that those of several hosts do not mix.
        os.write(descriptor, f"{self.label}: {text}\n".encode())


def _hellos(agents: Sequence[_Agent]) -> list[Mapping[str, Any]]:
    deadline = monotonic() + _START_S
    found: dict[int, Mapping[str, Any]] = {}
    while len(found) < len(agents):
        for index, agent in enumerate(agents):
            if index in found:
                continue
            code = agent.code
            try:
                found[index] = agent.hello.get(timeout=0.05)
            except queue.Empty:
                if code is not None or monotonic() > deadline:
                    raise _unreached(agent, code) from None
    return [found[index] for index in range(len(agents))]


def _unreached(agent: _Agent, code: int | None) -> UnfitMachine:
    if code is None:
        return UnfitMachine(f"{agent.label} has not answered within {_START_S:.0f} s; try: ssh {agent.label} true")
    agent.close()
    cause = agent.last_error or f"ssh ended with {code}"
    remedy = (
        f"try: ssh {agent.label} true"
        if code == _SSH_FAILED
        else "every host needs the same directory, and the same Python with headrace (--python)"
    )
    return UnfitMachine(f"{agent.label} cannot take part: {cause}; {remedy}")


def _compare(agents: Sequence[_Agent], hellos: Sequence[Mapping[str, Any]]) -> None:
    first = hellos[0]
    names = [agent.name or hello["host"] for agent, hello in zip(agents, hellos, strict=True)]
    for place, name in enumerate(names):
        if name in names[:place]:
            other = agents[names.index(name)].label
            raise UsageError(
                f"{other} and {agents[place].label} have one name, {name}; give each one in a --cluster FILE"
            )
    for agent, hello in zip(agents, hellos, strict=True):
        for what in ("headrace", "torch", "python"):
            if hello["versions"][what] != first["versions"][what]:
                mine, theirs = hello["versions"][what], first["versions"][what]
                raise UnfitMachine(
                    f"{agent.label} has {what} {mine}, {agents[0].label} {theirs}; install the same on all"
                )
        if hello["script"] != first["script"]:
            raise UnfitMachine(f"the script on {agent.label} is not that on {agents[0].label}; copy it to all hosts")
    if first["refused"]:
        raise UnfitMachine(f"{agents[0].label}: {first['refused']}; give another --port")
    if len(agents) > 1 and (first["address"].startswith("127.") or first["address"] in ("", "::1")):
        raise UsageError(
            f"{agents[0].label} is reached at {first['address'] or 'no address'}, where no other host reaches it; name "
            "it by its address in the network of all"
        )


def _order(agents: Sequence[_Agent], hellos: Sequence[Mapping[str, Any]], wanted: SshCommand) -> None:
    """Tells each agent what to run; the run's secret goes through ssh's stdin alone."""
    environment = {
        "WORLD_SIZE": str(wanted.workers),
        "MASTER_ADDR": hellos[0]["address"],
        "MASTER_PORT": str(hellos[0]["port"]),
        "HEADRACE_SECRET": secrets.token_hex(32),
    }
    for agent, ranks in zip(agents, ranks_of_hosts(wanted.workers, len(agents), wanted.distribution), strict=True):
        named = {"HEADRACE_HOST": agent.name} if agent.name else {}
        agent.first_rank = ranks[0]
        request = {"command": wanted.command, "ranks": list(ranks), "silent_s": _SILENT_S}
        agent.send(json.dumps({**request, "environment": {**environment, **named}}))


def ranks_of_hosts(workers: int, hosts: int, distribution: str) -> list[range]:
    """Returns the ranks of each host.

    >>> ranks_of_hosts(5, 2, "block"), ranks_of_hosts(5, 2, "cyclic")
    ([range(0, 3), range(3, 5)], [range(0, 5, 2), range(1, 5, 2)])
    """
    if distribution == "cyclic":
        return [range(host, workers, hosts) for host in range(hosts)]
    return [range(*each) for each in bounds(workers, [1] * hosts)]


def _follow(agents: Sequence[_Agent], keeps_going: bool) -> int:
    """Returns the exit code of all; after an error, those that do not end in time are ended.

    Also after a broken connection, if they do not keep going.
    """
    codes: dict[int, int] = {}
    deadline = None
    pause = threading.Event()
    while len(codes) < len(agents) and (deadline is None or monotonic() < deadline):
        for index, agent in enumerate(agents):
            code = agent.code
            if code is None:
                agent.send("")
            elif index not in codes:
                codes[index] = code
                broken = (code == _SSH_FAILED or code < 0) and not keeps_going
                if code != 0 and (broken or not is_loss(code)) and deadline is None:
                    deadline = monotonic() + GRACE_S
        if len(codes) < len(agents):
            pause.wait(_BEAT_EVERY_S)
    if codes.get(0) == 0 or (keeps_going and 0 in codes.values()):
        return exit_code([code for _, code in sorted(codes.items())], leads=True)
    # Of ssh itself, which also a signal may have ended.
    lost = [index for index, code in codes.items() if code == _SSH_FAILED or code < 0]
    failed = exit_code([code for index, code in codes.items() if index not in lost])
    for index in lost:
        if failed in (0, PeerLost.exit_code):
            agent = agents[index]
            raise PeerLost(
                agent.first_rank, agent.label, f"ssh ended: {agent.last_error or 'its connection has broken'}"
            )
    return failed


def _wait(agents: Sequence[_Agent]) -> None:
    """Waits until all have ended in order; a second signal ends the waiting."""
    pause = threading.Event()
    while any(agent.code is None for agent in agents):
        for agent in agents:
            agent.send("")
        pause.wait(_BEAT_EVERY_S)
