"""The way between hosts: who gets in, and what strangers and broken workers can do to others: nothing."""

from __future__ import annotations

import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from time import monotonic

import pytest
import torch
import zmq

from headrace.errors import UsageError
from headrace.transport import zeromq
from headrace.transport.base import ClientTransport, ReceivedMessage, Slots, TransportLayout
from headrace.transport.frames import PART_BYTES, FrameKind, control_frame, numbered
from headrace.transport.remote_client import RemoteClientTransport
from headrace.transport.remote_server import RemoteServerTransport
from headrace.transport.zeromq import Keys, is_loopback
from transport.test_ports import start
from transport.ways import DEADLINE_S, SECRET, join, mail_of, next_of, open_link, still_served

BIG = 3 << 20
SLOTS = Slots([8, BIG])
OTHER = b"the secret of some other run...."

Raw = Callable[[], "zmq.Socket[bytes]"]


@pytest.fixture
def port() -> Iterator[RemoteServerTransport]:
    port = RemoteServerTransport(SLOTS, SLOTS, secret=SECRET)
    yield port
    port.close()


@pytest.fixture
def link(port: RemoteServerTransport) -> Iterator[ClientTransport]:
    link = join(port, lambda: open_link("remote", port.address, SLOTS, SLOTS))
    yield link
    link.close()


@pytest.fixture
def raw(port: RemoteServerTransport) -> Iterator[Raw]:
    """Returns what makes a socket that holds the secret and keeps no rules."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made: list[zmq.Socket[bytes]] = []

    def make() -> zmq.Socket[bytes]:
        own = context.socket(zmq.DEALER)
        own.linger = 0
        own.reconnect_ivl = 24 * 3_600_000
        Keys(SECRET).protect_client(own)
        own.connect(port.address)
        made.append(own)
        return own

    yield make
    for own in made:
        own.close()
    context.term()


def hello() -> list[bytes | memoryview]:
    return control_frame(FrameKind.HELLO, TransportLayout(SLOTS, SLOTS).hello())


def greeted(port: RemoteServerTransport, raw: Raw) -> zmq.Socket[bytes]:
    """Returns a socket that the port takes for a link."""
    made = raw()
    made.send_multipart(hello())
    assert join(port, lambda: made.poll(int(1000 * DEADLINE_S)) and made.recv_multipart()) == control_frame(
        FrameKind.WELCOME
    )
    return made


def cut_off(port: RemoteServerTransport, lines: int) -> None:
    """Serves the port until so many connections are left."""
    deadline = monotonic() + DEADLINE_S
    while len(port._guard._connections) > lines:
        assert monotonic() < deadline
        port.receive(0.05)


def test_only_loopback_needs_no_secret_given() -> None:
    with pytest.raises(UsageError, match=r"tcp://0\.0\.0\.0:0 can be reached from other machines.*token_bytes"):
        RemoteServerTransport(SLOTS, SLOTS, address="tcp://0.0.0.0:0")
    ports = [RemoteServerTransport(SLOTS, SLOTS), RemoteServerTransport(SLOTS, SLOTS)]
    assert len({port.secret for port in ports}) == 2
    assert {len(port.secret) for port in ports} == {32}
    for port in ports:
        assert port.address.startswith("tcp://127.0.0.1:")
        port.close()
    everywhere = RemoteServerTransport(SLOTS, SLOTS, address="tcp://0.0.0.0:0", secret=SECRET)
    everywhere.close()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "tcp://127.3.2.1:80", "tcp://[::1]:0"])
def test_loopback_is_known(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize(
    "address", ["tcp://*:0", "tcp://localhost:0", "tcp://10.0.0.1:0", "tcp://[::]:0", "tcp://eth0:0"]
)
def test_what_may_not_be_loopback_is_not(address: str) -> None:
    assert not is_loopback(address)


def test_wrong_arguments_are_named(port: RemoteServerTransport) -> None:
    with pytest.raises(UsageError, match=r"has 5 bytes, which can be guessed.*token_bytes"):
        RemoteServerTransport(SLOTS, SLOTS, secret=b"12345")
    with pytest.raises(UsageError, match=r"cannot listen on tcp://127.0.0.1:\d+: Address already in use"):
        RemoteServerTransport(SLOTS, SLOTS, address=port.address)
    for address in ("local:x", "tcp://127.0.0.1", "tcp://127.0.0.1:port"):
        with pytest.raises(UsageError, match="is no address of a server"):
            RemoteClientTransport(address, SLOTS, SLOTS, secret=SECRET)


def test_a_link_with_another_secret_is_refused(port: RemoteServerTransport, link: ClientTransport) -> None:
    with pytest.raises(ConnectionError, match="another secret"):
        join(port, lambda: RemoteClientTransport(port.address, SLOTS, SLOTS, secret=OTHER))
    still_served(port, link)


def test_a_peer_that_knows_the_server_alone_is_refused(
    port: RemoteServerTransport, link: ClientTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the servers' public key, and a key pair of its own."""

    def present(keys: Keys, worker: zmq.Socket[bytes]) -> None:
        worker.curve_publickey, worker.curve_secretkey = zmq.curve_keypair()
        worker.curve_serverkey = keys._public[0]

    monkeypatch.setattr(Keys, "protect_client", present)
    with pytest.raises(ConnectionError, match="does not know this process's key"):
        join(port, lambda: RemoteClientTransport(port.address, SLOTS, SLOTS, secret=SECRET))
    still_served(port, link)


def test_a_peer_that_does_not_encrypt_is_refused(
    port: RemoteServerTransport, link: ClientTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Keys, "protect_client", lambda keys, worker: None)
    with pytest.raises(ConnectionError, match="no process of headrace"):
        join(port, lambda: RemoteClientTransport(port.address, SLOTS, SLOTS, secret=SECRET))
    still_served(port, link)


def test_a_link_speaks_to_no_other_server() -> None:
    """One that does not encrypt, and would take everybody."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = context.socket(zmq.ROUTER)
    number = server.bind_to_random_port("tcp://127.0.0.1")
    with pytest.raises(ConnectionError, match="no process of headrace"):
        RemoteClientTransport(f"tcp://127.0.0.1:{number}", SLOTS, SLOTS, secret=SECRET)
    server.close(0)
    context.term()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f", bytes(100_000)])
def test_a_peer_that_does_not_speak_zeromq_does_no_harm(
    port: RemoteServerTransport, link: ClientTransport, said: bytes
) -> None:
    host, _, number = port.address.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(number))) as stranger:
        stranger.sendall(said)
        still_served(port, link)
    still_served(port, link)


def entry(slot: int, start: int, version: int = 0) -> bytes:
    return slot.to_bytes(4, "little", signed=True) + start.to_bytes(8, "little") + version.to_bytes(8, "little")


def whole(
    *payloads: tuple[bytes, bytes], sort: int = FrameKind.LAST, message: bytes = b"m", number: int = 1
) -> list[bytes]:
    head = bytes([1, sort]) + len(payloads).to_bytes(2, "little") + number.to_bytes(4, "little")
    return [head + b"".join(place for place, _ in payloads), message, *(content for _, content in payloads)]


HOSTILE = {
    "one part": [b"x"],
    "empty parts": [b"", b""],
    "a head too short": [b"\1", b"m"],
    "another form": [b"\7\4\0\0\0\0\0\0", b"m"],
    "an unknown sort": [b"\1\x63\0\0\0\0\0\0", b"m"],
    "hello again": hello(),
    "welcome": control_frame(FrameKind.WELCOME),
    "no message": whole(message=b""),
    "a message too long": whole(message=bytes(60_001)),
    "payloads without parts": [b"\1\4\2\0\0\0\0\0" + entry(0, 0) * 2, b"m"],
    "parts without payloads": [b"\1\4\0\0\0\0\0\0", b"m", b"x"],
    "no such slot": whole((entry(2, 0), bytes(8))),
    "a slot below 0": whole((entry(-2, 0), bytes(8))),
    "too short": whole((entry(0, 0), bytes(7))),
    "too long": whole((entry(0, 0), bytes(9))),
    "empty": whole((entry(0, 0), b"")),
    "not from the start": whole((entry(0, 4), bytes(4))),
    "from the end of numbers": whole((entry(0, (1 << 63) - 1), bytes(4))),
    "twice": whole((entry(0, 0), bytes(8)), (entry(0, 0), bytes(8))),
    "a blob with a hole": whole((entry(-1, 5), bytes(8))),
    "a letter too many parts": [b"\1\4\xff\xff\0\0\0\0", b"m", *[b""] * 65_535],
    "a part with more than fits": [b"\1\4\0\0\0\0\0\0", bytes(2 << 20)],
}


@pytest.mark.parametrize("parts", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_worker_that_breaks_the_rules_harms_itself_alone(
    port: RemoteServerTransport, link: ClientTransport, raw: Raw, parts: list[bytes]
) -> None:
    broken = greeted(port, raw)
    broken.send_multipart(numbered(control_frame(FrameKind.PART), 1))
    broken.send_multipart(numbered(parts, 2) if len(parts[0]) >= 8 else parts)
    (end,) = mail_of(port, 1)
    assert end.message == b""
    still_served(port, link)


@pytest.mark.parametrize("number", [0, 2, (1 << 32) - 1])
def test_a_letter_out_of_its_turn_ends_the_link(
    port: RemoteServerTransport, link: ClientTransport, raw: Raw, number: int
) -> None:
    """One was lost, or came twice, though every one of them is genuine."""
    broken = greeted(port, raw)
    broken.send_multipart(whole(number=number))
    (end,) = mail_of(port, 1)
    assert end.message == b""
    still_served(port, link)


def test_a_link_that_misses_a_frame_ends(port: RemoteServerTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    link = join(port, lambda: open_link("remote", port.address, SLOTS, SLOTS))
    link.send(b"here")
    (mail,) = mail_of(port, 1)
    port._peers[mail.peer].sent += 1
    port.send(mail.peer, b"there")
    with pytest.raises(ConnectionError, match="frame 2 arrived instead of 1"):
        join(port, lambda: next_of(link))
    link.close()


@pytest.mark.parametrize(
    "parts", [[b"x"], control_frame(FrameKind.LAST, b"m"), control_frame(FrameKind.HELLO, b"headrace")]
)
def test_who_does_not_begin_with_its_layout_is_never_heard(
    port: RemoteServerTransport, link: ClientTransport, raw: Raw, parts: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Until all three are there.
    monkeypatch.setattr("headrace.transport.remote_server._FAREWELL_S", DEADLINE_S)
    for _ in range(3):
        raw().send_multipart(parts)
    deadline = monotonic() + DEADLINE_S
    while sum(peer.until is not None for peer in port._peers.values()) < 3:
        assert monotonic() < deadline
        assert port.receive(0.05) == []
    for peer in port._peers.values():
        peer.until = None if peer.until is None else monotonic()
    # It does not go by itself, so it is cut off.
    cut_off(port, 1)
    still_served(port, link)


def test_half_of_a_push_is_none(port: RemoteServerTransport, link: ClientTransport, raw: Raw) -> None:
    broken = greeted(port, raw)
    broken.send_multipart(whole((entry(1, 0), bytes(PART_BYTES)), sort=FrameKind.PART, message=b""))
    still_served(port, link)
    broken.close()
    assert [mail.message for mail in mail_of(port, 1)] == [b""]
    still_served(port, link)


def test_what_was_not_pushed_is_not_there(port: RemoteServerTransport, link: ClientTransport) -> None:
    link.push_slot(0).fill_(1)
    link.send(b"push", [0])
    (mail,) = mail_of(port, 1)
    assert port.pushed(mail.peer, 0).tolist() == [1] * 8
    with pytest.raises(ValueError, match="announced for slot 1 and has not been sent"):
        port.pushed(mail.peer, 1)
    port.release(mail.peer, [0, 1])
    with pytest.raises(ValueError, match="slot 0"):
        port.pushed(mail.peer, 0)


def test_an_update_does_not_change_what_is_on_its_way(port: RemoteServerTransport, link: ClientTransport) -> None:
    link.send(b"pull")
    (mail,) = mail_of(port, 1)
    place, seen = torch.empty(8, dtype=torch.uint8), []
    assert link.fetch(0, place) == -1
    for version in (1, 2):
        with port.writing([0]):
            port.parameters(0).fill_(version)
            port.set_version(0, version)
        port.send(mail.peer, b"pulled", [0])
    for _ in range(2):
        next_of(link)
        seen.append((link.fetch(0, place), place.tolist()))
    assert seen == [(1, [1] * 8), (2, [2] * 8)]
    assert link.fetch(0, place) == 2


def test_who_asks_and_does_not_read_is_cut_off(
    port: RemoteServerTransport, link: ClientTransport, raw: Raw, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.transport.base._UNREAD_BYTES", 1 << 20)
    broken = raw()
    broken.rcvhwm = 1
    broken.send_multipart(hello())
    broken.send_multipart(whole())
    (mail,) = mail_of(port, 1)
    peer = port._peers[mail.peer]
    for _ in range(100):
        port.send(mail.peer, b"answer", blob=bytes(1 << 18))
        port.send(mail.peer, b"answer", [0, 1])
        assert peer.owed <= 2 << 20
    assert mail_of(port, 1) == [ReceivedMessage(mail.peer, b"")]
    still_served(port, link)


@pytest.mark.slow
def test_rows_of_the_next_step_are_read_after_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.transport.base._UNREAD_BYTES", 1 << 20)
    # Of each answer most waits in the server.
    monkeypatch.setattr(zeromq, "_HIGH_WATER", 4)
    rows = bytes(24 << 20)
    port = RemoteServerTransport(SLOTS, SLOTS, secret=SECRET, rows_bytes=len(rows))
    link = join(port, lambda: open_link("remote", port.address, SLOTS, SLOTS))
    link.send(b"the rows of two tables, and again what this step has changed")
    (mail,) = mail_of(port, 1)
    for part in (rows[: len(rows) // 3], rows[len(rows) // 3 :], rows):
        port.send(mail.peer, b"rows", blob=part)
    assert port.receive(0.0) == []
    lengths = join(port, lambda: [len(next_of(link)[1]) for _ in range(3)])
    assert sum(lengths) == 2 * len(rows)
    link.close()
    port.close()


def test_a_flood_does_not_drown_others(port: RemoteServerTransport, link: ClientTransport, raw: Raw) -> None:
    stop = threading.Event()

    def flood() -> None:
        broken = raw()
        broken.send_multipart(hello())
        number = 0
        while not stop.is_set():
            if broken.poll(10, zmq.POLLOUT):
                number += 1
                broken.send_multipart(whole(message=b"flood", number=number), zmq.NOBLOCK)

    flooding = threading.Thread(target=flood)
    flooding.start()
    for number in range(20):
        link.send(b"%d" % number)
        deadline = monotonic() + DEADLINE_S
        heard = False
        while not heard:
            assert monotonic() < deadline
            mail = port.receive(0.1)
            assert len(mail) <= 32 * 3
            heard = b"%d" % number in [each.message for each in mail]
    stop.set()
    flooding.join()


@pytest.mark.slow
@pytest.mark.usefixtures("real_python")
def test_a_host_that_falls_silent_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zeromq, "_HEARTBEAT_MS", 200)
    monkeypatch.setattr(zeromq, "_TIMEOUT_MS", 1_000)
    small = Slots([8])
    port = RemoteServerTransport(small, small, secret=SECRET)
    process: subprocess.Popen[str]
    with start("link", "remote", port.address) as process:
        (mail,) = mail_of(port, 1)
        process.send_signal(signal.SIGSTOP)
        assert mail_of(port, 1) == [ReceivedMessage(mail.peer, b"")]
        process.kill()
    port.close()
