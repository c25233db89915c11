"""The exported model in programs that others wrote: onnxruntime-web under Node, and headless Chromium."""

from __future__ import annotations

import functools
import html
import http.server
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import headrace as hr
from export.test_writing import FACTS, job_of
from headrace.export.browser.runtime import NAME, VERSION
from headrace.export.choice import choose
from headrace.export.writing import write_model
from headrace.models import cnn

ARCHIVE = Path.home() / ".cache" / "headrace" / f"{NAME}-{VERSION}.tgz"
CHROMIUM = shutil.which("chromium")
MOST_DIFFERENT = 1e-4

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not ARCHIVE.is_file(), reason=f"needs {ARCHIVE}, which `headrace export --target browser` fetches"
    ),
]

RUN_SAMPLE = """
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import * as ort from "./ort.wasm.bundle.min.mjs";
import * as tensors from "./tensors.js";
ort.env.wasm.numThreads = 1;
ort.env.wasm.wasmBinary = readFileSync("ort-wasm-simd-threaded.wasm");
const signature = JSON.parse(readFileSync("signature.json"));
const file = readFileSync("sample.safetensors");
const sample = tensors.readSafetensors(file.buffer.slice(file.byteOffset, file.byteOffset + file.byteLength));
const session = await ort.InferenceSession.create(new Uint8Array(readFileSync("model.onnx")));
const feeds = {};
for (const { name } of signature.inputs) {
  const { dtype, shape, data } = sample[`input/${name}`];
  feeds[name] = new ort.Tensor(dtype, data, shape);
}
const found = await session.run(feeds);
for (const { name } of signature.outputs) {
  assert.deepEqual([...found[name].dims], [...sample[`output/${name}`].shape]);
  console.log(tensors.difference(found[name].data, sample[`output/${name}`].data));
}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = cnn().eval()
    job = job_of(model, (torch.rand(8, 3, 32, 32), torch.arange(8) % 10), task=hr.tasks.multiclass(10))
    folder = tmp_path_factory.mktemp("browser") / "m"
    write_model(job, model, folder, FACTS, choose("browser", onnxruntime_web=ARCHIVE))
    return folder


@contextmanager
def static_server(folder: Path) -> Iterator[str]:
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Writes nothing."""


def seen_by_chromium(url: str, home: Path) -> str:
    """Returns the page when its script has come to rest, as the text of its elements."""
    assert CHROMIUM is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    places = [f"--user-data-dir={home}", "--virtual-time-budget=60000", "--dump-dom", url]
    done = subprocess.run([CHROMIUM, *options, *places], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-1000:]
    return html.unescape(done.stdout)


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_under_node_it_answers_as_the_trained_model(folder: Path, tmp_path: Path) -> None:
    place = shutil.copytree(folder, tmp_path / "m")
    (place / "package.json").write_text('{"type": "module"}')
    (place / "run.mjs").write_text(RUN_SAMPLE)
    done = subprocess.run(["node", "run.mjs"], cwd=place, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (difference,) = map(float, done.stdout.split())
    assert difference <= MOST_DIFFERENT


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_the_page_answers_in_a_browser_as_the_trained_model(folder: Path, tmp_path: Path) -> None:
    with static_server(folder) as url:
        seen = seen_by_chromium(url, tmp_path)
    told = re.search(r"on (\d+) examples its answers differ by at most (\S+) of the largest value", seen)
    assert told is not None, seen[-3000:]
    assert int(told[1]) > 0
    assert float(told[2]) <= MOST_DIFFERENT
    assert "ms in this browser; nothing was sent anywhere" in seen
    assert seen.count("<meter") == 5
