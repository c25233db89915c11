"""A trained model as files that run without headrace: each computes what `Run.predict` returns."""

from __future__ import annotations

import functools
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import headrace as hr
from headrace.errors import DataError, JobError, UsageError
from headrace.export import programs, signature
from headrace.export.choice import choose
from headrace.export.opening import open_runner
from headrace.export.signature import Signature, TensorForm
from headrace.export.writing import write_model
from headrace.models import char_lstm

FACTS = Signature(name="a", inputs=(), outputs=())
PT2 = choose(formats=("pt2",))


def job_of(model: nn.Module, data: object, **more: object) -> hr.Job:
    more = {"loss": lambda output, target: output.sum()} | more if "task" not in more else more
    return hr.Job(
        model=lambda: model,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        data=data,
        global_batch_size=4,
        epochs=1,
        **more,  # type: ignore[arg-type]
    )


@pytest.fixture
def classifier() -> tuple[hr.Job, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(
        # Four values to three: pooling that ONNX has no operation for.
        nn.Sequential(nn.AdaptiveMaxPool1d(3), nn.Flatten()),
        nn.Linear(9, 5),
        nn.BatchNorm1d(5),
        nn.ReLU(),
        nn.Linear(5, 3),
    )
    return job_of(model, (torch.rand(8, 3, 4), torch.arange(8) % 3), task=hr.tasks.multiclass(3)), model


@pytest.mark.slow
def test_each_file_computes_the_prediction_for_any_number_of_examples(
    classifier: tuple[hr.Job, nn.Module], tmp_path: Path
) -> None:
    job, model = classifier
    made = write_model(job, model, tmp_path / "m", FACTS)
    assert [(form.name, form.dtype, form.shape) for form in made.inputs] == [("input", "float32", (-1, 3, 4))]
    assert [(form.name, form.dtype, form.shape) for form in made.outputs] == [("output", "float32", (-1, 3))]
    five = torch.rand(5, 3, 4)
    with torch.no_grad():
        wanted = model(five).softmax(1)
    for name in ("model.pt2", "model.onnx"):
        path = signature.open_file(tmp_path / "m", signature.read(tmp_path / "m"), name)
        found = open_runner(path, made.inputs, made.outputs).run({"input": five})["output"]
        assert torch.allclose(found, wanted, atol=1e-6)
        assert made.files[name].difference is not None
    sample = load_file(tmp_path / "m" / "sample.safetensors")
    with torch.no_grad():
        assert torch.allclose(model(sample["input/input"]).softmax(1), sample["output/output"], atol=1e-6)


def test_an_output_that_depends_on_the_other_examples_is_noted(tmp_path: Path) -> None:
    class Similarities(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x @ x.T, x - x.mean(0), x + 1

    data = torch.rand(8, 5)
    made = write_model(job_of(Similarities(), (data, data)), Similarities(), tmp_path / "m", FACTS, PT2)
    assert [form.shape for form in made.outputs] == [(-1, -1), (-1, 5), (-1, 5)]
    (note,) = made.notes
    assert note.startswith("what an example gets as output_0, output_1 depends on the other examples of its call")


def test_equal_lengths_are_not_taken_for_free_ones(tmp_path: Path) -> None:
    class Words(nn.Module):
        """Sequences of 7 words to 7 classes, and a table of 3 rows, as many as the examples of the sample."""

        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(11, 7)
            self.register_buffer("table", torch.rand(3, 4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.words(x).mean(1), self.table + 1, self.words(x)

    data = torch.randint(0, 11, (8, 7))
    made = write_model(job_of(Words(), (data, data)), Words(), tmp_path / "m", FACTS, PT2)
    assert made.inputs[0].shape == (-1, -1)
    assert [form.shape for form in made.outputs] == [(-1, 7), (3, 4), (-1, -1, 7)]


@pytest.mark.slow
def test_a_sequence_may_have_any_length(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = char_lstm(11, embedding=4, hidden=6)
    text = torch.randint(0, 11, (6, 9))
    made = write_model(job_of(model, (text, text)), model, tmp_path / "m", FACTS)
    assert made.inputs[0].shape == (-1, -1)
    assert made.outputs[0].shape == (-1, -1, 11)
    assert not made.notes
    longer = torch.randint(0, 11, (2, 31))
    with torch.no_grad():
        wanted = model(longer)
    for name in ("model.pt2", "model.onnx"):
        found = open_runner(tmp_path / "m" / name, made.inputs, made.outputs).run({"characters": longer})
        assert torch.allclose(found["output"], wanted, atol=1e-5)


def test_a_file_that_computes_something_else_is_refused(
    classifier: tuple[hr.Job, nn.Module], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(programs.TorchRunner):
        def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
            return {name: tensor + 0.01 for name, tensor in super().run(inputs).items()}

    monkeypatch.setattr(programs, "TorchRunner", Wrong)
    with pytest.raises(JobError, match=r"model\.pt2 computes something else .* 0\.0\d+ of the largest value"):
        write_model(*classifier, tmp_path / "m", FACTS, PT2)
    assert list(tmp_path.iterdir()) == []


class NoColumns(nn.Linear):
    """Returns its values, and none of their columns, as numbers of two types."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        y = super().forward(x)
        return y, y[:, :0], y[:, :0].long()


@pytest.mark.slow
def test_an_output_without_elements_is_written(tmp_path: Path) -> None:
    model = NoColumns(4, 3)
    job = job_of(model, (torch.rand(8, 4), torch.zeros(8)), loss=lambda output, target: output[0].sum())
    made = write_model(job, model, tmp_path / "m", FACTS)
    assert [form.shape for form in made.outputs] == [(-1, 3), (-1, 0), (-1, 0)]
    for name in ("model.pt2", "model.onnx"):
        found = open_runner(tmp_path / "m" / name, made.inputs, made.outputs).run({"x": torch.rand(5, 4)})
        assert [tuple(found[form.name].shape) for form in made.outputs] == [(5, 3), (5, 0), (5, 0)]


def test_a_model_that_returns_nan_is_refused(classifier: tuple[hr.Job, nn.Module], tmp_path: Path) -> None:
    job, model = classifier
    with torch.no_grad():
        model[1].bias.fill_(torch.nan)
    with pytest.raises(JobError, match="returns output with NaN"):
        write_model(job, model, tmp_path / "m", FACTS, PT2)


def test_a_model_that_looks_at_values_is_refused_with_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Looks(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) if input.sum() > 0 else input

    model = Looks(2, 2)
    line = Looks.forward.__code__.co_firstlineno + 1
    told = rf"cannot be exported, at 1 \(Looks\), test_writing\.py line {line}: .*torch\.where"
    whole = nn.Sequential(nn.Linear(2, 2), model)
    with pytest.raises(JobError, match=told) as caught:
        write_model(job_of(whole, (torch.rand(4, 2), torch.rand(4))), whole, tmp_path / "m", FACTS, PT2)
    assert "\n" not in str(caught.value)
    assert not capsys.readouterr().out


def test_a_folder_is_not_written_over_and_formats_are_named(
    classifier: tuple[hr.Job, nn.Module], tmp_path: Path
) -> None:
    (tmp_path / "kept").write_text("")
    with pytest.raises(UsageError, match="exists already"):
        write_model(*classifier, tmp_path, FACTS)
    with pytest.raises(UsageError, match="--formats takes pt2, onnx, pte, tflite, got mlmodel"):
        choose(formats=("mlmodel",))


def test_a_signature_is_json_whatever_was_measured(tmp_path: Path) -> None:
    forms = (TensorForm("x", "float32", (-1,), (-math.inf,), (2.0,)),)
    file = signature.Artefact(1, "0", math.nan, {"loss": math.nan})
    made = Signature("a", forms, (), metrics={"worst": math.inf, "loss": 1.0}, files={"a": file})

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    json.loads(signature.write(tmp_path, made).read_text(), parse_constant=refuse)
    read = signature.read(tmp_path)
    assert read.metrics == {"worst": None, "loss": 1.0}
    assert (read.inputs[0].low, read.inputs[0].high) == ((None,), (2.0,))
    assert read.files["a"] == signature.Artefact(1, "0", None, {"loss": None})


class TestForgedFolders:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        (tmp_path / "model.pt2").write_bytes(b"weights")
        record = signature.Artefact(7, signature.digest(tmp_path / "model.pt2"))
        files = dict.fromkeys(("model.pt2", "link.pt2", "../out.pt2", "gone.pt2"), record)
        (tmp_path / "link.pt2").symlink_to(tmp_path / "model.pt2")
        signature.write(tmp_path, Signature("a", (), (), files=files))
        return tmp_path

    @pytest.mark.parametrize(
        ("name", "told"),
        [
            ("link.pt2", "is a link"),
            ("../out.pt2", "not a path inside"),
            ("gone.pt2", "is missing"),
            ("else.pt2", "lists no else.pt2"),
        ],
    )
    def test_a_file_that_is_not_plainly_inside_is_refused(self, folder: Path, name: str, told: str) -> None:
        with pytest.raises(DataError, match=told):
            signature.open_file(folder, signature.read(folder), name)

    def test_a_file_with_another_content_is_refused(self, folder: Path) -> None:
        known = signature.read(folder)
        assert signature.open_file(folder, known, "model.pt2") == folder / "model.pt2"
        (folder / "model.pt2").write_bytes(b"weightz")
        with pytest.raises(DataError, match="is not the file that was exported"):
            signature.open_file(folder, known, "model.pt2")

    @pytest.mark.parametrize(
        "content",
        ["", "[]", "{}", json.dumps({"format": "headrace model", "version": 2}), "[" * 100_000, " " * (1 << 21)],
    )
    def test_what_is_no_signature_is_refused(self, folder: Path, content: str) -> None:
        (folder / signature.NAME).write_text(content)
        with pytest.raises(DataError, match="cannot be used"):
            signature.read(folder)
