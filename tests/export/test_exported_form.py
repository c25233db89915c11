"""A model may answer in another form than it is trained in: `exported()`."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.errors import JobError
from headrace.export import programs
from headrace.export.choice import choose
from headrace.export.opening import open_runner
from headrace.export.signature import Signature
from headrace.export.writing import write_model

FACTS = Signature(name="a", inputs=(), outputs=())


class Towers(nn.Module):
    """Is trained on pairs, and answers with the best of all films."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.films = nn.Embedding(9, 4), nn.Embedding(30, 4)

    def forward(self, user: Tensor, film: Tensor) -> Tensor:
        return (self.users(user) * self.films(film)).sum(1)

    def exported(self) -> nn.Module:
        return Best(self)


class Best(nn.Module):
    """The three best films."""

    def __init__(self, towers: Towers) -> None:
        super().__init__()
        self.towers = towers

    def forward(self, user: Tensor) -> dict[str, Tensor]:
        best = (self.towers.users(user) @ self.towers.films.weight.T).topk(3)
        return {"films": best.indices, "scores": best.values}


@pytest.fixture
def towers() -> tuple[hr.Job, Towers]:
    torch.manual_seed(0)
    model = Towers()
    batch = {"user": torch.arange(9), "film": torch.arange(9)}
    examples = [{name: column[index] for name, column in batch.items()} for index in range(9)]
    job = hr.Job(
        model=lambda: model,
        task=hr.tasks.binary(),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        data=examples,
        global_batch_size=4,
        epochs=1,
        inputs=("user", "film"),
    )
    return job, model


@pytest.mark.slow
def test_the_best_rows_of_a_table_by_number_and_score(towers: tuple[hr.Job, Towers], tmp_path: Path) -> None:
    job, model = towers
    made = write_model(job, model, tmp_path / "m", FACTS)
    assert [(form.name, form.dtype, form.shape) for form in made.inputs] == [("user", "int64", (-1,))]
    assert [(form.name, form.dtype, form.shape) for form in made.outputs] == [
        ("films", "int64", (-1, 3)),
        ("scores", "float32", (-1, 3)),
    ]
    user = torch.tensor([8, 3])
    wanted = (model.users.weight[user] @ model.films.weight.T).topk(3)
    for name in ("model.pt2", "model.onnx"):
        found = open_runner(tmp_path / "m" / name, made.inputs, made.outputs).run({"user": user})
        assert torch.equal(found["films"], wanted.indices)
        assert torch.allclose(found["scores"], wanted.values, atol=1e-6)


def test_one_wrong_number_is_a_difference(
    towers: tuple[hr.Job, Towers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(programs.TorchRunner):
        def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
            found = super().run(inputs)
            found["films"][-1, -1] += 1
            return found

    monkeypatch.setattr(programs, "TorchRunner", Wrong)
    with pytest.raises(JobError, match=r"computes something else .* 0\.037 of"):
        write_model(*towers, tmp_path / "m", FACTS, choose(formats=("pt2",)))


@pytest.mark.slow
def test_of_a_ranking_in_smaller_numbers_what_is_missing_counts_and_not_the_order(
    towers: tuple[hr.Job, Towers], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = 0

    class Reordered(programs.OnnxRunner):
        def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
            found = super().run(inputs)
            films = found["films"].flip(1)
            films[:, :missing] = 99
            return {**found, "films": films}

    monkeypatch.setattr(programs, "OnnxRunner", Reordered)
    choice = choose(formats=("onnx",), quantize="fp16")
    made = write_model(*towers, tmp_path / "a", FACTS, choice)
    assert [each for each in made.notes if "0% of the numbers in the output 'films' are others" in each]
    missing = 1
    with pytest.raises(JobError, match=r"fp16: 33% of the numbers in the output 'films' .* at most 25% are allowed"):
        write_model(*towers, tmp_path / "b", FACTS, choice)
