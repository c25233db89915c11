"""Both transports behind one face, for tests that hold for either."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

import torch

from headrace.transport.base import ClientTransport, ReceivedMessage, ServerTransport, Slots
from headrace.transport.local_client import LocalClientTransport
from headrace.transport.local_server import LocalServerTransport
from headrace.transport.mixed_server import MixedServerTransport
from headrace.transport.remote_client import RemoteClientTransport
from headrace.transport.remote_server import RemoteServerTransport

T = TypeVar("T")

SECRET = b"what a test may know of secrets."
WAYS = ("local", "remote")
PORTS = (*WAYS, "mixed local", "mixed remote")
DEADLINE_S = 60.0


def open_port(way: str, *slots: Slots | None) -> ServerTransport:
    """Opens a port for parameters, pushes and replies."""
    if way == "local":
        return LocalServerTransport(*slots)
    if way == "remote":
        return RemoteServerTransport(*slots, secret=SECRET)
    local = LocalServerTransport(*slots)
    mixed = MixedServerTransport(local, RemoteServerTransport(*slots, secret=SECRET, region=local.region))
    # For clients of one kind or the other.
    mixed.address = mixed.address.split()[way == "mixed remote"]
    return mixed


def open_link(way: str, address: str, *slots: Slots | None) -> ClientTransport:
    """Opens a link while another thread serves the port."""
    return (
        LocalClientTransport(address, *slots)
        if way.endswith("local")
        else RemoteClientTransport(address, *slots, secret=SECRET)
    )


def join(port: ServerTransport, act: Callable[[], T]) -> T:
    """Returns what `act` returns, in another thread, while this one serves the port; no mail may come meanwhile."""
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(act())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    while thread.is_alive():
        assert port.receive(0.01) == []
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def mail_of(port: ServerTransport, count: int) -> list[ReceivedMessage]:
    """Returns the next `count` pieces of mail."""
    mail: list[ReceivedMessage] = []
    deadline = monotonic() + DEADLINE_S
    while len(mail) < count:
        assert monotonic() < deadline, f"{len(mail)} of {count} came"
        mail += port.receive(0.1)
    assert len(mail) == count
    return mail


def next_of(link: ClientTransport) -> tuple[bytes, memoryview]:
    """Returns a link's next message and blob."""
    received = link.receive(DEADLINE_S)
    assert received is not None
    return received


def still_served(port: ServerTransport, link: ClientTransport) -> None:
    """Checks that a link and its port hear each other, and the port no other link."""
    link.send(b"here")
    (mail,) = mail_of(port, 1)
    assert mail.message == b"here"
    port.send(mail.peer, b"there")
    assert join(port, lambda: next_of(link))[0] == b"there"


def filled(length: int, seed: int) -> torch.Tensor:
    """Returns `(length,)` uint8 of noise."""
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
