"""What is read of stored values, how, and what is written of them after training."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import headrace as hr
from headrace.data.sources.storage import SourceFile
from headrace.errors import DataError, UsageError
from headrace.weights import reading
from headrace.weights.files import find_tensors
from headrace.weights.reading import StoredValues
from weights.models import job_of, stored, write


@pytest.mark.parametrize(
    "strategy", [hr.FullySharded(3), hr.Pipeline(2), hr.Hybrid(hr.FullySharded(2), hr.Pipeline(2))]
)
@pytest.mark.slow
def test_ranks_together_read_each_byte_once(
    strategy: hr.Strategy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, lock, into = list[int](), threading.Lock(), SourceFile.read_into

    def counted(self: SourceFile, start: int, buffer: memoryview) -> None:
        with lock:
            read.append(len(buffer))
        into(self, start, buffer)

    monkeypatch.setattr(SourceFile, "read_into", counted)
    values = stored()
    folder = write(tmp_path / "weights", values, 3)
    run = hr.fit(job_of(folder, steps=1, rate=0.0), strategy, device="cpu", engine=hr.ThreadEngine())
    state = run.model.state_dict()
    assert all(torch.equal(state[key], values[key]) for key in values)
    # The buffer is read by each rank that has it; of ranks that hold the same stage one reads.
    total = sum(each.nbytes for each in values.values())
    assert total <= sum(read) <= 1.02 * total


def test_chunks_of_any_type_go_where_they_belong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_CHUNK", 24)
    values = {
        "plain": torch.randn(7, 5),
        "half": torch.randn(11).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "none": torch.empty(0, 3),
        "one": torch.tensor(3, dtype=torch.int64),
        "turned": torch.randn(4, 3),
    }
    save_file(values, tmp_path / "model.safetensors")
    weights = StoredValues(find_tensors(tmp_path))
    targets = {name: torch.zeros_like(each) for name, each in values.items()}
    targets |= {"half": torch.zeros(11, dtype=torch.float64), "turned": torch.zeros(3, 4).t()}
    weights.read(torch.nn.Module(), targets.items())
    assert all(torch.equal(each, values[name].to(each.dtype)) for name, each in targets.items())
    part = torch.zeros(9)
    weights.read_parts([("plain", 13, part)])
    assert torch.equal(part, values["plain"].flatten()[13:22])


def test_a_file_that_changes_after_the_checks_is_an_error(tmp_path: Path) -> None:
    save_file({"value": torch.randn(100)}, tmp_path / "model.safetensors")
    weights = StoredValues(find_tensors(tmp_path))
    content = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(content[:-4])
    with pytest.raises(DataError, match="bytes when it was found"):
        weights.read_parts([("value", 0, torch.zeros(100))])


@pytest.mark.parametrize("where", ["{}", "{}/model.safetensors", "file://{}"])
def test_a_folder_a_file_and_a_url_have_the_same_tensors(where: str, tmp_path: Path) -> None:
    values = stored()
    write(tmp_path / "[odd] *", values)
    found = find_tensors(where.format(tmp_path / "[odd] *")) if "://" not in where else None
    if found is None:
        write(tmp_path / "plain", values)
        found = find_tensors(where.format(tmp_path / "plain"))
    targets = {name: torch.zeros_like(each) for name, each in values.items()}
    StoredValues(found).read(torch.nn.Module(), targets.items())
    assert all(torch.equal(targets[name], values[name]) for name in values)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_the_trained_model_has_the_layout_of_the_files(tied: bool, tmp_path: Path) -> None:
    values = stored(tied)
    if tied:
        del values["tokens.weight"]
    folder = write(tmp_path / "weights", values, 3)
    (folder / "config.json").write_text("{}")
    run = hr.fit(job_of(folder, tied, steps=2), hr.Mirrored(2), device="cpu")
    path = run.save_pretrained(tmp_path / "tuned")
    assert {each.name for each in path.iterdir()} == {each.name for each in folder.iterdir()}
    state = run.model.state_dict()
    for file in folder.glob("*.safetensors"):
        saved = load_file(path / file.name)
        assert saved.keys() == load_file(file).keys()
        assert all(torch.equal(each, state[name]) for name, each in saved.items())
    assert not torch.equal(state["head.weight"], values["head.weight"])
    # It can be read again.
    again = hr.fit(job_of(path, tied, steps=1, rate=0.0), device="cpu").model.state_dict()
    assert all(torch.equal(again[name], each) for name, each in state.items())
    with pytest.raises(UsageError, match="has the weights that the run began with"):
        run.save_pretrained(folder)


class Pairs(torch.nn.Module):
    """Layers that two devices divide by rows and by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(16, 64), torch.nn.Linear(64, 10, bias=False)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.second(torch.relu(self.first(x)))
        return found


@pytest.mark.slow
@pytest.mark.parametrize("least", [1, 10**9])
def test_slices_are_read_without_the_others(least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, lock, into = list[int](), threading.Lock(), SourceFile.read_into

    def counted(self: SourceFile, start: int, buffer: memoryview) -> None:
        with lock:
            read.append(len(buffer))
        into(self, start, buffer)

    monkeypatch.setattr(SourceFile, "read_into", counted)
    monkeypatch.setattr(reading, "_LEAST_RUN", least)
    monkeypatch.setattr(reading, "_CHUNK", 1000)
    values = {name: torch.randn_like(each) for name, each in Pairs().state_dict().items()}
    job = hr.Job(
        model=Pairs,
        loss=torch.nn.functional.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.0),
        data=(torch.randn(8, 16, dtype=torch.float64), torch.arange(8)),
        global_batch_size=8,
        steps=1,
        weights=write(tmp_path / "weights", values),
    )
    for strategy, ranks in ((hr.TensorParallel(2), 2), (hr.Hybrid(hr.FullySharded(2), hr.TensorParallel(2)), 4)):
        read.clear()
        state = hr.fit(job, strategy, device="cpu", engine=hr.ThreadEngine()).model.state_dict()
        assert all(torch.equal(state[name], each) for name, each in values.items())
        total = sum(each.nbytes for each in values.values())
        # Of runs that are short it also reads what lies between them.
        assert sum(read) == total if least == 1 else total < sum(read) < ranks * total
