"""Extras: without one, the message of each of its features names it; with it, a test uses it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from installed import PROJECT, ROOT, closure, install, make_older

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("real_python")]
JOB = """
import functools, torch
import headrace as hr

def job():
    data = (torch.randn(16, 3), torch.randint(0, 2, (16,)))
    model, optimizer = functools.partial(torch.nn.Linear, 3, 2), functools.partial(torch.optim.SGD, lr=0.1)
    return hr.Job(model, optimizer, data, 8, task=hr.tasks.multiclass(2), steps=2)
"""
PROGRAM = """
import contextlib, io, json, sys
from pathlib import Path
import headrace as hr
import job
from headrace.cli import run
from headrace.errors import UnfitMachine
from headrace.spec.events import LAUNCHER, RunStarted

job = job.job()
trained = hr.fit(job, "one_device", engine=hr.ThreadEngine(), device="cpu", run_dir="trained")
assert trained.status == "ok"
Path("a").write_bytes(bytes(64))

def track(tracker):
    with tracker:
        tracker(RunStarted(LAUNCHER, 0.0, "mirrored", 2, "cpu", 1, 8, 80, "2026-10-03T14:05:11+02:00", {}, {}))

def said(code):
    out = io.StringIO()
    with contextlib.redirect_stderr(out), contextlib.redirect_stdout(out):
        try:
            result = eval(code)
        except UnfitMachine as error:
            return str(error)
    return out.getvalue() if result in (3, None) else f"{code} was not refused: {result}, {out.getvalue()}"

print(json.dumps({code: said(code) for code in json.loads(sys.argv[1])}))
"""


@dataclass(frozen=True)
class Use:
    """What one extra is for.

    Attributes:
        refused: by package, an expression of `PROGRAM` that needs it, and is refused where the extra is missing.
        used: the test that uses the extra where it is installed.
    """

    refused: Mapping[str, str]
    used: str


EXPORT = "trained.export('exported', ['{}'], target='{}')"
WATCH = "run(['watch', '.', '--wait'])"
SERVE = "run(['serve', 'trained'])"
IMAGES = "hr.data.DecodeImage(2, 2)"
EXTRAS = {
    "data": Use(
        {
            "scikit-learn": "hr.data.digits()",
            "array-record": "hr.data.from_array_record('a')",
            "google-crc32c": "hr.data.from_tfrecord('a')",
            "opencv-python-headless": IMAGES,
            "protobuf": "hr.data.ParseExample({'label': int})",
            "pyarrow": "hr.data.from_parquet('a')",
            "simplejpeg": IMAGES,
        },
        "tests/data/test_storage.py::test_this_machine",
    ),
    "litert": Use(
        dict.fromkeys(("litert-torch", "ai-edge-litert"), EXPORT.format("tflite", "mobile")),
        "tests/export/mobile/test_litert.py::test_the_interpreter_computes_the_prediction_of_each_example",
    ),
    # headrace does not import torchmetrics: jobs do.
    "metrics": Use({}, "tests/worker/test_accumulated.py::test_on_several_workers_it_is_that_of_the_whole_set"),
    "mlflow": Use(
        {"mlflow-skinny": "track(hr.MLflow('runs'))"},
        "tests/report/trackers/test_mlflow.py::test_a_run_read_back_with_mlflows_own_client",
    ),
    "mobile": Use(
        dict.fromkeys(("executorch", "torchao"), EXPORT.format("pte", "mobile")),
        "tests/export/mobile/test_executorch.py::test_the_runtime_computes_the_prediction_and_int8_is_small",
    ),
    "onnx": Use(
        dict.fromkeys(("onnx", "onnxscript", "onnxruntime"), EXPORT.format("onnx", "server")),
        "tests/export/test_writing.py::test_each_file_computes_the_prediction_for_any_number_of_examples",
    ),
    "ray": Use(
        {"ray": "hr.fit(job, hr.Mirrored(2), engine=hr.RayEngine())"},
        "tests/engine/ray/test_ray_clusters.py::test_one_node_and_several_give_what_threads_give",
    ),
    "remote": Use(
        {
            "fsspec": "hr.data.from_text('https://127.0.0.1:1/a.txt')",
            "s3fs": "hr.fit(job, checkpoints=hr.Checkpoints(copy_to='s3://bucket/a'))",
        },
        "tests/data/test_storage.py::test_http",
    ),
    "serve": Use(
        dict.fromkeys(
            ("httptools", "onnxruntime", "orjson", "prometheus-client", "starlette", "uvicorn", "uvloop"), SERVE
        ),
        "tests/serving/test_running.py::test_it_answers_and_imports_no_torch",
    ),
    "tensorboard": Use(
        {"tensorboard": "track(hr.TensorBoard('curves'))"},
        "tests/report/trackers/test_tensorboard.py::test_a_run_read_back_with_tensorboards_own_reader",
    ),
    # headrace imports neither: jobs do.
    "transformers": Use({}, "tests/examples/test_transformer_lm.py::test_it_gives_the_loss_of_one_device"),
    "wandb": Use(
        {"wandb": "track(hr.WandB('curves'))"},
        "tests/report/trackers/test_wandb.py::test_a_run_read_back_from_the_file_that_would_be_synced",
    ),
    "watch": Use(
        dict.fromkeys(("httptools", "orjson", "starlette", "uvicorn"), WATCH),
        "tests/cli/test_watch.py::test_it_waits_for_a_run_and_ends_in_order",
    ),
}
REFUSED_BY_NONE = {
    ("data", "fsspec"),
    ("metrics", "torchmetrics"),
    ("transformers", "tokenizers"),
    ("transformers", "transformers"),
}
"""torch itself brings fsspec."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install headrace` brings."""
    return install(tmp_path_factory.mktemp("plain") / "site", closure(PROJECT["dependencies"]))


def run(site: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with the packages of a folder alone."""
    (folder / "job.py").write_text(JOB)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-S", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_every_package_of_every_extra_has_a_row() -> None:
    declared = {
        (extra, Requirement(line).name)
        for extra, lines in PROJECT["optional-dependencies"].items()
        for line in lines
        if extra != "dev"
    }
    assert {extra for extra, _ in declared} == {*EXTRAS}
    assert {(extra, name) for extra, use in EXTRAS.items() for name in use.refused} == declared - REFUSED_BY_NONE


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_test_uses_it(extra: str) -> None:
    file, _, name = EXTRAS[extra].used.partition("::")
    assert f"\ndef {name}(" in (ROOT / file).read_text()


def test_a_plain_installation_trains_and_names_the_extra_of_what_it_lacks(plain: Path, tmp_path: Path) -> None:
    codes = {code: extra for extra, use in EXTRAS.items() for code in use.refused.values()}
    done = run(plain, tmp_path, "-c", PROGRAM, json.dumps([*codes]))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    for code, extra in codes.items():
        (line,) = said[code].strip().splitlines()
        assert f"pip install 'headrace[{extra}]'" in line, code


def test_half_of_an_extra_is_named_wherever_it_is_used(tmp_path: Path) -> None:
    """Starlette too old, and without uvicorn and httptools."""
    site = install(tmp_path / "site", closure([*PROJECT["dependencies"], "starlette", "orjson"]))
    make_older(site, "starlette")
    line = "httptools>=0.6 (not installed), starlette>=1.3.1 (installed is 0.0.1), uvicorn>=0.34 (not installed)"
    for command in (["watch", ".", "--wait"], ["train", "job.py", "--watch"]):
        done = run(site, tmp_path, "-m", "headrace", *command)
        assert done.returncode == 3, done.stderr
        assert f"the page needs {line}: pip install 'headrace[watch]'" in done.stderr
    done = run(site, tmp_path, "-m", "headrace", "doctor", "--json")
    checks = [check for check in json.loads(done.stdout)["checks"] if check["name"].startswith("extra")]
    half = {check["name"]: check for check in checks if check["verdict"] != "ok"}
    assert half["extra watch"]["found"] == f"half installed: {line}"
    assert half["extra watch"]["remedy"] == "pip install 'headrace[watch]'"
    assert {*half} == {"extra watch", "extra serve"}
    absent = ", ".join(sorted({*EXTRAS} - {"watch", "serve"}))
    assert [check["found"] for check in checks if check["verdict"] == "ok"] == [f"not installed: {absent}"]


def test_what_an_extra_asks_for_but_another_package_brings_is_not_half_of_it(plain: Path, tmp_path: Path) -> None:
    done = run(plain, tmp_path, "-m", "headrace", "doctor", "--json")
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["extras"]["found"] == f"not installed: {', '.join(sorted(EXTRAS))}"
    assert "numpy" in checks["packages"]["found"]
    assert checks["packages"]["verdict"] == "ok"
