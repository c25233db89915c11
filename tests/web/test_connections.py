"""Connections of HTTP: what a client can make a server hold before a request is whole, and after it was answered."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from headrace.export.signature import Signature, TensorForm
from headrace.serving.application import PredictionServer
from headrace.serving.settings import ServeSettings
from headrace.web import connections
from headrace.web.server import AnnouncedServer, server_config
from serving.folders import scaled, written

ASKED = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
PREDICT = b"POST /v1/models/m:predict HTTP/1.1\r\nHost: localhost\r\n"
LIVE = b'{"live":true}'


@contextmanager
def server(folder: Path, **settings: Any) -> Iterator[tuple[int, PredictionServer]]:
    """Yields the port of a server in a thread of this process, as `headrace serve` configures it."""
    application = PredictionServer([folder], ServeSettings(**settings))
    begun = threading.Event()
    config = server_config(application, lifespan="on", log_config=None, timeout_graceful_shutdown=1)
    running = AnnouncedServer(config, begun.set)
    with socket.create_server(("127.0.0.1", 0), backlog=512) as bound:
        thread = threading.Thread(target=running.run, args=([bound],))
        thread.start()
        try:
            assert begun.wait(30)
            yield bound.getsockname()[1], application
        finally:
            running.should_exit = True
            thread.join()


def opened(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def answers(connection: socket.socket) -> bytes:
    """Sends a request, and returns the body of the answer."""
    connection.sendall(ASKED)
    content = b""
    while not content.endswith(LIVE):
        part = connection.recv(1000)
        assert part, content
        content += part
    return content[-len(LIVE) :]


def until_closed(connection: socket.socket) -> bytes:
    """Returns what comes before the server ends a connection, also by a reset."""
    content = b""
    try:
        while part := connection.recv(1 << 16):
            content += part
    except ConnectionError:
        pass
    return content


def sent_before_end(connection: socket.socket, head: bytes, more: bytes, most: int) -> int:
    """Sends without an end; returns after how many bytes the connection was ended, or `most`."""
    count = 0
    try:
        connection.sendall(head)
        while count < most:
            connection.sendall(more)
            count += len(more)
    except (ConnectionError, TimeoutError):
        return count
    return most


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "more"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nx: ", b"a" * 1000),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n", b"x: a\r\n" * 200),
        (b"GET /", b"a" * 1000),
        (
            b"POST /v1/models/m:predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
            b"x: a\r\n" * 200,
        ),
        (b"", b"\r\n" * 500),
    ],
    ids=["one header", "headers", "address", "trailers", "empty lines"],
)
def test_a_head_without_an_end_is_refused(tmp_path: Path, head: bytes, more: bytes) -> None:
    with (
        server(scaled(tmp_path / "a", 2.0)) as (port, _),
        closing(opened(port)) as endless,
        closing(opened(port)) as other,
    ):
        # The buffers of both sockets hold some megabytes beyond what the server reads.
        assert sent_before_end(endless, head, more, 64 << 20) < 16 << 20
        assert answers(other) == LIVE


@pytest.mark.slow
def test_connections_without_a_whole_request_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.5)
    with server(scaled(tmp_path / "a", 2.0)) as (port, _), ExitStack() as stack:
        silent, half, drips, again, lines = (stack.enter_context(closing(opened(port))) for _ in range(5))
        half.sendall(ASKED[:30])
        assert answers(again) == LIVE
        began = time.monotonic()
        again.sendall(ASKED[:10])
        for connection, part in ((drips, ASKED[:1]), (lines, b"\r\n")):
            threading.Thread(target=sent_slowly, args=(connection, part), daemon=True).start()
        for connection in (silent, half, again, drips, lines):
            assert until_closed(connection) == b""
        assert time.monotonic() - began < 5
        with closing(opened(port)) as fresh:
            assert answers(fresh) == LIVE


def sent_slowly(connection: socket.socket, part: bytes) -> None:
    try:
        for number in range(200):
            connection.sendall(part if part == b"\r\n" else ASKED[number % 20 : number % 20 + 1])
            time.sleep(0.1)
    except OSError:
        return


@pytest.mark.slow
def test_many_requests_at_once_on_one_connection_are_refused(tmp_path: Path) -> None:
    with server(scaled(tmp_path / "a", 2.0)) as (port, _):
        with closing(opened(port)) as few:
            few.sendall(ASKED * 10)
            content = b""
            while content.count(LIVE) < 10:
                content += few.recv(1 << 16)
        with closing(opened(port)) as many:
            many.sendall(ASKED * 3000)
            assert until_closed(many).count(LIVE) < 100


@pytest.mark.slow
def test_idle_connections_give_way_to_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_most_connections", lambda: 40)
    with server(scaled(tmp_path / "a", 2.0)) as (port, _), ExitStack() as stack:
        idle = [stack.enter_context(closing(opened(port))) for _ in range(200)]
        with closing(opened(port)) as fresh:
            assert answers(fresh) == LIVE
        ended = 0
        for connection in idle[:150]:
            connection.settimeout(5)
            assert until_closed(connection) == b""
            ended += 1
        assert ended == 150


def widened(folder: Path, count: int) -> Path:
    """Writes a model whose answer to three numbers has `count` of them."""
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "wide"], ["y"])],
        "widened",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", count])],
        [helper.make_tensor("wide", TensorProto.FLOAT, [3, count], np.zeros(3 * count, np.float32))],
    )
    x = np.ones((1, 3), np.float32)
    facts = Signature("m", (TensorForm("x", "float32", (-1, 3)),), (TensorForm("y", "float32", (-1, count)),))
    return written(folder, graph, facts, {"x": x}, {"y": np.zeros((1, count), np.float32)})


@pytest.mark.slow
def test_answers_that_no_client_reads_are_bounded_and_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "UNREAD_S", 1.5)
    count, rows, most = 1 << 18, 16, 64 << 20
    tensor = {"name": "x", "datatype": "FP32", "shape": [rows, 3], "data": [1] * 3 * rows}
    wanted = {"inputs": [tensor], "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}
    body = json.dumps(wanted).encode()
    asked = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with server(widened(tmp_path / "a", count), max_held_bytes=most) as (port, application), ExitStack() as stack:
        asking = [stack.enter_context(closing(opened(port))) for _ in range(8)]
        for connection in asking:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(asked)
        # Each answer has 16 MiB: three are held, and the others get a refusal, which is short.
        refused, until = 0, time.monotonic() + 20
        while refused < 5 and time.monotonic() < until:
            refused = sum(b"HTTP/1.1 429" in peeked(connection) for connection in asking)
            assert application._unsent._held <= most
        assert refused >= 5
        while application._unsent._held:
            assert time.monotonic() < until
            time.sleep(0.05)
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as reading:
            reading.request("POST", "/v2/models/m/infer", body)
            reply = reading.getresponse()
            assert reply.status == 200
            assert len(reply.read()) > 4 * count * rows


def peeked(connection: socket.socket) -> bytes:
    connection.settimeout(0.05)
    try:
        return connection.recv(20, socket.MSG_PEEK)
    except TimeoutError:
        return b""
