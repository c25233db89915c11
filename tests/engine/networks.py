"""Hosts made by scripts/hosts, and how a process that was forked elsewhere goes to one of them."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "hosts"
MASTER = "10.97.0.1"


def hosts_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs scripts/hosts for a network of that name."""
    environment = {**os.environ, "HEADRACE_HOSTS": name}
    return subprocess.run([SCRIPT, *arguments], env=environment, capture_output=True, text=True)


@contextmanager
def network(hosts: int, *options: str, kind: str = "t") -> Iterator[str]:
    """Makes hosts; gives the name of their network, which begins with its kind.

    Where the machine does not let it, the test is skipped.
    """
    # Of this process alone, because others may test at the same time.
    name = kind + "".join(chr(ord("a") + int(digit)) for digit in str(os.getpid()))
    made = hosts_script(name, "up", str(hosts), *options)
    if made.returncode == 3:
        pytest.skip(made.stderr.strip())
    assert made.returncode == 0, made.stderr
    try:
        yield name
    finally:
        assert hosts_script(name, "down").returncode == 0


def at(network: str, host: int) -> dict[str, str]:
    """The environment of a process that is to be on a host."""
    return {"HEADRACE_HOST": f"host-{host}", "NETWORK_NAMESPACE": f"/run/netns/{network}-{host}"}


def go_there() -> None:
    """Brings this thread, and those that it starts, to the host that the environment says."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(os.environ["NETWORK_NAMESPACE"]) as namespace:
        if libc.setns(namespace.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")
