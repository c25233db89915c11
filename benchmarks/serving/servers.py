"""The servers that are measured, and the load: wrk from Debian."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import headrace as hr
from headrace.models import cnn

HERE = Path(__file__).parent
HEADRACE = Path(sys.executable).parent / "headrace"


def export(folder: Path) -> Path:
    """Writes the cnn of 2.2 million parameters, which was trained for a step; returns the folder."""
    images = torch.rand(64, 3, 32, 32)
    job = hr.Job(
        model=cnn,
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.SGD, lr=0.01),
        data=(images, torch.arange(64) % 10),
        global_batch_size=64,
        steps=1,
    )
    hr.fit(job).export(folder)
    return folder


@dataclass(frozen=True)
class Request:
    """What every client sends to a server: files of its body and its headers."""

    body: Path
    headers: Path

    def header_lines(self) -> list[str]:
        return self.headers.read_text().splitlines()


def binary_request(folder: Path, name: str = "input") -> Request:
    """Returns one example for the Open Inference Protocol, as a binary tensor of 12 KiB."""
    example = np.random.default_rng(0).random((1, 3, 32, 32), np.float32)
    size = {"binary_data_size": example.nbytes}
    tensor = {"name": name, "datatype": "FP32", "shape": list(example.shape), "parameters": size}
    head = json.dumps({"inputs": [tensor]}).encode()
    return _written(
        folder / "binary",
        head + example.tobytes(),
        {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(head))},
    )


def bytes_request(folder: Path) -> Request:
    """Returns one example as 12 KiB of bytes alone."""
    example = np.random.default_rng(0).random((1, 3, 32, 32), np.float32)
    return _written(folder / "bytes", example.tobytes(), {"Content-Type": "application/octet-stream"})


def json_request(folder: Path, key: str = "instances") -> Request:
    """Returns one example as JSON, 4 digits a number: 21 KB."""
    example = np.random.default_rng(0).random((1, 3, 32, 32)).round(4)
    content = json.dumps({key: example.tolist()}).encode()
    return _written(folder / key, content, {"Content-Type": "application/json"})


def _written(folder: Path, body: bytes, headers: dict[str, str]) -> Request:
    folder.mkdir(exist_ok=True)
    (folder / "body").write_bytes(body)
    (folder / "headers").write_text("".join(f"{name}: {value}\n" for name, value in headers.items()))
    return Request(folder / "body", folder / "headers")


def free_port() -> int:
    """Returns a port of this machine at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return int(bound.getsockname()[1])


@contextmanager
def headrace_server(models: Path, *options: str) -> Iterator[tuple[str, int]]:
    """Yields the address of `headrace serve`, and its process."""
    command = [HEADRACE, "serve", models, "--port", "0", *options]
    with _process(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1], process.pid


@contextmanager
def other_server(command: Sequence[str | Path], url: str, start_s: float = 60) -> Iterator[str]:
    """Yields the address of another server, when it answers anything."""
    with _process(command):
        until = time.monotonic() + start_s
        while not answers(url):
            assert time.monotonic() < until, f"{command[0]} does not answer at {url}"
            time.sleep(0.2)
        yield url


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False


@contextmanager
def _process(command: Sequence[str | Path], **options: object) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    with subprocess.Popen(command, text=True, env=environment, start_new_session=True, **options) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


@dataclass(frozen=True)
class Load:
    """What a load got: answers a second, and what failed."""

    rate: float
    answers: int
    not_answered: int
    socket_errors: int


def wrk(url: str, request: Request, clients: int, seconds: float) -> Load:
    """Has so many clients send one request after the other."""
    command = ["wrk", "-t1", f"-c{clients}", f"-d{seconds:.0f}s", "--timeout", "20s", "-s", HERE / "post.lua", url]
    environment = {**os.environ, "BODY": str(request.body), "HEADERS": str(request.headers)}
    text = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout

    def found(pattern: str) -> float:
        match = re.search(pattern, text)
        return float(match[1]) if match else 0.0

    errors = re.search(r"Socket errors: connect (\d+), read (\d+), write (\d+), timeout (\d+)", text)
    return Load(
        rate=found(r"Requests/sec:\s+([\d.]+)"),
        answers=int(found(r"(\d+) requests in")),
        not_answered=int(found(r"Non-2xx or 3xx responses: (\d+)")),
        socket_errors=sum(map(int, errors.groups())) if errors else 0,
    )


def batch_size(url: str) -> float:
    """Returns the mean number of examples that a server of ours has computed together."""
    text = metrics(url)
    total, count = (
        float(re.search(rf"headrace_serve_batch_examples_{what}{{.*}} ([\d.e+]+)", text)[1])  # type: ignore[index]
        for what in ("sum", "count")
    )
    return total / count


def metrics(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        return str(reply.read().decode())


def alone(model: Path, batch: int, seconds: float) -> tuple[float, float]:
    """Returns what onnxruntime alone computes: examples a second, ms a call."""
    command = [sys.executable, HERE / "alone.py", model, str(batch), str(seconds)]
    rate, call_ms = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return float(rate), float(call_ms)


@contextmanager
def workspace() -> Iterator[tuple[Path, Path]]:
    """Yields an empty folder, and one with the exported cnn, which is kept between calls."""
    kept = Path(tempfile.gettempdir()) / "headrace-serving-cnn"
    if not kept.exists():
        export(kept)
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder), kept
