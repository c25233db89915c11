"""What is wrong with stored values is said before the start, with the names of the tensors."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import headrace as hr
from headrace.errors import DataError, HeadraceError, UsageError
from headrace.spec.weights import Weights
from headrace.weights.fitting import find_weights
from weights.models import job_of, stored, write

Change = Callable[[Path], object]


def _cut(folder: Path, left: int) -> None:
    file = folder / "model-00002-of-00003.safetensors"
    os.truncate(file, file.stat().st_size - left)


def _index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    file = folder / "model.safetensors.index.json"
    listed = json.loads(file.read_text())
    change(listed["weight_map"])
    file.write_text(json.dumps(listed))


def _header(folder: Path, change: Callable[[str], str]) -> None:
    """Writes one file with another header; its length stays that of the text."""
    (folder / "model.safetensors.index.json").unlink()
    for other in folder.glob("model-0000[23]*"):
        other.unlink()
    file = folder / "model-00001-of-00003.safetensors"
    content = file.read_bytes()
    count = int.from_bytes(content[:8], "little")
    text = change(content[8 : 8 + count].decode()).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + count :])


def _padded(file: Path) -> None:
    file.write_bytes(file.read_bytes() + bytes(8))


def _rewritten(file: Path, old: str, new: str) -> None:
    file.write_text(file.read_text().replace(old, new))


def _linked(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    (folder / "model.safetensors").symlink_to("nowhere")


FILES: dict[str, tuple[Change, str]] = {
    "no folder": (lambda folder: folder.rename(folder.with_name("other")), "there is no file *.safetensors there"),
    "a missing file": (
        lambda folder: (folder / "model-00003-of-00003.safetensors").unlink(),
        "has no 'model-00003-of-00003.safetensors', where 9 of 27 tensors",
    ),
    "a cut file": (lambda folder: _cut(folder, 8), "of 9 tensors are not whole: "),
    "hardly a file": (lambda folder: os.truncate(folder / "model-00002-of-00003.safetensors", 5), "has 5 bytes"),
    "a cut header": (lambda folder: os.truncate(folder / "model-00002-of-00003.safetensors", 50), "its header would"),
    "an index of other files": (
        lambda folder: _index(folder, lambda listed: listed.update({"other": "model-00001-of-00003.safetensors"})),
        "has 1 tensors that are not in the files that it names: 'other'",
    ),
    "a malformed index": (
        lambda folder: (folder / "model.safetensors.index.json").write_text("[]"),
        "is no index of safetensors files",
    ),
    "two of one name": (
        lambda folder: (
            (folder / "model.safetensors.index.json").unlink(),
            save_file({"scale": torch.ones(1)}, folder / "more.safetensors"),
        ),
        "both have 'scale'",
    ),
    "an unknown type": (
        lambda folder: _header(folder, lambda text: text.replace("F64", "F65", 1)),
        "has the type 'F65', which is unknown",
    ),
    "an overlap": (
        lambda folder: _header(folder, lambda text: re.sub(r"\[\d+,(\d+)\]}(?=})", _shifted, text)),
        "begins inside another",
    ),
    "a gap": (
        lambda folder: _header(folder, lambda text: re.sub(r'"[a-z0-9.]+":{[^}]*\[0,\d+\]},', "", text)),
        "those from byte 0 on are not in its header",
    ),
    "bytes after the last": (
        lambda folder: _padded(folder / "model-00002-of-00003.safetensors"),
        "are not in its header, which the format does not allow",
    ),
    "a place of three numbers": (
        lambda folder: _header(folder, lambda text: re.sub(r"\[0,(\d+)\]", r"[0,0,\1]", text)),
        "its header is malformed: '",
    ),
    "a name twice in the index": (
        lambda folder: _rewritten(folder / "model.safetensors.index.json", '"scale"', '"head.weight"'),
        "ValueError('a name in it occurs twice')",
    ),
    "no file of an index": (
        lambda folder: [file.unlink() for file in folder.glob("*.safetensors")],
        "index.json there names 'model-00001-of-00003.safetensors', 'model-0000",
    ),
    "another form alone": (
        lambda folder: [file.rename(file.with_suffix(".bin")) for file in folder.glob("*.safetensors")],
        "only 'model-00001-of-00003.bin', 'model-00002",
    ),
    "links to nothing": (lambda folder: _linked(folder), "links lead to no file: 'model.safetensors'"),
    "a pointer of LFS": (
        lambda folder: (folder / "model-00001-of-00003.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
        ),
        "is a pointer of git's LFS, not the file; run `git lfs pull` there",
    ),
    "no JSON": (lambda folder: _header(folder, lambda text: text[:-5] + "     "), "its header is malformed"),
}


def _shifted(match: re.Match[str]) -> str:
    begin, end = match[0].strip("[]}").split(",")
    return f"[{int(begin) - 8},{int(end) - 8}]}}"


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_not_whole_are_refused(name: str, tmp_path: Path) -> None:
    change, said = FILES[name]
    folder = write(tmp_path / "weights", stored(), 3)
    change(folder)
    with pytest.raises(DataError) as caught:
        hr.fit(job_of(folder), device="cpu")
    assert said in str(caught.value)


def _changed(**other: Tensor | None) -> dict[str, Tensor]:
    values = {**stored(), **{name.replace("__", "."): each for name, each in other.items()}}
    return {name: each for name, each in values.items() if each is not None}


HEAD = stored()["head.weight"]
NAMES: dict[str, tuple[dict[str, Tensor], str]] = {
    "missing": (_changed(head__weight=None), "1 tensors of the model are not there, 'head.weight'"),
    "other name": (
        _changed(head__weight=None, heads__weight=HEAD),
        "'heads.weight' (the nearest to the first is 'head.weight')",
    ),
    "a beginning more": (
        {f"model.{name}": each for name, each in stored().items()},
        "rename={'model.': ''})",
    ),
    "two beginnings": (
        {f"{'model' if 'layers' in name else 'net.lm'}.{name}": each for name, each in stored().items()},
        "rename={'model.': '', 'net.lm.': ''})",
    ),
    "a beginning less": (
        {name.partition(".")[2] or name: each for name, each in stored().items() if name.startswith("layers.")},
        "rename={'': 'layers.'})",
    ),
    "quantized": (_changed(head__weight=HEAD.to(torch.int8)), "have no such values: give files that are not quantized"),
    "more": (_changed(bias=torch.ones(3)), "1 there are not the model's, 'bias'"),
    "other shape": (_changed(head__weight=HEAD[:-1].clone()), "has shape [49, 16] there and [50, 16] in the model"),
    "other kind": (_changed(scale=torch.ones(1, dtype=torch.int64)), "'scale' is int64 there and float64"),
}


@pytest.mark.parametrize("name", NAMES)
def test_tensors_that_are_not_the_models_are_refused(name: str, tmp_path: Path) -> None:
    values, said = NAMES[name]
    with pytest.raises(UsageError) as caught:
        hr.fit(job_of(write(tmp_path / "weights", values)), device="cpu")
    assert said in str(caught.value)


def test_types_that_would_lose_bits_are_refused_and_narrower_ones_are_widened(tmp_path: Path) -> None:
    half = write(tmp_path / "half", {name: each.bfloat16() for name, each in stored().items()})
    run = hr.fit(job_of(half, steps=1, rate=0.0), device="cpu")
    assert torch.equal(run.model.state_dict()["head.weight"], HEAD.bfloat16().double())
    eighth = write(tmp_path / "eighth", {name: each.to(torch.float8_e4m3fn) for name, each in stored().items()})
    run = hr.fit(job_of(eighth, steps=1, rate=0.0), device="cpu")
    assert torch.equal(run.model.state_dict()["head.weight"], HEAD.to(torch.float8_e4m3fn).double())
    job = job_of(write(tmp_path / "wide", stored()))
    with pytest.raises(UsageError, match="24 more are float64 there and float32 in the model, which would lose bits"):
        hr.fit(replace(job, model=lambda: job.model().float()), device="cpu")  # type: ignore[call-arg]


def test_whole_numbers_that_would_lose_bits_are_refused_and_narrower_ones_are_widened(tmp_path: Path) -> None:
    module = torch.nn.Module()
    module.register_buffer("places", torch.zeros(3, dtype=torch.int32))
    narrow = write(tmp_path / "narrow", {"places": torch.tensor([1, -2, 3], dtype=torch.int16)})
    find_weights(Weights(str(narrow)), module, "nothing")
    wide = write(tmp_path / "wide", {"places": torch.tensor([1, -2, 2**40])})
    with pytest.raises(UsageError, match="'places' is int64 there and int32 in the model, which would lose bits"):
        find_weights(Weights(str(wide)), module, "nothing")


def test_a_tensor_that_the_model_ties_is_there_once_or_twice_the_same(tmp_path: Path) -> None:
    values = stored(tied=True)
    both = {**values, "head.weight": values["tokens.weight"].clone()}
    run = hr.fit(job_of(write(tmp_path / "both", both), tied=True, steps=1, rate=0.0), device="cpu")
    assert torch.equal(run.model.state_dict()["head.weight"], values["head.weight"])
    with pytest.raises(UsageError, match=r"the model has one tensor as 'head\.weight' and 'tokens\.weight', and"):
        hr.fit(job_of(write(tmp_path / "apart", stored()), tied=True), device="cpu")


def test_what_is_no_place_is_refused(tmp_path: Path) -> None:
    for wrong in (3, "", b"folder"):
        with pytest.raises(UsageError, match="weights must be a folder, a file or a URL"):
            job_of(wrong)  # type: ignore[arg-type]
    with pytest.raises(HeadraceError, match="memory://nothing"):
        hr.fit(job_of("memory://nothing"), device="cpu")
