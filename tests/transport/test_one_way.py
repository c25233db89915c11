"""A connection in one direction: the one who has the key is heard, a stranger is not, with and without encryption."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import zmq

from headrace.errors import UsageError
from headrace.transport.one_way import Limits, PullEnd, PushEnd
from headrace.transport.zeromq import connect, make_socket

SECRET_TEXT = b"a gradient that no other process may read"


def check(came: Callable[[], bool], broken: str) -> None:
    assert not broken, broken


@pytest.mark.parametrize("encrypt", [True, False])
def test_the_one_with_the_key_is_heard_and_a_stranger_is_not(encrypt: bool) -> None:
    limits = Limits(4)
    with zmq.Context() as context, make_socket(context, zmq.PUSH) as stranger, ThreadPoolExecutor(1) as pool:
        pull = PullEnd(context, limits, check, "127.0.0.1", encrypt)
        connect(stranger, pull.address)
        for frames in ([b""], [b"token " + b"0" * 64], [b"of a", b"stranger"]):
            stranger.send_multipart(frames)
        met = pool.submit(pull.meet)
        push = PushEnd(context, limits, check, pull.address, pull.key)
        push.meet()
        met.result(20.0)
        push.send([SECRET_TEXT])
        with suppress(zmq.Again):
            # Where its connection has been ended already, it would wait for another.
            stranger.send(b"more of a stranger", zmq.NOBLOCK)
        assert [bytes(frame) for frame in pull.receive()] == [SECRET_TEXT]
        push.send([b"second"])
        assert [bytes(frame) for frame in pull.receive()] == [b"second"]
        push.close()
        pull.close()


def test_an_end_that_cannot_be_made_leaves_no_socket_behind() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    # The traceback of an error keeps what was being made.
    with pytest.raises(UsageError, match=r"cannot listen on tcp://203.0.113.1:0") as _pull:
        PullEnd(context, Limits(4), check, "203.0.113.1")
    with pytest.raises(UsageError, match="'nowhere' is no address of a server") as _push:
        PushEnd(context, Limits(4), check, "nowhere", b"token 1")
    ending = threading.Thread(target=context.term, daemon=True)
    ending.start()
    ending.join(20.0)
    assert not ending.is_alive()


@pytest.mark.parametrize("encrypt", [True, False])
def test_who_listens_reads_only_what_is_not_encrypted(encrypt: bool) -> None:
    with zmq.Context() as context, socket.create_server(("127.0.0.1", 0)) as proxy, ThreadPoolExecutor(3) as pool:
        pull = PullEnd(context, Limits(4), check, "127.0.0.1", encrypt)
        seen = bytearray()

        def forward() -> None:
            inner = socket.create_connection(("127.0.0.1", int(pull.address.rpartition(":")[2])))
            outer, _ = proxy.accept()
            back = pool.submit(copy, inner, outer, bytearray())
            copy(outer, inner, seen)
            inner.shutdown(socket.SHUT_WR)
            back.result(20.0)
            inner.close()
            outer.close()

        forwarded = pool.submit(forward)
        push = PushEnd(context, Limits(4), check, f"tcp://127.0.0.1:{proxy.getsockname()[1]}", pull.key)
        met = pool.submit(pull.meet)
        push.meet()
        met.result(20.0)
        push.send([SECRET_TEXT])
        assert [bytes(frame) for frame in pull.receive()] == [SECRET_TEXT]
        push.close()
        pull.close()
        forwarded.result(20.0)
    assert (SECRET_TEXT in seen) is not encrypt


def copy(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
    while content := source.recv(1 << 16):
        kept += content
        target.sendall(content)
