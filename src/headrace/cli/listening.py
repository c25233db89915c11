"""Finds the sockets in /proc that runs of headrace listen on, and asks whether they encrypt."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

from headrace.machine import disk

_PROC = Path("/proc")
_OURS = re.compile(r"/memfd:headrace-[a-z0-9-]+ \(deleted\)")
"""Every process of a run holds such memory, whatever the process is called."""

_LOCAL = re.compile(r"@headrace-[0-9a-f]{32}")
_SOCKET = re.compile(r"socket:\[([0-9]+)\]")
_LISTENS = "0A"
_ACCEPTS = 0x10000
_ANSWER_S = 1.0
_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_GREETING = _SIGNATURE + b"\3\1" + b"CURVE".ljust(20, b"\0") + bytes(32)
_MECHANISM = slice(12, 32)


@dataclass(frozen=True)
class Listener:
    """A socket that a process of a run listens on.

    Attributes:
        pid: 0 for another user's process.
        address: "tcp://127.0.0.1:5555", or "local:" and a name.
        encrypted: whether it encrypts, and refuses connections without the run's secret.
    """

    pid: int
    address: str
    loopback: bool
    encrypted: bool


def listeners() -> list[Listener]:
    """Returns the listening sockets of this user's runs, or of all users' for root."""
    local, network = _local(), _network()
    sockets = []
    for pid, inodes in _processes():
        for inode in inodes:
            if inode in local:
                sockets.append(Listener(pid, f"local:{local.pop(inode).removeprefix('@')}", True, False))
            elif inode in network:
                host, port = network[inode]
                shown = f"tcp://{f'[{host}]' if host.version == 6 else host}:{port}"
                sockets.append(Listener(pid, shown, host.is_loopback, _encrypts(host, port)))
    # Names are seen by every user; their owners by root and the owner alone.
    sockets += [Listener(0, f"local:{name.removeprefix('@')}", True, False) for name in local.values()]
    return sorted(sockets, key=lambda listener: (listener.pid, listener.address))


def _processes() -> Iterator[tuple[int, list[int]]]:
    """Yields the processes of runs, with the inodes of their sockets."""
    for folder in _PROC.iterdir():
        if not folder.name.isdigit():
            continue
        held = []
        # Another user's, or one that has just ended.
        with suppress(OSError):
            for descriptor in (folder / "fd").iterdir():
                with suppress(OSError):
                    held.append(os.readlink(descriptor))
        if any(_OURS.fullmatch(target) for target in held):
            matches = (_SOCKET.fullmatch(target) for target in held)
            yield int(folder.name), [int(match[1]) for match in matches if match]


def _local() -> dict[int, str]:
    """Returns the names that servers listen on for their own machine, by inode."""
    names = {}
    for line in (_PROC / "net" / "unix").read_text(errors="replace").splitlines()[1:]:
        fields = line.split()
        if len(fields) == 8 and int(fields[3], 16) & _ACCEPTS and _LOCAL.fullmatch(fields[7]):
            names[int(fields[6])] = fields[7]
    return names


def _network() -> dict[int, tuple[IPv4Address | IPv6Address, int]]:
    """Returns all addresses with a listening socket, by inode."""
    addresses = {}
    for table in ("tcp", "tcp6"):
        path = _PROC / "net" / table
        if not disk.exists(path):
            continue
        for line in path.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENS:
                host, _, port = fields[1].partition(":")
                addresses[int(fields[9])] = (_address(host), int(port, 16))
    return addresses


def _address(digits: str) -> IPv4Address | IPv6Address:
    """Returns the address in /proc/net/tcp, whose words of 4 bytes stand in this machine's order."""
    words = [bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8)]
    address = ip_address(b"".join(words))
    return address.ipv4_mapped or address if isinstance(address, IPv6Address) else address


def _encrypts(host: IPv4Address | IPv6Address, port: int) -> bool:
    """Asks the socket: the greeting of ZMTP contains the security mechanism."""
    reached = str(host) if not host.is_unspecified else ("127.0.0.1" if host.version == 4 else "::1")
    answer = b""
    with suppress(OSError), socket.create_connection((reached, port), timeout=_ANSWER_S) as asked:
        asked.sendall(_GREETING)
        while len(answer) < _MECHANISM.stop and (came := asked.recv(_MECHANISM.stop)):
            answer += came
    return answer.startswith(b"\xff") and answer[_MECHANISM].rstrip(b"\0") == b"CURVE"
