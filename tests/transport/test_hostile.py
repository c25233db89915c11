"""No attacker gets in: what strangers send, or is changed on the way, is never taken for a link's."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from time import monotonic

import pytest
import zmq

from headrace.transport import connections
from headrace.transport import remote_server as remote_port
from headrace.transport.connections import Connection, wire_bytes
from headrace.transport.frames import FrameKind
from headrace.transport.remote_server import RemoteServerTransport
from transport.hostile import ATTACKS, NOTHING, SLOTS, Attacker, record
from transport.outside import STRANGERS, Strangers, greeting
from transport.test_remote_port import greeted, hello, link, port, raw, whole
from transport.ways import DEADLINE_S, SECRET, mail_of, still_served

__all__ = ["link", "port", "raw"]

TRIALS = 12
HANDSHAKE_S = 20.0
"""What is ended sooner is not ended by ZeroMQ, which gives a handshake 30 s."""


@pytest.fixture(scope="module")
def small() -> Iterator[RemoteServerTransport]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remote_port, "_FAREWELL_S", 0.05)
        port = RemoteServerTransport(SLOTS, SLOTS, secret=SECRET)
        yield port
        port.close()


@pytest.fixture(scope="module")
def strange() -> list[bytes]:
    return record(b"the secret of some other run....")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [NOTHING, *ATTACKS])
def test_what_is_changed_on_its_way_is_not_heard(small: RemoteServerTransport, strange: list[bytes], kind: str) -> None:
    attacker = Attacker(small, strange, random.Random(kind))
    wrong = [attacker.attack(kind) for _ in range(TRIALS)]
    attacker.close()
    assert [each for each in wrong if each] == []


@pytest.mark.each_value
@pytest.mark.slow
@pytest.mark.parametrize("kind", STRANGERS)
def test_strangers_are_not_heard(small: RemoteServerTransport, strange: list[bytes], kind: str) -> None:
    strangers = Strangers(small, record(SECRET), strange, random.Random(kind))
    assert strangers.attack(kind) == []


def until(port: RemoteServerTransport, count: int) -> list[Connection]:
    """Serves the port until so many lines are left; returns them."""
    deadline = monotonic() + DEADLINE_S
    while len(lines := list(port._guard._connections.values())) > count:
        assert monotonic() < deadline, f"{len(lines)} lines are left"
        assert port.receive(0.02) == []
    return lines


def call(port: RemoteServerTransport, said: bytes = b"") -> socket.socket:
    host, _, number = port.address.removeprefix("tcp://").rpartition(":")
    made = socket.create_connection((host, int(number)))
    made.sendall(said)
    return made


def test_of_many_who_say_nothing_the_oldest_go(
    port: RemoteServerTransport, link: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_HALF_OPEN", 3)
    monkeypatch.setattr(connections, "_HELLO_S", 3600.0)
    began = monotonic()
    strangers = [call(port, greeting()[:20]) for _ in range(10)]
    until(port, 4)
    for each in strangers[:6]:
        each.settimeout(HANDSHAKE_S)
        while each.recv(100):
            continue
    assert monotonic() - began < HANDSHAKE_S
    still_served(port, link)  # type: ignore[arg-type]
    for each in strangers:
        each.close()


def test_strangers_are_seen_while_none_serves(port: RemoteServerTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the middle of a long step, and before the first link."""
    monkeypatch.setattr(connections, "_HALF_OPEN", 3)
    strangers = [call(port) for _ in range(10)]
    for each in strangers[:7]:
        each.settimeout(HANDSHAKE_S)
        while each.recv(100):
            continue
    for each in strangers:
        each.close()


def test_who_never_says_hello_is_shown_out(
    port: RemoteServerTransport, link: object, raw: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = [call(port), call(port, greeting()), raw()]  # type: ignore[operator]
    deadline = monotonic() + DEADLINE_S
    while len(port._guard._connections) < 1 + len(silent):
        assert monotonic() < deadline
        assert port.receive(0.02) == []
    monkeypatch.setattr(connections, "_HELLO_S", 0.2)
    until(port, 1)
    still_served(port, link)  # type: ignore[arg-type]
    for each in silent:
        each.close()


def test_who_says_too_much_before_hello_is_shown_out(
    port: RemoteServerTransport, link: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "_HELLO_S", 3600.0)
    with call(port, greeting() + b"\4\xff") as stranger, call(port, greeting()) as other:
        # The head of a frame of 128 kB, which is allowed, and a part of it, which is not.
        other.sendall(b"\2" + (1 << 17).to_bytes(8, "big") + bytes(1 << 16))
        other.settimeout(HANDSHAKE_S)
        while other.recv(100):
            continue
        stranger.settimeout(0.01)
        still_served(port, link)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [1 << 17, 1 << 20, 1 << 62])
def test_a_frame_of_a_stranger_is_no_longer_than_a_part(port: RemoteServerTransport, link: object, length: int) -> None:
    with call(port, greeting() + b"\6" + (length + 2048).to_bytes(8, "big")) as stranger:
        stranger.settimeout(DEADLINE_S)
        while stranger.recv(100):
            continue
    still_served(port, link)  # type: ignore[arg-type]


def test_a_message_that_hardly_ends_is_cut_off(
    port: RemoteServerTransport, link: object, raw: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a peer that holds the secret: ZeroMQ keeps all of it until it ends, and reports nothing."""
    brought: list[int] = []
    look = connections._sent_bytes

    def looking(descriptor: int) -> int:
        brought.append(look(descriptor))
        return brought[-1]

    monkeypatch.setattr(connections, "_AHEAD_BYTES", 1 << 22)
    monkeypatch.setattr(connections, "_sent_bytes", looking)
    broken = greeted(port, raw)  # type: ignore[arg-type]
    part, count = bytes(1 << 17), 4096
    for each in whole(number=1):
        broken.send(each, zmq.SNDMORE)
    for index in range(count):
        broken.send(part, zmq.SNDMORE if index < count - 1 else 0, copy=False)
    assert [mail.message for mail in mail_of(port, 1)] == [b""]
    assert 1 << 22 < max(brought) < count * len(part) // 2
    still_served(port, link)  # type: ignore[arg-type]


def test_a_letter_of_too_many_parts_is_not_kept(port: RemoteServerTransport, link: object, raw: object) -> None:
    broken = greeted(port, raw)  # type: ignore[arg-type]
    broken.send_multipart([*whole(number=1), *[b"x"] * 100_000])
    assert [mail.message for mail in mail_of(port, 1)] == [b""]
    still_served(port, link)  # type: ignore[arg-type]


def test_what_a_connection_has_sent_is_counted_to_the_byte(port: RemoteServerTransport, raw: object) -> None:
    """Or links that live for long would be cut off at last."""
    made = greeted(port, raw)  # type: ignore[arg-type]
    (line,) = port._guard._connections.values()
    before = connections._sent_bytes(line.descriptor) - line.taken
    for number in range(1, 200):
        made.send_multipart(whole(message=bytes(3 * number), number=number))
    mail_of(port, 199)
    assert connections._sent_bytes(line.descriptor) - line.taken == before
    assert before < connections._HELLO_BYTES


@pytest.mark.parametrize("length", [0, 1, 222, 223, 100_000])
def test_the_length_of_a_frame_on_the_wire_is_known(port: RemoteServerTransport, raw: object, length: int) -> None:
    assert wire_bytes(length) == length + 33 + (2 if length + 33 < 256 else 9)


def test_more_links_than_there_may_be_are_refused(
    port: RemoteServerTransport, link: object, raw: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_port, "_MOST_CLIENTS", 1)
    other = raw()  # type: ignore[operator]
    other.send_multipart(hello())
    deadline = monotonic() + DEADLINE_S
    while not other.poll(1):
        assert monotonic() < deadline
        port.receive(0.01)
    head, why = other.recv_multipart()
    assert head[1] == FrameKind.FAREWELL
    assert why == b"the server has 1 links already, which is the most"
    still_served(port, link)  # type: ignore[arg-type]
