"""The way on one host: what only it has."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator

import pytest
from torch import Tensor

from headrace.shared_memory.segment import SharedSegment, memory_file, set_length
from headrace.transport import local_client
from headrace.transport.base import ClientTransport, ReceivedMessage, Slots, TransportLayout
from headrace.transport.local_client import LocalClientTransport
from headrace.transport.local_server import LocalServerTransport
from transport.ways import join, mail_of, next_of, open_link, still_served

SLOTS = Slots([8])


@pytest.fixture
def port() -> Iterator[LocalServerTransport]:
    port = LocalServerTransport(SLOTS, SLOTS)
    yield port
    port.close()


@pytest.fixture
def link(port: LocalServerTransport) -> Iterator[ClientTransport]:
    link = join(port, lambda: open_link("local", port.address, SLOTS, SLOTS))
    yield link
    link.close()


def caller(port: LocalServerTransport) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(30)
    made.connect("\0" + port.address.removeprefix("local:"))
    return made


def test_another_users_server_is_refused(port: LocalServerTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    with pytest.raises(ConnectionError, match="belongs to another user"):
        LocalClientTransport(port.address, SLOTS, SLOTS)


def test_another_users_worker_is_refused(
    port: LocalServerTransport, link: ClientTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = os.getuid()
    with caller(port) as stranger:
        monkeypatch.setattr(os, "getuid", lambda: own + 1)
        assert port.receive(5) == []
        assert stranger.recv(100) == b""
    still_served(port, link)


@pytest.mark.parametrize("said", [b"x", TransportLayout(SLOTS, SLOTS).hello(), bytes(70_000)])
def test_a_peer_without_memory_does_no_harm(port: LocalServerTransport, link: ClientTransport, said: bytes) -> None:
    with caller(port) as stranger:
        stranger.send(said)
        for _ in range(3):
            assert port.receive(0.05) == []
        assert stranger.recv(1000)[:1] in (b"", b"\1")
    still_served(port, link)


def test_memory_that_may_shrink_is_refused(port: LocalServerTransport, link: ClientTransport) -> None:
    memory = os.memfd_create("shrinks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(memory, SLOTS.nbytes)
    with caller(port) as stranger:
        socket.send_fds(stranger, [TransportLayout(SLOTS, SLOTS).hello()], [memory])
        for _ in range(3):
            assert port.receive(0.05) == []
        assert b"for good" in stranger.recv(1000)
    os.close(memory)
    still_served(port, link)


class Restless:
    """A place that parameters are copied to, while the server writes others, a million times."""

    def __init__(self, port: LocalServerTransport) -> None:
        self.copies = 0
        self._port = port

    def copy_(self, source: Tensor) -> None:
        self.copies += 1
        with self._port.writing([0]):
            self._port.set_version(0, min(self.copies, 1_000_000))


def test_a_copy_of_parameters_that_are_always_written_to_has_an_end(
    port: LocalServerTransport, link: ClientTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_client, "_WRITTEN_S", 0.05)
    place = Restless(port)
    with pytest.raises(ConnectionAbortedError, match="shard 0 has been written to for 0 s"):
        link.fetch(0, place)  # type: ignore[arg-type]
    assert place.copies > 1


def test_who_asks_and_does_not_read_is_cut_off(
    port: LocalServerTransport, link: ClientTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.transport.base._UNREAD_BYTES", 100_000)
    other = join(port, lambda: open_link("local", port.address, SLOTS, SLOTS))
    other.send(b"ask")
    (mail,) = mail_of(port, 1)
    for _ in range(1_000):
        port.send(mail.peer, bytes(1_000))
    assert mail_of(port, 1) == [ReceivedMessage(mail.peer, b"")]
    still_served(port, link)
    other.close()


def test_a_servers_state_of_more_than_4_gib_comes_to_its_backup(
    port: LocalServerTransport, link: ClientTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbytes = (1 << 32) + 4096
    descriptor = memory_file("state")
    set_length(descriptor, nbytes, "state")
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    state = SharedSegment(descriptor, nbytes, populate=False)
    # Nothing of it is in memory but what is read here.
    sparse = classmethod(lambda cls, descriptor, nbytes: cls(descriptor, nbytes, populate=False))
    monkeypatch.setattr(SharedSegment, "received", sparse)
    state.memory[-1] = 7
    link.send(b"fill me")
    (mail,) = mail_of(port, 1)
    port.send(mail.peer, b"all of it", blob=state)
    state.close()
    message, blob = next_of(link)
    assert (message, len(blob), blob[-1]) == (b"all of it", nbytes, 7)
