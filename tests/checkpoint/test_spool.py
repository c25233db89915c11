"""Tensors that wait in a file, and large files that are mapped: what comes back is what was given."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from headrace.checkpoint import CheckpointFolder, folder, spool
from headrace.checkpoint.spool import Spool
from headrace.errors import CorruptCheckpoint


def test_tensors_come_back_as_they_were_and_nothing_is_left_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "_SEGMENT_BYTES", 1 << 16)
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(count, 3, generator=generator) for count in (10, 4_000, 0, 90_000, 7, 5_000)]
    given += [torch.arange(5), torch.tensor(3), torch.ones(300, 200, dtype=torch.bfloat16).t()]
    with Spool(tmp_path, kept_bytes=200) as kept:
        found = [kept.keep(tensor) for tensor in given]
    assert found[0] is given[0]
    assert found[1].data_ptr() != given[1].data_ptr()
    for one, other in zip(found, given, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_is_told_and_nothing_more_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = 0

    def fail(*_: object) -> int:
        nonlocal tries
        tries += 1
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", fail)
    with Spool(tmp_path, kept_bytes=40) as kept:
        whole = kept.keep(torch.ones(10))
        assert kept.problem is None
        lost = [kept.keep(torch.ones(10)) for _ in range(3)]
    assert kept.problem is not None
    assert (kept.problem.errno, tries) == (errno.ENOSPC, 1)
    assert (len(whole), *map(len, lost)) == (10, 0, 0, 0)


def test_large_files_are_mapped_and_digested_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_MAPPED_BYTES", 1_000)
    state = {"rows": torch.randn(999, 7), "ids": torch.arange(999), "half": torch.ones(3, dtype=torch.bfloat16)}
    saved = CheckpointFolder(tmp_path)
    saved.begin(1)
    saved.commit(1, [saved.write(1, 0, state)], {}, 1)
    found = saved.open(1).read(0)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    # A copy of the page is written, not the file.
    found["rows"].zero_()
    assert torch.equal(saved.open(1).read(0)["rows"], state["rows"])
    (path,) = tmp_path.glob("*/*.safetensors")
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match="its content has changed"):
        saved.open(1).read(0)
