"""A folder that any static server can serve: the model, a page, and onnxruntime-web from a copy that is known."""

from __future__ import annotations

import io
import json
import re
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import headrace as hr
from export.test_writing import FACTS, job_of
from headrace.errors import UnfitMachine, UsageError
from headrace.export import signature
from headrace.export.browser import runtime
from headrace.export.browser.runtime import FILES, PAGE, find_runtime
from headrace.export.choice import choose, read_labels
from headrace.export.writing import write_model

PACKAGE = {"package.json": b'{"name": "onnxruntime-web", "version": "1.2.3"}'} | {
    f"dist/{name}": name.encode() for name in FILES
}


def archive(path: Path, contents: Mapping[str, bytes], link: str = "") -> Path:
    with tarfile.open(path, "w:gz") as file:
        for name, content in contents.items():
            about = tarfile.TarInfo(f"package/{name}")
            about.size = len(content)
            file.addfile(about, io.BytesIO(content))
        if link:
            about = tarfile.TarInfo(f"package/{link}")
            about.type, about.linkname = tarfile.SYMTYPE, "/etc/passwd"
            file.addfile(about)
    return path


def without(name: str) -> dict[str, bytes]:
    return {key: value for key, value in PACKAGE.items() if key != name}


def npm(folder: Path, lines: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir()
    program = folder / "npm"
    program.write_text(f"#!/bin/sh\n{lines}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


class TestRuntime:
    def test_an_archive_and_an_installed_package_are_read(self, tmp_path: Path) -> None:
        packed = archive(tmp_path / "web.tgz", PACKAGE)
        shutil.unpack_archive(packed, tmp_path, filter="data")
        for found in (find_runtime(packed), find_runtime(tmp_path / "package")):
            assert found.version == "1.2.3"
            assert found.files == {name: name.encode() for name in FILES}

    @pytest.mark.parametrize(
        ("contents", "link", "told"),
        [
            (without(f"dist/{FILES[0]}"), "", "not a whole onnxruntime-web"),
            (without("package.json"), "", "not a whole onnxruntime-web"),
            (without(f"dist/{FILES[1]}"), f"dist/{FILES[1]}", "not a whole onnxruntime-web"),
            (PACKAGE | {"package.json": b'{"name": "left-pad"}'}, "", "is left-pad, not onnxruntime-web"),
            (PACKAGE | {"package.json": b"[]"}, "", "is None, not onnxruntime-web"),
            (PACKAGE | {"package.json": b"{"}, "", "not a whole onnxruntime-web"),
        ],
    )
    def test_another_archive_is_refused(
        self, contents: Mapping[str, bytes], link: str, told: str, tmp_path: Path
    ) -> None:
        with pytest.raises(UsageError, match=rf"{told}.*npm pack onnxruntime-web@"):
            find_runtime(archive(tmp_path / "web.tgz", contents, link))

    @pytest.mark.parametrize("content", [b"", b"no archive", b"\x1f\x8b" + bytes(30)])
    def test_what_is_no_archive_is_refused(self, content: bytes, tmp_path: Path) -> None:
        (tmp_path / "web.tgz").write_bytes(content)
        with pytest.raises(UsageError, match=r"web\.tgz cannot be read as the archive"):
            find_runtime(tmp_path / "web.tgz")

    def test_npm_fetches_it_once_and_its_digest_counts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        made = archive(tmp_path / "made.tgz", PACKAGE)
        # npm pack NAME --pack-destination FOLDER
        npm(tmp_path / "bin", f'echo x >> {tmp_path}/calls; cp {made} "$4/{runtime._ARCHIVE}"', monkeypatch)
        with pytest.raises(UnfitMachine, match=r"has another digest; run `npm pack"):
            find_runtime(cache=tmp_path / "cache")
        assert list((tmp_path / "cache").iterdir()) == []
        monkeypatch.setattr(runtime, "_is_known", lambda path: path.read_bytes() == made.read_bytes())
        for _ in range(2):
            assert find_runtime(cache=tmp_path / "cache").version == "1.2.3"
        assert (tmp_path / "calls").read_text() == "x\n" * 2
        (tmp_path / "cache" / runtime._ARCHIVE).write_bytes(b"cut")
        assert find_runtime(cache=tmp_path / "cache").version == "1.2.3"

    def test_an_npm_that_fails_or_is_not_there_is_told_with_the_remedy(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        npm(tmp_path / "bin", "echo first >&2; echo no network >&2; exit 1", monkeypatch)
        with pytest.raises(UnfitMachine, match=r"could not fetch onnxruntime-web .*: no network; run `npm pack"):
            find_runtime(cache=tmp_path / "cache")
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(UnfitMachine, match=r"there is no npm to fetch it; run `npm pack"):
            find_runtime(cache=tmp_path / "cache")


def test_a_folder_has_a_page_that_any_server_can_serve(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(18, 3))
    job = job_of(model, (torch.rand(8, 2, 3, 3) * 4 - 1, torch.arange(8) % 3), task=hr.tasks.multiclass(3))
    packed = archive(tmp_path / "web.tgz", PACKAGE)
    made = write_model(job, model, tmp_path / "m", FACTS, choose("browser", None, ("a", "b", "c"), packed))
    wanted = {"model.onnx", "sample.safetensors", *PAGE, *FILES}
    assert set(made.files) == wanted
    assert {path.name for path in (tmp_path / "m").iterdir()} == wanted | {"signature.json"}
    assert all(path.stat().st_mode & stat.S_IROTH for path in (tmp_path / "m").iterdir())
    read = signature.read(tmp_path / "m")
    assert read.labels == ("a", "b", "c")
    assert read.versions["onnxruntime-web"] == "1.2.3"
    assert [len(read.inputs[0].low), len(read.inputs[0].high)] == [2, 2]
    assert read.inputs[0].low[0] == pytest.approx(float(job.data[0][:, 0].min()))
    assert read.inputs[0].high[1] == pytest.approx(float(job.data[0][:, 1].max()))
    for name in PAGE:
        assert not re.search(r"https?:|//\w", (tmp_path / "m" / name).read_text()), name


def test_labels_must_fit(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    job = job_of(model, (torch.rand(8, 4), torch.arange(8) % 3), task=hr.tasks.multiclass(3))
    with pytest.raises(UsageError, match="2 labels, and the model's outputs have 3 classes"):
        write_model(job, model, tmp_path / "m", FACTS, choose(formats=("pt2",), labels=("a", "b")))
    with pytest.raises(UsageError, match="name 'a' twice"):
        choose(labels=("a", "b", "a"))


def test_labels_are_lines_or_json(tmp_path: Path) -> None:
    path = tmp_path / "labels"
    path.write_text("ankle boot\nbag\n")
    assert read_labels(path) == ("ankle boot", "bag")
    path.write_text(json.dumps(["a", "\n"]))
    assert read_labels(path) == ("a", "\n")
    path.write_text("[PAD]\n[UNK]\n\x85\n")
    assert read_labels(path) == ("[PAD]", "[UNK]", "\x85")
    path.write_text("\ufeffbag\nboot")
    assert read_labels(path) == ("bag", "boot")
    for wrong in ("", "[1, 2]", "[", "[]"):
        path.write_text(wrong)
        with pytest.raises(UsageError, match="one a line, or a JSON list"):
            read_labels(path)
    with pytest.raises(UsageError, match="cannot be read as labels"):
        read_labels(tmp_path / "none")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"target": "fridge"}, "--target takes server, browser, mobile, got fridge"),
        ({"target": "browser", "formats": ("pt2",)}, "takes the format onnx alone, got pt2"),
        ({"onnxruntime_web": "x.tgz"}, "goes with --target browser"),
        ({"formats": ()}, "--formats takes pt2, onnx, pte, tflite, got none"),
    ],
)
def test_what_does_not_go_together_is_refused(asked: dict[str, object], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        choose(**asked)  # type: ignore[arg-type]


CHECKS = """
import assert from "node:assert/strict";
import * as t from "./tensors.js";
const image = { name: "x", dtype: "float32", shape: [-1, 1, 1, 2], low: [-1], high: [3] };
const white = new Uint8ClampedArray([255, 255, 255, 255, 0, 0, 0, 255]);
assert.deepEqual([...t.imageTensor(white, image, false).data], [3, -1]);
assert.deepEqual([...t.imageTensor(white, image, true).data], [-1, 3]);
assert.deepEqual([...t.imagePixels(t.imageTensor(white, image, false), image)], [...white]);
const rgb = { name: "x", dtype: "float32", shape: [-1, 3, 1, 1], low: [0, 0, 0], high: [1, 2, 255] };
const colour = t.imageTensor(new Uint8ClampedArray([255, 51, 7, 255]), rgb, false).data;
assert.deepEqual([...colour].map((v) => Math.round(v * 1e5) / 1e5), [1, 0.4, 7]);
assert.equal(t.kindOf(image, []), "image");
const text = { name: "t", dtype: "int64", shape: [-1, -1] };
assert.equal(t.kindOf(text, []), "numbers");
assert.equal(t.kindOf(text, ["a"]), "text");
assert.equal(t.kindOf({ ...text, high: [1] }, ["a", "b"]), "text");
assert.equal(t.kindOf({ ...text, high: [2] }, ["a", "b"]), "numbers");
assert.deepEqual(t.encode("abba", ["a", "b", "bb"]), [0, 2, 0]);
assert.deepEqual(t.encode("axb", ["a", "b", "\\ufffd"]), [0, 2, 1]);
assert.deepEqual(t.encode("b", [...Array(200000).keys()].map(String).concat("b")), [200000]);
assert.throws(() => t.encode("ax", ["a", "b"]), /does not know "x", character 2/);
assert.deepEqual([...t.textTensor("abab", { ...text, shape: [-1, 3] }, ["a", "b"]).data], [1n, 0n, 1n]);
assert.throws(() => t.textTensor("ab", { ...text, shape: [-1, 3] }, ["a", "b"]), /takes 3 tokens, and the text has 2/);
const pair = { name: "p", dtype: "int64", shape: [-1, 2] };
assert.deepEqual([...t.numbersTensor("[7, 8]", pair).data], [7n, 8n]);
assert.throws(() => t.numbersTensor("7 8 9", pair), /p takes 2 numbers, got 3/);
assert.throws(() => t.numbersTensor("7 x", pair), /number 2 of p is not a number/);
const one = (dtype, words) => t.numbersTensor(words, { name: "p", dtype, shape: [-1] }).data[0];
assert.equal(one("int64", "9007199254740993"), 9007199254740993n);
assert.deepEqual([one("int64", "1e3"), one("int32", "-7"), one("float32", "+3"), one("bool", "1")], [1000n, -7, 3, 1]);
for (const [dtype, words] of [["int64", "1.5"], ["int32", "1.5"], ["int8", "300"], ["uint8", "-1"], ["bool", "2"],
  ["int64", "9223372036854775808"], ["int32", "3000000000"], ["float32", "1e39"], ["int32", "Infinity"]]) {
  assert.throws(() => one(dtype, words), { message: `number 1 of p is ${words}, which ${dtype} does not hold` });
}
assert.deepEqual(t.numbersTensor("1 2 3", { name: "p", dtype: "float32", shape: [-1, -1] }).shape, [1, 3]);
assert.equal(t.numbersTensor("5", { name: "p", dtype: "int64", shape: [-1] }).shape.length, 1);
const fixed = { name: "p", dtype: "float32", shape: [2, 2] }, whole = t.numbersTensor("1 2 3 4", fixed);
assert.deepEqual([whole.shape, [...whole.data]], [[2, 2], [1, 2, 3, 4]]);
assert.deepEqual(t.example(whole, 0, fixed), whole);
assert.throws(() => t.numbersTensor("1 2", fixed), /p takes 4 numbers, got 2/);
assert.deepEqual(t.numbersTensor("5", { name: "p", dtype: "float32", shape: [] }).shape, []);
assert.deepEqual([...t.example(whole, 1, { ...fixed, shape: [-1, 2] }).data], [3, 4]);
for (const [count, kind] of [[-1, "image"], [1, "image"], [4, "numbers"]]) {
  assert.equal(t.kindOf({ ...image, shape: [count, 1, 1, 2] }, []), kind);
}
assert.deepEqual(t.largest([1, 3, 2], 2), [{ value: 3, index: 1 }, { value: 2, index: 2 }]);
assert.equal(t.difference([1, 2], [1, 4]), 0.5);
assert.ok(Number.isNaN(t.difference([1, NaN], [1, 4])));
assert.ok(Number.isNaN(t.difference([NaN, 4], [1, 4])));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_page_makes_tensors_as_the_model_was_checked_with(tmp_path: Path) -> None:
    for name in PAGE:
        shutil.copy(Path(runtime.__file__).parent / "page" / name, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "checks.mjs").write_text(CHECKS)
    done = subprocess.run(["node", "checks.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
