"""Links are measured: the probe on loopback, which pairs when, and hosts behind a switch that is too slow."""

from __future__ import annotations

import socket
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import combinations
from pathlib import Path
from typing import cast

import pytest

from engine.networks import network, starts
from engine.ranks import TESTS
from headrace.engine.local.fork_server import ForkServer
from headrace.engine.network import probe
from headrace.engine.network.probe import Responder, bandwidth, connect, echo
from headrace.engine.network.survey import HostFacts, LinkFacts, Survey, directions, disjoint_rounds
from headrace.spec.cluster import Cluster, Host

TOKEN = b"t" * probe.TOKEN_BYTES
AHEAD_S = 5.0


@pytest.fixture
def responder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Responder]:
    for name in ("_COUNT_S", "_WARM_UP_S"):
        monkeypatch.setattr(probe, name, 0.02)
    with closing(Responder("127.0.0.1", TOKEN, lambda: time.time() + AHEAD_S)) as made:
        yield made


def test_latency_and_clock(responder: Responder) -> None:
    with connect("127.0.0.1", responder.port, TOKEN) as connection:
        begin = time.perf_counter()
        found = echo(connection)
        took = time.perf_counter() - begin
    assert 0 < found.latency_s < took
    # The fastest reply took no longer than all of them.
    assert found.ahead_s == pytest.approx(AHEAD_S, abs=took)


def test_latency_is_half_of_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0

    class Link:
        """Takes 2 ms in each direction; the clock of the other end is ahead."""

        def sendall(self, data: bytes) -> None:
            nonlocal now_s
            now_s += 0.002

        def recv_into(self, buffer: memoryview) -> int:
            nonlocal now_s
            buffer[:] = struct.pack("!d", now_s + AHEAD_S)
            now_s += 0.002
            return len(buffer)

    monkeypatch.setattr(probe.time, "perf_counter", lambda: now_s)
    found = echo(cast("socket.socket", Link()), lambda: now_s)
    assert found.latency_s == pytest.approx(0.002)
    assert found.ahead_s == pytest.approx(AHEAD_S)


def test_bandwidth(responder: Responder) -> None:
    found = bandwidth("127.0.0.1", responder.port, TOKEN, 0.0)
    assert 1e7 < found < 1e11


def test_a_client_without_the_token_gets_nothing(responder: Responder) -> None:
    with connect("127.0.0.1", responder.port, b"x" * probe.TOKEN_BYTES) as connection:
        connection.sendall(bytes(8))
        with pytest.raises((EOFError, ConnectionResetError)):
            probe._exactly(connection, 1)


def test_a_closed_responder_leaves_nothing(responder: Responder) -> None:
    connection = connect("127.0.0.1", responder.port, TOKEN)
    echo(connection)
    with closing(Responder("127.0.0.1", TOKEN)) as other:
        port = other.port
    with connection, pytest.raises(ConnectionRefusedError):
        connect("127.0.0.1", port, TOKEN)


@pytest.mark.parametrize("count", range(2, 9))
def test_each_pair_is_in_one_round_and_each_host_once_a_round(count: int) -> None:
    rounds = disjoint_rounds(count)
    assert sorted(tuple(sorted(pair)) for each in rounds for pair in each) == list(combinations(range(count), 2))
    for each in rounds:
        places = [place for pair in each for place in pair]
        assert len(set(places)) == len(places)


@pytest.mark.parametrize("pairs", range(1, 9))
def test_two_pairs_have_all_directions(pairs: int) -> None:
    found = directions(pairs)
    for a, b in combinations(range(pairs), 2):
        assert {(each[a], each[b]) for each in found} == {(x, y) for x in (True, False) for y in (True, False)}


def test_links_that_carry_less_together_are_shared() -> None:
    hosts = tuple(HostFacts(Host(name, 1, 1), {}, 1) for name in "abc")
    links = (
        LinkFacts("a", "b", (100.0,), together={"1": 50.0, "2": 99.0}),
        LinkFacts("b", "a", (100.0,), together={"1": 101.0, "2": 99.0}),
        LinkFacts("b", "c", (100.0,), together={"1": 97.0, "2": 60.0}),
        LinkFacts("c", "b", error="refused"),
    )
    found = Survey(hosts, links).cluster()
    assert [(link.source, link.target, link.bytes_per_s, link.shared) for link in found.links] == [
        ("a", "b", 99.5, "switch"),
        ("b", "a", 100.0, ""),
        ("b", "c", 100.0, "switch"),
    ]
    assert {link.shared for link in Survey(hosts, links[:2]).cluster().links} == {""}


def limit(device: str, rate: str, *inside: str) -> None:
    tbf = ("tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate", rate, "burst", "128kb", "latency", "100ms")
    subprocess.run([*inside, *tbf], check=True)


@contextmanager
def two_switches(rate: str) -> Iterator[str]:
    """Two hosts of 100 Mbit/s on each of two switches, and a link between these; the last host sends 20 Mbit/s."""
    with network(4, "--rate", "100mbit", kind="n") as name:
        second, *ends = (f"{name}{suffix}" for suffix in "xyz")
        subprocess.run(["ip", "link", "add", second, "type", "bridge"], check=True)
        try:
            subprocess.run(["ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1]], check=True)
            places = [(ends[0], name), (ends[1], second), (f"{name}-2", second), (f"{name}-3", second)]
            for device, bridge in places:
                subprocess.run(["ip", "link", "set", device, "master", bridge, "up"], check=True)
            subprocess.run(["ip", "link", "set", second, "up"], check=True)
            for end in ends:
                limit(end, rate)
            limit("eth0", "20mbit", "ip", "netns", "exec", f"{name}-3")
            yield name
        finally:
            subprocess.run(["ip", "link", "delete", ends[0]], check=False)
            subprocess.run(["ip", "link", "delete", second], check=True)


def doctor(fork_server: ForkServer, hosts: str, folder: Path, *on: int) -> tuple[list[str], Cluster]:
    """What `headrace doctor` says is wrong on these hosts, and the file that it writes."""
    ended = starts(fork_server, hosts, TESTS / "engine" / "doctor_script.py", folder)(on=on)
    assert set(ended.codes.values()) == {3}, ended.logs
    (document,) = ended.said[0]
    assert all("see what is wrong on host-0, where rank 0 is" in log for log in ended.logs[1:])
    wrong = [check["found"] for check in document["checks"] if check["verdict"] != "ok"]
    return wrong, Cluster.load(folder / "cluster.measured.toml")


@pytest.mark.slow
@pytest.mark.net
def test_a_slow_host_and_another_version_are_found(fork_server: ForkServer, tmp_path: Path) -> None:
    with network(3, "--rate", "100mbit", kind="n") as hosts:
        limit("eth0", "20mbit", "ip", "netns", "exec", f"{hosts}-2")
        (torch, slow), found = doctor(fork_server, hosts, tmp_path, 0, 1, 2)
    assert torch == "not the same on all hosts: host-1 has 1.0; the others have 2.0"
    assert slow.startswith("host-2 sends at most ")
    assert found.link("host-0", "host-1").bytes_per_s == pytest.approx(100e6 / 8, rel=0.1)
    assert found.link("host-2", "host-1").bytes_per_s == pytest.approx(20e6 / 8, rel=0.1)


@pytest.mark.slow
@pytest.mark.net
@pytest.mark.full
def test_a_switch_that_links_share_is_found(fork_server: ForkServer, tmp_path: Path) -> None:
    with two_switches("40mbit") as hosts:
        (_, slow, shared), found = doctor(fork_server, hosts, tmp_path, 0, 1, 2, 3)
    assert slow.startswith("host-3 sends at most ")
    assert shared.startswith("host-0 - host-2, host-0 - host-3, host-1 - host-2, host-1 - host-3 share a switch: ")
    near, far = found.link("host-0", "host-1"), found.link("host-1", "host-2")
    assert (near.shared, far.shared) == ("", "switch")
    assert (near.bytes_per_s, far.bytes_per_s) == pytest.approx((100e6 / 8, 40e6 / 8), rel=0.05)
