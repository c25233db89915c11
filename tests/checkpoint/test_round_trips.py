"""What is read is what was saved, bit for bit, whatever the tensors; and other programs can read it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.states import DTYPES, equal, odd_tensors
from headrace.checkpoint import CheckpointFolder, FileRecord, Manifest, header
from headrace.checkpoint.manifest import decode, encode
from headrace.checkpoint.storage import CHUNK
from headrace.errors import UsageError


def saved(tmp_path: Path, state: dict[str, torch.Tensor], description: dict[str, Any] | None = None) -> Path:
    folder = CheckpointFolder(tmp_path / "run" / "checkpoints")
    folder.begin(7)
    assert folder.commit(7, [folder.write(7, 3, state)], description or {}, keep=1)
    return folder.path


def test_odd_tensors_come_back_and_safetensors_reads_them(tmp_path: Path) -> None:
    state = odd_tensors()
    checkpoint = CheckpointFolder(saved(tmp_path, state)).open(7)
    checkpoint.verify()
    assert checkpoint.ranks == (3,)
    assert equal(checkpoint.read(3), state)
    assert equal(safetensors.torch.load_file(checkpoint.path / "rank-3.safetensors"), state)


def test_what_safetensors_writes_has_a_header_that_is_read() -> None:
    state = {name: tensor.contiguous() for name, tensor in odd_tensors().items() if not tensor.is_conj()}
    data = safetensors.torch.save(state)
    size = header.length(data[:8], len(data))
    entries = header.parse(data[8 : 8 + size], len(data) - 8 - size)
    assert {entry.name: entry.shape for entry in entries} == {name: tuple(item.shape) for name, item in state.items()}


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, CHUNK // 4 + 1),
        torch.randn(CHUNK // 4 + 1, 3).t(),
        torch.randn(2, CHUNK // 4, 2)[:, :, 0],
        torch.randn(1).expand(3 * CHUNK // 4),
    ],
    ids=["contiguous", "transposed", "strided", "expanded"],
)
@pytest.mark.slow
def test_tensors_of_more_than_a_chunk(tmp_path: Path, tensor: torch.Tensor) -> None:
    checkpoint = CheckpointFolder(saved(tmp_path, {"a": torch.tensor(True), "big": tensor})).open(7)
    checkpoint.verify()
    assert equal(checkpoint.read(3), {"a": torch.tensor(True), "big": tensor})


def test_a_view_of_a_flat_buffer_writes_only_itself(tmp_path: Path) -> None:
    flat = torch.zeros(2_000_000)
    path = saved(tmp_path, {"bias": flat[5:1005]})
    assert (path / "step-00000007" / "rank-3.safetensors").stat().st_size < 4000 + 200


def test_the_record_tells_size_and_digest_of_the_file(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path)
    folder.begin(1)
    record = folder.write(1, 0, {"a": torch.randn(CHUNK // 2)})
    data = (tmp_path / "step-00000001.part" / "rank-0.safetensors").read_bytes()
    assert record == FileRecord("rank-0.safetensors", len(data), hashlib.sha256(data).hexdigest())


def test_what_is_read_does_not_change_with_the_file(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": torch.ones(4)})
    state = CheckpointFolder(path).open(7).read(3)
    (path / "step-00000007" / "rank-3.safetensors").write_bytes(bytes(500))
    state["a"] += 1
    assert state["a"].tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a": torch.zeros(2, device="meta")}, "meta"),
        ({"__metadata__": torch.zeros(2)}, "keeps for itself"),
    ],
)
def test_what_the_format_does_not_have_is_refused(tmp_path: Path, state: dict[str, torch.Tensor], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        saved(tmp_path, state)


finite = st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**127), 2**127)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(st.dictionaries(st.text(), json_values, max_size=4), st.integers(0, 10**12))
def test_a_description_comes_back_exactly(description: dict[str, Any], step: int) -> None:
    files = (FileRecord("rank-0.safetensors", 5, "0" * 64),)
    found = decode(encode(Manifest(step, files, description)))
    assert (found.step, found.files) == (step, files)
    # As text, which tells 1 from 1.0 and from true, and -0.0 from 0.0.
    assert json.dumps(found.description, sort_keys=True) == json.dumps(description, sort_keys=True)


@pytest.mark.parametrize(
    ("description", "said"),
    [
        ({"lr": float("nan")}, "description.lr is nan"),
        ({"lr": [1, float("inf")]}, "description.lr is inf"),
        ({"a": {1: 2}}, "description.a has the key 1"),
        ({"a": torch.zeros(1)}, "Tensor"),
        ({"a": 10**50}, "51 digits"),
        ({"a": "x" * (1 << 20)}, "save what is large as tensors"),
    ],
)
def test_a_description_that_is_no_json_is_refused(description: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        encode(Manifest(1, (), description))


@given(st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), max_size=4)), max_size=6))
def test_a_header_comes_back_exactly(tensors: list[tuple[str, list[int]]]) -> None:
    entries: list[header.TensorEntry] = []
    for number, (dtype, shape) in enumerate(sorted(tensors, key=lambda item: -header.BYTES[item[0]])):
        place = entries[-1].end if entries else 0
        entries.append(header.TensorEntry(f"tensor {number}", dtype, tuple(shape), place))
    data = header.encode(entries)
    assert header.length(data[:8], len(data)) == len(data) - 8
    assert header.parse(data[8:], entries[-1].end if entries else 0) == tuple(entries)


@pytest.mark.usefixtures("real_python")
@pytest.mark.slow
def test_importing_the_room_and_looking_at_a_checkpoint_does_not_import_torch(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from headrace.checkpoint import CheckpointFolder\n"
        "folder = CheckpointFolder(pathlib.Path(sys.argv[1])); folder.latest()[0].verify()\n"
        "print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", program, str(saved(tmp_path, {"a": torch.ones(2)}))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
