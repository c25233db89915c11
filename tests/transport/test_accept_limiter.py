"""A limiter in front of a socket that listens."""

from __future__ import annotations

import socket
from time import monotonic, sleep

import pytest

from headrace.transport.connections import AcceptLimiter

DEADLINE_S = 60.0


@pytest.mark.slow
@pytest.mark.parametrize(("family", "where"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_too_many_wait_outside_and_who_is_in_notices_nothing(family: socket.AddressFamily, where: str) -> None:
    with socket.create_server((where, 0), family=family, backlog=100) as listener:
        address = listener.getsockname()
        limiter = AcceptLimiter(listener.fileno(), a_second=20.0, at_once=10.0)
        inside = []
        for _ in range(11):
            inside.append((socket.create_connection(address[:2], timeout=DEADLINE_S), listener.accept()[0]))
            limiter.count()
        limiter.update()
        assert limiter.closed
        with pytest.raises(TimeoutError):
            socket.create_connection(address[:2], timeout=0.1)
        for ours, theirs in inside:
            ours.sendall(b"here")
            assert theirs.recv(4) == b"here"
        deadline = monotonic() + DEADLINE_S
        while limiter.closed:
            assert monotonic() < deadline
            sleep(0.01)
            limiter.update()
        with socket.create_connection(address[:2], timeout=DEADLINE_S):
            listener.accept()[0].close()
        for pair in inside:
            for each in pair:
                each.close()


def test_as_many_as_may_come_come() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        limiter = AcceptLimiter(listener.fileno(), a_second=1.0, at_once=10.0)
        for _ in range(10):
            limiter.count()
        limiter.update()
        assert not limiter.closed
        limiter.count()
        limiter.update()
        assert limiter.closed
