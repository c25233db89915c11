"""What a script for Accelerate saves, and how it goes on from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerator.in_processes import run
from headrace.accelerate import Accelerator
from headrace.errors import DataError, UnfitMachine, UsageError


@pytest.mark.slow
def test_a_killed_script_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = run("headrace", tmp_path, "saved.py", tmp_path / "whole", 0, 0)
    assert len(whole) == 2, (tmp_path / "headrace-0.txt").read_text()
    for path in tmp_path.glob("headrace-*.json"):
        path.unlink()
    for stopped in (3, 5):  # After an epoch, and within one.
        folder = tmp_path / f"stopped-{stopped}"
        assert run("headrace", tmp_path, "saved.py", folder, stopped, 0) == []
        assert run("headrace", tmp_path, "saved.py", folder, 0, stopped) == whole
        for path in tmp_path.glob("headrace-*.json"):
            path.unlink()


def prepared(**options: Any) -> tuple[Accelerator, Any, Any]:
    torch.manual_seed(0)
    accelerator = Accelerator(**options)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.zeros(4, 3)), batch_size=2)
    return accelerator, *accelerator.prepare(model, optimizer, loader)[:2]


def train(accelerator: Accelerator, model: Any, optimizer: Any) -> list[float]:
    accelerator.backward(model(torch.rand(4, 3)).square().sum())
    optimizer.step()
    optimizer.zero_grad()
    return [value for each in model.parameters() for value in each.flatten().tolist()]


def test_a_loaded_state_trains_on_as_the_saved_one(tmp_path: Path) -> None:
    saved = prepared()
    train(*saved)
    saved[0].save_state(tmp_path / "state")
    expected = train(*saved)
    loaded = prepared()
    loaded[0].load_state(tmp_path / "state")
    assert train(*loaded) == expected


def test_numbered_states_are_kept_to_a_number(tmp_path: Path) -> None:
    class Config:
        project_dir, logging_dir, automatic_checkpoint_naming, total_limit, iteration = tmp_path, None, True, 2, 0

    accelerator, model, optimizer = prepared(project_config=Config())
    found = [Path(accelerator.save_state()).name for _ in range(4) if train(accelerator, model, optimizer)]
    assert found == ["checkpoint_0", "checkpoint_1", "checkpoint_2", "checkpoint_3"]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"checkpoint_2", "checkpoint_3"}
    assert train(accelerator, model, optimizer) != train(accelerator, model, optimizer)
    accelerator.load_state()
    Config.iteration = 3
    with pytest.raises(UsageError, match="checkpoint_3 exists"):
        prepared(project_config=Config())[0].save_state()


def test_what_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    accelerator, *_ = prepared()
    with pytest.raises(UsageError, match="needs a folder"):
        accelerator.save_state()
    with pytest.raises(DataError, match="name a folder that save_state"):
        accelerator.load_state(tmp_path)
    (tmp_path / "optimizer.bin").write_bytes(b"pickled")
    with pytest.raises(DataError, match=r"optimizer\.bin, which Accelerate wrote and which is pickled"):
        accelerator.load_state(tmp_path)
    accelerator.save_state(tmp_path / "state")
    accelerator.register_for_checkpointing(optimizer_of := torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0))
    with pytest.raises(UsageError, match=r"prepared or registered are .*SGD 1"):
        accelerator.load_state(tmp_path / "state")
    with pytest.raises(UsageError, match="a int has no state_dict"):
        accelerator.register_for_checkpointing(3)
    assert optimizer_of in accelerator._registered
    content = bytearray((tmp_path / "state" / "state.safetensors").read_bytes())
    (tmp_path / "state" / "state.safetensors").write_bytes(content[:-5])
    with pytest.raises(DataError, match="cannot load the state"):
        prepared()[0].load_state(tmp_path / "state")


def test_a_state_of_something_else_is_not_pickled(tmp_path: Path) -> None:
    class Holds:
        def state_dict(self) -> dict[str, Any]:
            return {"path": tmp_path}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError(state)

    accelerator, *_ = prepared()
    accelerator.register_for_checkpointing(Holds())
    with pytest.raises(UsageError, match="holds a PosixPath which is neither"):
        accelerator.save_state(tmp_path / "state")
    assert not (tmp_path / "state").exists()


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    accelerator, model, _ = prepared()
    (tmp_path / "file").write_text("")
    with pytest.raises(UnfitMachine, match=r"cannot save to .*file/state"):
        accelerator.save_state(tmp_path / "file" / "state")
    with pytest.raises(UnfitMachine, match=r"cannot save to .*model\.safetensors"):
        accelerator.save_model(model, tmp_path / "file")


def test_models_are_files_of_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    accelerator, model, _ = prepared()
    model.tied = model.weight
    accelerator.save_model(model, tmp_path / "model")
    accelerator.save({"a": torch.ones(2)}, tmp_path / "a.safetensors", safe_serialization=True)
    accelerator.save({"a": 1}, tmp_path / "a.pt")
    assert load_file(tmp_path / "model" / "model.safetensors").keys() == {"weight", "bias", "tied"}
    assert load_file(tmp_path / "a.safetensors")["a"].tolist() == [1.0, 1.0]
    assert torch.load(tmp_path / "a.pt", weights_only=True) == {"a": 1}
