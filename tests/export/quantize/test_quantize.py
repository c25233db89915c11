"""`--quantize`: smaller numbers in model.onnx, and what that costs on the evaluation set."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import onnx
import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.errors import JobError, UsageError
from headrace.export import signature
from headrace.export.choice import choose
from headrace.export.opening import open_runner
from headrace.export.quantize import measuring
from headrace.export.quantize.measuring import metrics_of
from headrace.export.signature import Signature
from headrace.export.writing import write_model
from headrace.models import char_lstm
from headrace.serving.programs import open_program
from late import Late

FACTS = Signature(name="a", inputs=(), outputs=())
pytestmark = pytest.mark.slow


class Boxes(nn.Module):
    """Says which quarter of an image is bright: exact in any precision, so that a loss of accuracy shows."""

    def __init__(self) -> None:
        super().__init__()
        self.blur = nn.Conv2d(1, 4, 3, padding=1)
        self.table = nn.Linear(4 * 64, 512)
        self.pool = nn.AvgPool2d(4)
        with torch.no_grad():
            self.blur.weight.fill_(1 / 9)
            self.blur.bias.zero_()  # type: ignore[union-attr]

    def forward(self, images: Tensor) -> Tensor:
        blurred = self.blur(images)
        wide: Tensor = self.table(blurred.flatten(1)) * 1e-3
        return 10 * self.pool(blurred[:, :1]).flatten(1) + wide[:, :4]


def boxes() -> tuple[hr.Job, nn.Module]:
    torch.manual_seed(0)
    images, labels = 0.1 * torch.rand(60, 1, 8, 8), torch.arange(60) % 4
    for image, label in zip(images, labels.tolist(), strict=True):
        image[0, 4 * (label // 2) :, 4 * (label % 2) :][:4, :4] += 1
    # Every tenth label is wrong, so that the accuracy is 0.9 and not 1.
    wrong = torch.where(torch.arange(60) % 10 == 0, (labels + 1) % 4, labels)
    job = hr.Job(
        model=Boxes,
        task=hr.tasks.multiclass(4),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        data=(images, labels),
        eval_data=(images, wrong),
        global_batch_size=20,
        epochs=1,
    )
    return job, Boxes().eval()


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.45), ("fp16", 0.6)])
def test_a_file_gets_smaller_and_its_metrics_are_recorded(kind: str, most: float, tmp_path: Path) -> None:
    job, model = boxes()
    whole = write_model(job, model, tmp_path / "whole", FACTS, choose(formats=("onnx",)))
    made = write_model(job, model, tmp_path / "m", FACTS, choose(quantize=kind))
    assert made.quantized is not None
    assert made.quantized.kind == kind
    assert made.quantized.before["accuracy"] == pytest.approx(0.9)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(job.eval_data[0]), job.eval_data[1]).item()
    assert made.quantized.before["loss"] == pytest.approx(loss, rel=1e-5)
    after = made.files["model.onnx"].metrics
    assert after["accuracy"] == pytest.approx(0.9, abs=0.04)
    assert after["loss"] == pytest.approx(loss, rel=0.1)
    assert after["loss"] != loss
    assert made.files["model.onnx"].bytes < most * whole.files["model.onnx"].bytes
    assert 0 < (made.files["model.onnx"].difference or 0) < 0.1
    assert signature.read(tmp_path / "m") == made
    # The server takes it as it is.
    facts, compute = open_program(tmp_path / "m")
    assert facts.quantized == made.quantized
    assert compute({"images": job.eval_data[0].numpy()})[0].shape == (60, 4)
    kinds = {each.op_type for each in onnx.load(tmp_path / "m" / "model.onnx").graph.node}
    assert ("QuantizeLinear" in kinds) == (kind == "int8")


def test_a_recurrent_model_keeps_any_length(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = char_lstm(11, embedding=16, hidden=32)
    text = torch.randint(0, 11, (6, 9))
    job = hr.Job(
        model=lambda: model,
        loss=lambda output, target: nn.functional.cross_entropy(output.flatten(0, 1), target.flatten()),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        data=(text, text),
        global_batch_size=4,
        epochs=1,
    )
    with pytest.raises(JobError, match="has LSTM, which onnxruntime computes in single precision alone"):
        write_model(job, model, tmp_path / "m", FACTS, choose(quantize="fp16"))
    made = write_model(job, model, tmp_path / "m", FACTS, choose(quantize="int8"))
    assert any("was not measured: there is no evaluation set" in note for note in made.notes)
    longer = torch.randint(0, 11, (2, 31))
    runner = open_runner(tmp_path / "m" / "model.onnx", made.inputs, made.outputs)
    with torch.no_grad():
        wanted = model(longer)
    assert torch.allclose(runner.run({"characters": longer})["output"], wanted, atol=0.01)


def test_rounding_that_changes_the_model_is_refused(tmp_path: Path) -> None:
    job, model = boxes()
    job = dataclasses.replace(job, task=None, loss=nn.functional.cross_entropy)
    with torch.no_grad():
        # Half precision ends at 65,504.
        model.blur.weight.fill_(1e6)
    with pytest.raises(JobError, match=r"model\.onnx in fp16 computes something else .* try --quantize int8"):
        write_model(job, model, tmp_path / "m", FACTS, choose(quantize="fp16"))
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_quantized_is_refused() -> None:
    assert choose(quantize="int8").formats == ("onnx",)
    with pytest.raises(UsageError, match="--quantize takes int8, fp16, got 'int4'"):
        choose(quantize="int4")
    for more in ({"formats": ("pt2",)}, {"target": "browser"}):
        with pytest.raises(UsageError, match="--quantize goes with"):
            choose(quantize="int8", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("task", "target"),
    [
        (hr.tasks.binary(), torch.tensor([0.0, 1.0, 1.0])),
        (hr.tasks.multilabel(1), torch.tensor([[0.0], [1.0], [1.0]])),
        (hr.tasks.regression(), torch.tensor([0.5, 1.0, 1.5])),
    ],
)
def test_metrics_are_those_of_the_output_before_the_activation(task: hr.tasks.Task, target: Tensor) -> None:
    model = nn.Linear(2, 1, bias=False)
    data = (torch.tensor([[1.0, 2.0], [3.0, -4.0], [0.5, 0.25]]), target)
    job = hr.Job(
        model=lambda: model,
        task=task,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        data=data,
        eval_data=data,
        global_batch_size=3,
        epochs=1,
    )
    with torch.no_grad():
        output = model(data[0])
    found = metrics_of(job, model, {"it": lambda inputs: {"output": task.activation(output)}})["it"]
    wanted = {"loss": task.loss, **task.metrics}
    assert found == pytest.approx({name: measure(output, target).item() for name, measure in wanted.items()}, rel=1e-5)
    assert measuring.measurable(job)


def test_metrics_of_torchmetrics_are_those_of_the_whole_set() -> None:
    job, model = boxes()
    f1 = Late("torchmetrics.classification").MulticlassF1Score(4)
    images, labels = job.eval_data
    programs = {
        "same": lambda inputs: {"output": model(*inputs.values()).detach().softmax(1)},
        "other": lambda inputs: {"output": model(*inputs.values()).detach().roll(1, 1).softmax(1)},
    }
    found = metrics_of(dataclasses.replace(job, metrics={"f1": f1}), model, programs)
    for name, program in programs.items():
        f1.reset()
        f1.update(program({"input": images})["output"], labels)
        assert found[name]["f1"] == pytest.approx(float(f1.compute()), abs=1e-6)
        assert list(found[name]) == ["loss", "accuracy", "f1"]
    assert found["same"]["f1"] > found["other"]["f1"]
