"""Writing a trained model in the layout of its stored values."""

from __future__ import annotations

import errno
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from headrace.errors import UnfitMachine
from headrace.spec.weights import Weights
from headrace.weights import reading, saving
from weights.models import write


def test_no_more_than_a_piece_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_CHUNK", 1 << 16)
    trained = {
        "odd": torch.randn(3).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "none": torch.empty(0, 3),
        "one": torch.tensor(3, dtype=torch.int64),
        **{f"layers.{each}": torch.randn(1 << 19) for each in range(4)},
    }
    folder = write(tmp_path / "base", {name: torch.zeros_like(each) for name, each in trained.items()}, 2)
    save_file(trained, tmp_path / "model.safetensors")
    tracemalloc.start()
    saving.save_like(Weights(str(folder)), nn.Identity(), tmp_path / "model.safetensors", tmp_path / "tuned")
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(tmp_path / "tuned" / file.name, "pt") as saved, safe_open(file, "pt") as was:
            # So that transformers reads it.
            assert saved.metadata() == {"format": "pt"}
            assert {*saved.keys()} == {*was.keys()}
            assert all(torch.equal(saved.get_tensor(name), trained[name]) for name in was.keys())  # noqa: SIM118


def test_a_full_disk_is_named_and_keeps_no_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"one": torch.randn(8), "two": torch.randn(8)}
    folder = write(tmp_path / "base", values, 1)
    save_file(values, tmp_path / "model.safetensors")

    def full(*_: object) -> Iterator[torch.Tensor]:
        yield torch.zeros(32, dtype=torch.uint8)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(saving, "chunks", full)
    with pytest.raises(UnfitMachine, match=r"cannot save the model to .*tuned: .*No space left on device"):
        saving.save_like(Weights(str(folder)), nn.Identity(), tmp_path / "model.safetensors", tmp_path / "tuned")
    assert [*(tmp_path / "tuned").iterdir()] == []
