"""Hosts made by scripts/hosts, and how a process that was forked elsewhere goes to one of them."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from engine.ranks import Ended, launcher, run_ranks
from headrace.engine.local.fork_server import ForkServer

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "hosts"
MASTER = "10.97.0.1"
RUN_SECRET = "0123456789abcdef0123456789abcdef"

Start = Callable[..., Ended]


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
        # Not before, because programs that tests start import this module, too.
        import pytest

        pytest.skip(made.stderr.strip())
    assert made.returncode == 0, made.stderr
    try:
        yield name
    finally:
        assert hosts_script(name, "down").returncode == 0


def at(network: str, host: int) -> dict[str, str]:
    """The environment of a process that is to be on a host."""
    return {
        "HEADRACE_SECRET": RUN_SECRET,
        "HEADRACE_HOST": f"host-{host}",
        "NETWORK_NAMESPACE": f"/run/netns/{network}-{host}",
    }


def starts(fork_server: ForkServer, network: str, script: Path, folder: Path) -> Start:
    """Returns `start(*arguments, on=(0, 1), awaited=None)`: a rank of a script on each of these hosts.

    All end by themselves; so many are waited for first.
    """

    def start(*arguments: str, on: Sequence[int] = (0, 1), awaited: int | None = None) -> Ended:
        said = launcher(len(on), MASTER)
        environments = [{**one, **at(network, host)} for one, host in zip(said, on, strict=True)]
        return run_ranks(fork_server, folder, script, arguments, environments, awaited or len(on))

    return start


def go_there() -> None:
    """Brings this thread, and those that it starts, to the host that the environment says."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(os.environ["NETWORK_NAMESPACE"]) as namespace:
        if libc.setns(namespace.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")


def cut_link(host: int) -> None:
    """Takes the link of a host down, from a process on any host."""
    network = os.environ["NETWORK_NAMESPACE"].rpartition("/")[2].rpartition("-")[0]
    subprocess.run(["ip", "-n", f"{network}-{host}", "link", "set", "eth0", "down"], check=True)


def part(host: int, other: int) -> None:
    """Loses every packet between two hosts, silently, from a process on any host."""
    network = os.environ["NETWORK_NAMESPACE"].rpartition("/")[2].rpartition("-")[0]
    for source, target in ((host, other), (other, host)):
        # The address of no network card.
        way = f"neigh replace 10.97.0.{target + 1} lladdr 02:00:00:00:00:ff dev eth0 nud permanent"
        subprocess.run(["ip", "-n", f"{network}-{source}", *way.split()], check=True)


def join_again(network: str, host: int, other: int) -> None:
    """Lets packets between two hosts through again."""
    for source, target in ((host, other), (other, host)):
        way = f"neigh del 10.97.0.{target + 1} dev eth0"
        subprocess.run(["ip", "-n", f"{network}-{source}", *way.split()], check=True)
