"""What a link is told that does not find what it looks for: one line, with both numbers, with who and for how long."""

from __future__ import annotations

import fcntl
import os
import select
import socket
from collections.abc import Iterator
from contextlib import closing
from time import monotonic

import pytest

from belongings import descriptors
from headrace.transport import base as seam
from headrace.transport import local_server as local_port
from headrace.transport.base import ServerTransport, Slots, TransportLayout
from headrace.transport.local_client import LocalClientTransport
from headrace.transport.local_server import LocalServerTransport
from headrace.transport.remote_client import RemoteClientTransport
from transport.test_local_port import caller
from transport.ways import DEADLINE_S, SECRET, WAYS, join, open_link, open_port, still_served

SLOTS = Slots([8])


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def port(way: str) -> Iterator[ServerTransport]:
    port = open_port(way, SLOTS, SLOTS)
    yield port
    port.close()


@pytest.fixture
def local() -> Iterator[LocalServerTransport]:
    port = LocalServerTransport(SLOTS, SLOTS)
    yield port
    port.close()


@pytest.mark.parametrize("theirs", [0, 2, (1 << 32) - 1])
def test_another_protocol_is_named_with_both_numbers(
    port: ServerTransport, way: str, theirs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hello = TransportLayout(SLOTS, SLOTS).hello()
    other = hello[:8] + theirs.to_bytes(4, "little") + hello[12:]
    monkeypatch.setattr(TransportLayout, "hello", lambda layout: other)
    expected = f"the server speaks protocol {seam.PROTOCOL} and the worker {theirs}; install the same headrace on both"
    with pytest.raises(ConnectionError, match=expected) as caught:
        join(port, lambda: open_link(way, port.address, SLOTS, SLOTS))
    assert "\n" not in str(caught.value)
    assert port.address in str(caught.value)
    monkeypatch.undo()
    with closing(join(port, lambda: open_link(way, port.address, SLOTS, SLOTS))) as link:
        still_served(port, link)


def test_a_hello_of_a_longer_protocol_is_still_named(
    port: ServerTransport, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a later one adds comes behind its number."""
    monkeypatch.setattr(TransportLayout, "hello", lambda layout: b"headrace" + (9).to_bytes(4, "little") + bytes(500))
    with pytest.raises(ConnectionError, match="protocol 1 and the worker 9"):
        join(port, lambda: open_link(way, port.address, SLOTS, SLOTS))


def test_an_address_of_this_host_that_does_not_answer_is_named() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as silent:
        silent.bind("\0headrace-silent")
        silent.listen()
        with pytest.raises(ConnectionError, match=r"server at local:headrace-silent: no answer for 0\.2 s"):
            LocalClientTransport("local:headrace-silent", SLOTS, SLOTS, hello_s=0.2)
    with pytest.raises(ConnectionError, match=r"server at local:headrace-silent: .*refused"):
        LocalClientTransport("local:headrace-silent", SLOTS, SLOTS)


def test_an_address_of_the_network_that_does_not_answer_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConnectionError, match=rf"no link to the server at {address}: no answer for 0\.[2-9]\d* s"):
            RemoteClientTransport(address, SLOTS, SLOTS, secret=SECRET, hello_s=0.2)
    with pytest.raises(ConnectionError, match=rf"no link to the server at {address}: no process listens there"):
        RemoteClientTransport(address, SLOTS, SLOTS, secret=SECRET)


def test_of_many_of_this_host_who_say_nothing_the_oldest_go(
    local: LocalServerTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_port, "_HALF_OPEN", 3)
    link = join(local, lambda: open_link("local", local.address, SLOTS, SLOTS))
    strangers = [caller(local) for _ in range(10)]
    for _ in range(3):
        assert local.receive(0.02) == []
    for each in strangers[:7]:
        assert each.recv(10) == b""
    assert len(local._half_open) == 3
    still_served(local, link)
    link.close()
    for each in strangers:
        each.close()


def test_who_never_says_hello_on_this_host_is_shown_out(
    local: LocalServerTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_port, "_HELLO_S", 0.1)
    with caller(local) as stranger:
        deadline = monotonic() + DEADLINE_S
        while local.receive(0.02) == [] and not local._half_open:
            assert monotonic() < deadline
        while local._half_open:
            assert monotonic() < deadline
            assert local.receive(0.02) == []
        assert stranger.recv(10) == b""


def test_more_links_of_this_host_than_there_may_be_are_refused(
    local: LocalServerTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = join(local, lambda: open_link("local", local.address, SLOTS, SLOTS))
    monkeypatch.setattr(local_port, "_MOST_CLIENTS", 1)
    with pytest.raises(ConnectionError, match="has 1 links already, which is the most"):
        join(local, lambda: open_link("local", local.address, SLOTS, SLOTS))
    still_served(local, link)
    link.close()


@pytest.mark.parametrize("sort", ["pipe", "file", "folder", "long", "socket"])
@pytest.mark.parametrize("greeted", [False, True])
def test_what_is_no_memory_is_not_taken_for_it(local: LocalServerTransport, sort: str, greeted: bool) -> None:
    """And its descriptor is not kept."""
    link = join(local, lambda: open_link("local", local.address, SLOTS, SLOTS))
    with caller(local) as stranger:
        if greeted:
            good = os.memfd_create("good", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(good, SLOTS.nbytes)
            fcntl.fcntl(good, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            socket.send_fds(stranger, [TransportLayout(SLOTS, SLOTS).hello()], [good])
            os.close(good)
            assert join(local, lambda: stranger.recv(1 << 16))
        before = descriptors()
        opened = {
            "pipe": lambda: os.pipe()[0],
            "file": lambda: os.open(__file__, os.O_RDONLY),
            "folder": lambda: os.open("/", os.O_RDONLY),
            "long": lambda: _long_memory(local._layout.blob_bytes + 1),
            "socket": lambda: socket.socket().detach(),
        }[sort]()
        socket.send_fds(stranger, [b"blob" if greeted else TransportLayout(SLOTS, SLOTS).hello()], [opened])
        os.close(opened)
        heard: list[bytes] = []
        deadline = monotonic() + DEADLINE_S
        # Until it is shown out, and what it has sent is closed; a pipe's other end is the test's.
        while not select.select([stranger], [], [], 0)[0] or len(descriptors() - before) > (sort == "pipe"):
            assert monotonic() < deadline
            heard += [mail.message for mail in local.receive(0.02)]
        assert heard == ([b""] if greeted else [])
    still_served(local, link)
    link.close()


def _long_memory(length: int) -> int:
    made = os.memfd_create("long", os.MFD_CLOEXEC)
    os.ftruncate(made, length)
    return made
