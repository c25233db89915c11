"""A group of processes that have started each other, or were started by anything: without a launcher and an engine."""

from __future__ import annotations

import itertools
import json
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import NoReturn

from headrace.collectives.base import HostMap, ProcessGroup
from headrace.collectives.multi_host import MultiHostGroup, Watch
from headrace.errors import PeerLost, UsageError
from headrace.machine.identity import host_name
from headrace.shared_memory.control_page import ControlPage

_GRACE_S = 1.0
"""So long what a process did before its end may take to be seen."""


def join(
    rank: int,
    world: int,
    address: str,
    *,
    host: str | None = None,
    timeout_s: float = 10.0,
    start_timeout_s: float = 120.0,
    encrypt: bool = True,
) -> ProcessGroup:
    """Joins processes to a group, which sums, gathers and sends tensors; every one calls it, once a group.

    Processes of one host exchange by shared memory, those of several over TCP. All stay until the last collective is
    done, and then `close` the group.

    Args:
        rank: this process's number, from 0.
        world: how many there are.
        address: "host:port" at which rank 0 listens, and the others find it, until all have joined. Nothing there is
            encrypted or asked for a secret: it must be reached by this group alone.
        host: what this process's host is called; processes with the same name share memory. None for its own name.
        timeout_s: a connection between hosts that is silent for this long has ended.
        start_timeout_s: how long they wait for each other.
        encrypt: False leaves what goes between hosts unencrypted, for networks that are trusted.

    Raises:
        UsageError: ranks are taken twice or of another `world`, or rank 0 cannot listen at the address.
        PeerLost: a process has not joined in time. From every collective: a process was lost.
    """
    name, _, port = address.rpartition(":")
    if not (0 <= rank < world and name and port.isdecimal()):
        raise UsageError(f"rank={rank}, world={world} and address={address!r} are none: 0 to {world - 1}, 'host:port'")
    tell = _store(rank, world, name, int(port), start_timeout_s)
    here = host or host_name()
    facts = [json.loads(text) for text in tell(json.dumps([here, os.getpid(), world]))]
    if len(worlds := {each[2] for each in facts}) > 1:
        raise UsageError(f"the processes at {address} take the world to be {sorted(worlds)}; give all the same")
    hosts = tuple(each[0] for each in facts)
    near = {peer: _Process(pid) for peer, (its, pid, _) in enumerate(facts) if its == here and peer != rank}

    def check() -> None:
        for peer, process in near.items():
            if process.ended_for() > _GRACE_S:
                raise PeerLost(peer, hosts[peer], "its process has ended")

    def accuse(error: Exception, suspect: int) -> NoReturn:
        raise PeerLost(suspect, hosts[suspect], str(error)) from error

    home = HostMap(hosts, _own_address(name, int(port)), encrypt, timeout_s)
    return MultiHostGroup(Watch(ControlPage.create(world), check, accuse, timeout_s), rank, home, tell)


def _store(rank: int, world: int, name: str, port: int, within_s: float) -> Callable[[str], list[str]]:
    """Returns what gathers the text of every rank."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        store = TCPStore(name, port, None, rank == 0, timedelta(seconds=within_s), wait_for_workers=False)
    except RuntimeError as error:
        cause = str(error).partition("\n")[0]
        if rank == 0:
            raise UsageError(f"rank 0 cannot listen at {name}:{port}: {cause}; give all another port") from error
        raise PeerLost(0, f"{name}:{port}", f"was not there within {within_s:g} s: {cause}") from error
    if store.add(f"joined/{rank}", 1) > 1:
        raise UsageError(f"another process has joined as rank {rank} at {name}:{port}; give each its own number")
    rounds = itertools.count()

    def tell(text: str) -> list[str]:
        number, texts = next(rounds), []
        store.set(f"{number}/{rank}", text)
        for peer in range(world):
            try:
                texts.append(store.get(f"{number}/{peer}").decode())
            except RuntimeError as error:
                raise PeerLost(peer, f"{name}:{port}", f"has not joined within {within_s:g} s") from error
        return texts

    return tell


def _own_address(name: str, port: int) -> str:
    """Returns the address by which this host reaches rank 0's."""
    family, kind, _, _, found = socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # Nothing is sent: the system looks up the route.
        probe.connect(found)
        return str(probe.getsockname()[0])


class _Process:
    """Another process of this host, by its number and the time at which it began."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._began = self._state()[1]
        self._ended_s: float | None = None

    def ended_for(self) -> float:
        """Returns for how long it is known to have ended; 0 while it runs."""
        state, began = self._state()
        if state not in "ZX" and began == self._began:
            return 0.0
        self._ended_s = self._ended_s or monotonic()
        return monotonic() - self._ended_s

    def _state(self) -> tuple[str, str]:
        try:
            # The name of the program, in parentheses, may have blanks.
            fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return "X", ""
        return fields[0], fields[19]
