"""Short messages of a run's processes: each that listens takes those of all that have the run's secret, encrypted.

who sends   DEALER ── CURVE ──► ROUTER   who listens, and may answer
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence

import zmq

from headrace.transport.connections import Connection, ConnectionGuard, wire_bytes
from headrace.transport.zeromq import Keys, listen, make_socket, waits

_NAMED = 16
"""Addresses of strangers that are named; more would fill the console."""


def tell_stranger(peer: str) -> None:
    """Says that a process at an address was refused; "" for one that had gone before its address was read."""
    sys.stderr.write(
        f"headrace: a process at {peer or 'an address that was gone too soon'} wanted to join the run without its "
        "secret; it was refused, and the run goes on. If that is one of its hosts, the secret there is another\n"
    )


class MessageListener:
    """Listens at "tcp://host:port", port 0 for any that is free; it belongs to one thread.

    `tell` is called once for each address from which a process has connected that has not authenticated itself, see
    `tell_stranger`. Raises UsageError if it cannot listen there.

    Attributes:
        address: where it listens.
        socket, guard: what receives and sends, and what lets others in.
        context: for connections to others.
        watched: readable where a message has come, or a connection has ended.
    """

    def __init__(self, address: str, keys: Keys, tell: Callable[[str], None] = tell_stranger) -> None:
        self._tell = tell
        self._strangers: set[str] = set()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = make_socket(self.context, zmq.ROUTER)
        self.guard = ConnectionGuard(self.socket, keys)
        self.watched = (self.socket, self.guard.ended_fd)
        try:
            self.address = listen(self.socket, address)
        except BaseException:
            self.close()
            raise

    def messages(self) -> Iterator[tuple[Connection | None, bytes, list[bytes]]]:
        """Yields what has come: the connection, None for one that has ended meanwhile, the sender, and the parts."""
        while waits(self.socket):
            sender, *frames = self.socket.recv_multipart(copy=False)
            connection = self.guard.find(int(frames[-1].get(zmq.SRCFD)))
            if connection is not None:
                self.guard.greet(connection)
                connection.taken += sum(wire_bytes(len(frame)) for frame in frames)
            yield connection, sender.bytes, [frame.bytes for frame in frames]

    def refuse(self, connection: Connection | None) -> None:
        """Ends the connection by which a wrong message has come, and nothing else."""
        if connection is not None:
            self.guard.disconnect(connection)

    def ended(self) -> list[Connection]:
        """Returns the connections that have ended; called when all messages were taken, which are from before."""
        ended = self.guard.take_ended()
        for connection in ended:
            peer = connection.peer
            if not connection.greeted and peer not in self._strangers and len(self._strangers) < _NAMED:
                self._strangers.add(peer)
                self._tell(peer)
        self.guard.disconnect_silent()
        return ended

    def answer(self, sender: bytes, parts: Sequence[bytes]) -> None:
        """Sends a message to who has sent one."""
        # Without `router_mandatory` ZeroMQ drops what is for one that has gone.
        self.socket.send_multipart([sender, *parts])

    def close(self, linger_ms: int = 0) -> None:
        """Ends all connections; what has not left yet may do so for so long."""
        self.guard.close(linger_ms)
        self.context.term()
