"""By which network interface the devices' backend connects to other hosts, and by which headrace does.

NCCL's rules: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html#nccl-socket-ifname
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.devices import DeviceKind
from headrace.errors import UnfitMachine
from headrace.machine import disk
from headrace.machine.identity import host_name

_GET_ADDRESS = 0x8915
"""SIOCGIFADDR of Linux: an interface's IPv4 address."""
_LAST = ("lo", "docker")
"""How the names of interfaces begin that are taken only where there are no others."""


def interfaces() -> dict[str, list[str]]:
    """Returns the addresses of this host, by the interface that has them; not of one without an address."""
    found: dict[str, list[str]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking.fileno(), _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has none
            found[name] = [socket.inet_ntoa(answer[20:24])]
    listed = Path("/proc/net/if_inet6")
    for line in listed.read_text().splitlines() if disk.exists(listed) else ():
        digits, *_, name = line.split()
        found.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def taken_by_backend(setting: str, names: Sequence[str]) -> list[str]:
    """Returns the interfaces that NCCL takes of these; by the first its ranks find each other.

    >>> taken_by_backend("", ["lo", "docker0", "eth0", "eth1"]), taken_by_backend("", ["eth0", "ib0"])
    (['eth0', 'eth1'], ['ib0'])
    >>> taken_by_backend("=eth0,eth2", ["eth0", "eth01"]), taken_by_backend("^eth", ["eth0", "wan"])
    (['eth0'], ['wan'])
    """
    if not setting:
        first = [name for name in names if name.startswith("ib")]
        return first or [name for name in names if not name.startswith(_LAST)] or list(names)
    excluded, listed = setting.startswith("^"), setting.lstrip("^=").split(",")
    exact = setting.lstrip("^").startswith("=")
    return [
        name for name in names if excluded != any(name == each if exact else name.startswith(each) for each in listed)
    ]


def other_interface(kind: DeviceKind, address: str, there: Mapping[str, Sequence[str]], setting: str) -> str:
    """Returns in one line that the backend takes another interface than the one with headrace's address; "" if not.

    Raises:
        UnfitMachine: it takes none.
    """
    own = next((name for name, addresses in there.items() if address in addresses), "")
    taken = taken_by_backend(setting, [*there])
    says = f"{kind.interface}={setting}" if setting else f"{kind.interface} is not set"
    if not taken:
        raise UnfitMachine(
            f"{says} names no network interface of {host_name()}, which has {', '.join(there)}; headrace connects by "
            f"{own}: set {kind.interface}={own}, or unset it"
        )
    if not own or taken[0] == own:
        return ""
    return (
        f"{says} on {host_name()}, so that {kind.backend} connects by {taken[0]}, and headrace connects by {own} "
        f"({address}); set {kind.interface}={own} where only that reaches the other hosts"
    )


def settle_interface(kind: DeviceKind, address: str) -> str:
    """Lets the backend connect as headrace does, by the interface with this address; returns what is to be said.

    Where the user has said by which it connects, that counts. Raises an `UnfitMachine` if there is no such interface.
    """
    if not kind.interface:
        return ""
    there = interfaces()
    own = next((name for name, addresses in there.items() if address in addresses), "")
    if not os.environ.get(kind.interface) and own:
        os.environ[kind.interface] = f"={own}"
    return other_interface(kind, address, there, os.environ.get(kind.interface, ""))
