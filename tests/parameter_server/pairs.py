"""Servers with backups, each in a thread of its own, for tests of how mail becomes the log."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any

from headrace.parameter_server.replication.log import pushed_by
from headrace.parameter_server.replication.machine import View
from headrace.parameter_server.replication.transport import ReplicatedTransport
from headrace.parameter_server.wire import Kind
from headrace.shared_memory.segment import SharedSegment
from headrace.transport.base import ReceivedMessage, ServerTransport, Slots
from transport.ways import DEADLINE_S, open_link, open_port


def until(true: Callable[[], object], what: str) -> None:
    """Waits until something is true."""
    deadline = monotonic() + DEADLINE_S
    while not true():
        assert monotonic() < deadline, what
        sleep(0.002)


def digest(content: Any) -> str:
    """Returns what tells bytes from others."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


class Scribe:
    """A server that writes down all that it gets, and answers with how much that is.

    Args:
        port: of its bytes.
        hold: is called before it loads what it is filled with.
        copies: is called before it copies its state.

    Attributes:
        book: link, message, blob, and what was pushed.
    """

    def __init__(
        self, port: ServerTransport, hold: Callable[[], object] = bool, copies: Callable[[], object] = bool
    ) -> None:
        self.port = port
        self._hold, self._copies = hold, copies
        self.book: list[tuple[int, str, str, list[str]]] = []

    def turn(self, timeout_s: float) -> None:
        for mail in self.port.receive(timeout_s):
            self.deal(mail)

    def deal(self, mail: ReceivedMessage) -> None:
        pushed = [digest(self.port.pushed(mail.peer, slot).numpy()) for slot in pushed_by(mail.message)]
        if mail.message[1:2] == bytes([Kind.LOST]):
            # As a server ends a connection whose worker has another one.
            self.port.drop(mail.peer)
        self.book.append((mail.peer, mail.message.hex(), digest(mail.blob), pushed))
        self.port.send(mail.peer, str(len(self.book)).encode())

    def share(self) -> SharedSegment:
        self._copies()
        content = json.dumps(self.book).encode()
        segment = SharedSegment.create(len(content), "book")
        segment.memory[:] = content
        return segment

    def restore(self, snapshot: memoryview) -> None:
        self._hold()
        self.book = [tuple(entry) for entry in json.loads(bytes(snapshot))]


class Runner:
    """A server with its pairing, in a thread; `slots` are those of parameters, pushes and replies."""

    def __init__(
        self,
        way: str,
        number: int,
        slots: Sequence[Slots | None],
        make: Callable[[ReplicatedTransport], Any],
        group: Group,
    ) -> None:
        self.error: BaseException | None = None
        parameters, pushes, replies = slots
        assert parameters is not None
        assert pushes is not None

        def connect(address: str) -> Any:
            return open_link(way, address, parameters, Slots(()), replies)

        self.replicated = ReplicatedTransport(
            open_port(way, parameters, pushes, replies), pushes, replies, number, connect, grace_s=0.2
        )
        self.address = self.replicated.transport.address
        self.server = make(self.replicated)
        self.replicated.attach(self.server.share, self.server.restore)
        self._group = group
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self.server.turn(0.05)
                view = self._group.view
                if view is not None:
                    self.replicated.view(view, self._group.runners[view.primary].address)
        except BaseException as error:
            self.error = error
        finally:
            self.replicated.transport.close()

    def end(self) -> None:
        """Ends as a process does that is killed: without a word."""
        self._stop.set()
        self._thread.join()


class Group:
    """All processes of one server."""

    def __init__(self, way: str, slots: Sequence[Slots | None], make: Callable[[ReplicatedTransport], Any]) -> None:
        self.view: View | None = None
        self.runners: list[Runner] = []
        self._new = lambda: Runner(way, len(self.runners), slots, make, self)

    def spawn(self) -> Runner:
        """Starts another process."""
        self.runners.append(self._new())
        return self.runners[-1]

    def see(self, epoch: int, primary: int, backup: int | None = None) -> None:
        """Decides a view, and waits until its primary has heard of it and its backup can be promoted."""
        self.view = View(epoch, primary, backup)
        leader = self.runners[primary].replicated
        until(lambda: leader.leads and (backup is None or leader.ready == epoch), f"{self.view} came about")

    @contextmanager
    def running(self) -> Iterator[Group]:
        """Ends all, and raises what any raised."""
        try:
            yield self
        finally:
            for runner in self.runners:
                runner.end()
        for runner in self.runners:
            if runner.error is not None:
                raise runner.error
