"""`model.tflite`, run by LiteRT's own interpreter; where it is not installed, only what is said of that."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import headrace as hr
from headrace.api.exporting import predict_with_folder
from headrace.errors import DataError, UnfitMachine, UsageError
from headrace.export import signature
from headrace.export.choice import choose
from headrace.export.mobile import litert
from headrace.export.signature import Signature
from headrace.export.writing import write_model
from headrace.models import char_lstm, fashion_cnn

FACTS = Signature(name="a", inputs=(), outputs=())
LITERT = choose("mobile", ("tflite",))
converts = pytest.mark.skipif(
    find_spec("litert_torch") is None or find_spec("ai_edge_litert") is None, reason="litert-torch is not installed"
)


def job_of(model: nn.Module, inputs: Tensor, **more: object) -> hr.Job:
    torch.manual_seed(0)
    return hr.Job(
        model=lambda: model,
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        data=(inputs, torch.arange(len(inputs)) % 10),
        global_batch_size=4,
        epochs=1,
        **more,  # type: ignore[arg-type]
    )


@converts
@pytest.mark.slow
def test_the_interpreter_computes_the_prediction_of_each_example(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, images = fashion_cnn().eval(), torch.rand(6, 1, 28, 28)
    made = write_model(job_of(model, images, task=hr.tasks.multiclass(10)), model, tmp_path / "m", FACTS, LITERT)
    assert made.inputs[0].shape == (1, 1, 28, 28)
    assert made.outputs[0].shape == (1, 10)
    assert any("a call takes one example, and the shapes are fixed" in note for note in made.notes)
    assert made.files["model.tflite"].difference is not None
    assert made.files["model.tflite"].difference <= 1e-4
    np.save(tmp_path / "x.npy", images.numpy())
    task, found = predict_with_folder(tmp_path / "m", tmp_path / "x.npy")
    with torch.no_grad():
        wanted = model(images).softmax(1).numpy()
    assert task == made.task
    assert np.allclose(found["output"], wanted, atol=1e-6)
    # What a phone calls the tensors.
    from ai_edge_litert.interpreter import Interpreter

    known = signature.open_file(tmp_path / "m", made, "model.tflite")
    names = Interpreter(str(known)).get_signature_list()["serving_default"]
    assert names == {"inputs": ["input"], "outputs": ["output"]}


@converts
@pytest.mark.slow
def test_a_recurrent_model_has_one_length(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, text = char_lstm(11, embedding=4, hidden=6).eval(), torch.randint(0, 11, (6, 5))
    job = job_of(model, text, loss=lambda output, target: output.sum())
    made = write_model(job, model, tmp_path / "m", FACTS, LITERT)
    assert made.inputs[0].shape == (1, 5)
    assert (made.files["model.tflite"].difference or 0.0) <= 1e-4


@pytest.mark.skipif(find_spec("litert_torch") is not None, reason="litert-torch is installed")
def test_without_it_what_to_install_is_named(tmp_path: Path) -> None:
    model = nn.Linear(4, 10)
    job = job_of(model, torch.rand(8, 4), task=hr.tasks.multiclass(10))
    told = r"are not installed: pip install 'headrace\[litert\]' brings them .*, or write the format pte"
    with pytest.raises(UnfitMachine, match=told):
        write_model(job, model, tmp_path / "m", FACTS, LITERT)
    with pytest.raises(UnfitMachine, match=told):
        litert.TfliteRunner(tmp_path / "model.tflite", (), ())
    assert list(tmp_path.iterdir()) == []


def test_whole_numbers_that_the_file_does_not_hold_are_refused() -> None:
    runner = litert.TfliteRunner.__new__(litert.TfliteRunner)
    runner._inputs, runner._outputs, runner._types = ["user"], ["twice"], {"user": np.int32}
    runner._call = lambda user: {"twice": 2 * user}
    assert runner.run({"user": torch.tensor([1, -(2**30)])})["twice"].tolist() == [2, -(2**31)]
    with pytest.raises(DataError, match=r"user has 4294967297, and a \.tflite file takes int32: from -2147483648 to 2"):
        runner.run({"user": torch.tensor([1, 2**32 + 1])})


def test_it_is_for_phones_and_not_quantized() -> None:
    assert LITERT.formats == ("tflite",)
    with pytest.raises(UsageError, match="the format tflite goes with --target mobile"):
        choose(formats=("onnx", "tflite"))
    with pytest.raises(UsageError, match="takes the format pte or tflite alone, got pte, tflite"):
        choose("mobile", ("pte", "tflite"))
    with pytest.raises(UsageError, match=r"--quantize goes with .* the format pte for phones"):
        choose("mobile", ("tflite",), quantize="int8")
