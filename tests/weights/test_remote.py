"""Stored values at URLs: servers by HTTP with ranges and without, answers that fail, and S3."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

import headrace as hr
from headrace.errors import DataError
from headrace.weights.files import find_tensors
from headrace.weights.reading import StoredValues
from weights.models import job_of, stored, write

pytest.importorskip("fsspec")
pytest.importorskip("aiohttp", reason='needs a client of HTTP: pip install "headrace[remote]"')


_PIECE = 1 << 16


class Server(BaseHTTPRequestHandler):
    """Serves files, in one of these ways: "ranges", "no ranges", "no size", "refuses", "breaks"."""

    protocol_version = "HTTP/1.1"
    way = "ranges"
    folder = Path()
    sent = 0

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.folder / self.path.lstrip("/")
        if type(self).way == "refuses" or not path.is_file():
            self.send_error(401 if type(self).way == "refuses" else 404)
            return
        content, first, asked = path.read_bytes(), 0, self.headers.get("Range", "")
        size = len(content)
        if asked and type(self).way != "no ranges":
            first, last = (int(each or size - 1) for each in asked.removeprefix("bytes=").split("-"))
            content = content[first : last + 1]
        self.send_response(206 if len(content) < size else 200)
        if len(content) < size:
            self.send_header("Content-Range", f"bytes {first}-{first + len(content) - 1}/{size}")
        if type(self).way != "no size" or asked:
            self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")
        self.end_headers()
        if body:
            breaks = type(self).way == "breaks" and first > 8
            for at in range(0, len(content) // (1 + breaks), _PIECE):
                self.wfile.write(content[at : min(at + _PIECE, len(content) // (1 + breaks))])
                type(self).sent += _PIECE
        self.close_connection = True


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[type[Server], str]]:
    kind = type("Here", (Server,), {"folder": tmp_path})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        try:
            yield kind, f"http://127.0.0.1:{served.server_port}"
        finally:
            served.shutdown()
            thread.join()


def read(url: str) -> dict[str, torch.Tensor]:
    targets = {name: torch.zeros_like(each) for name, each in stored().items()}
    StoredValues(find_tensors(url)).read(torch.nn.Module(), targets.items())
    return targets


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [hr.FullySharded(2), hr.Mirrored(2)])
def test_a_run_begins_with_what_a_server_has(
    strategy: hr.Strategy, server: tuple[type[Server], str], tmp_path: Path
) -> None:
    _, url = server
    write(tmp_path / "base", values := stored(), 3)
    run = hr.fit(job_of(f"{url}/base", steps=1, rate=0.0), strategy, device="cpu", checkpoints=False)
    state = run.model.state_dict()
    assert all(torch.equal(state[name], each) for name, each in values.items())


def test_what_a_server_does_not_do_is_said(server: tuple[type[Server], str], tmp_path: Path) -> None:
    kind, url = server
    write(tmp_path / "base", values := stored())
    file = f"{url}/base/model.safetensors"
    assert all(torch.equal(each, values[name]) for name, each in read(file).items())
    for way, said in {
        "no ranges": "its server sends the whole file where .* so it knows no ranges",
        "no size": "its server does not tell its size",
        "refuses": "its server: 401, message='Unauthorized'",
        "breaks": "base/model.safetensors cannot be read: .*Not enough data",
    }.items():
        kind.way = way
        with pytest.raises(DataError, match=said):
            read(file)
    kind.way = "ranges"
    with pytest.raises(DataError, match=r"nothing.safetensors' cannot be found; its server: 404, message='Not Found'"):
        read(f"{url}/nothing.safetensors")
    with pytest.raises(DataError, match=r"nowhere': there is no file \*.safetensors there; its server: 404"):
        read(f"{url}/nowhere")
    content = (tmp_path / "base/model.safetensors").read_bytes()
    (tmp_path / "base/model.safetensors").write_bytes(content[:-9])
    with pytest.raises(DataError, match=r"is cut off: .* 1 of 27 tensors are not whole"):
        read(file)
    # Nothing is remembered of what was wrong.
    (tmp_path / "base/model.safetensors").write_bytes(content)
    assert read(file)


@pytest.mark.slow
def test_a_server_without_ranges_does_not_send_a_whole_file_before_that_is_said(
    server: tuple[type[Server], str], tmp_path: Path
) -> None:
    kind, url = server
    kind.way = "no ranges"
    write(tmp_path / "base", {"large": torch.zeros(64 << 20, dtype=torch.uint8)})
    with pytest.raises(DataError, match="knows no ranges"):
        read(f"{url}/base/model.safetensors")
    # What the kernel holds of two answers that nobody reads.
    assert kind.sent < 32 << 20


def test_a_server_that_is_not_there_is_said() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as closed:
        port = closed.server_port
    with pytest.raises(DataError, match=f"its server: Cannot connect to host 127.0.0.1:{port}"):
        read(f"http://127.0.0.1:{port}/base")


@pytest.mark.slow
def test_values_come_from_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moto_server = pytest.importorskip("moto.server", reason='needs a server of S3: pip install "moto[s3,server]"')
    s3fs = pytest.importorskip("s3fs", reason='needs a client of S3: pip install "headrace[remote]"')
    served = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    served.start()
    try:
        host, port = served.get_host_and_port()
        urllib.request.urlopen(f"http://{host}:{port}/moto-api/reset", data=b"").close()
        for name, value in {
            "ENDPOINT_URL": f"http://{host}:{port}", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b",
        }.items():  # fmt: skip
            monkeypatch.setenv(f"AWS_{name}", value)
        s3fs.S3FileSystem.clear_instance_cache()
        (system := s3fs.S3FileSystem()).mkdir("bucket")
        write(tmp_path / "base", values := stored(), 3)
        content = (broken := next((tmp_path / "base").glob("*2-of*"))).read_bytes()
        broken.write_bytes(content[:-9])
        put = partial(system.put, str(tmp_path / "base"), "bucket/base", recursive=True)
        put()
        with pytest.raises(DataError, match=r"00002-of-00003.safetensors is cut off"):
            read("s3://bucket/base")
        broken.write_bytes(content)
        system.rm("bucket/base", recursive=True)
        put()
        run = hr.fit(job_of("s3://bucket/base", steps=1, rate=0.0), hr.FullySharded(2), device="cpu")
        assert all(torch.equal(run.model.state_dict()[name], each) for name, each in values.items())
        with pytest.raises(DataError, match=r"base2': .*its server has nothing there"):
            read("s3://bucket/base2")
        with pytest.raises(DataError, match="NoSuchBucket"):
            read("s3://nowhere/base")
    finally:
        served.stop()
        s3fs.S3FileSystem.clear_instance_cache()
