"""`model.pte`, run by ExecuTorch's own runtime; where it is not installed, only what is said of that."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import headrace as hr
from headrace.errors import JobError, UnfitMachine, UsageError
from headrace.export.choice import choose
from headrace.export.mobile import executorch
from headrace.export.opening import open_runner
from headrace.export.signature import Signature
from headrace.export.traced_layers import pooled_by_slices
from headrace.export.writing import write_model
from headrace.models import fashion_cnn

FACTS = Signature(name="a", inputs=(), outputs=())
converts = pytest.mark.skipif(find_spec("executorch") is None, reason="executorch is not installed")


@pytest.fixture
def cnn() -> tuple[hr.Job, nn.Module]:
    torch.manual_seed(0)
    images, labels = torch.rand(40, 1, 28, 28), torch.arange(40) % 10
    model = fashion_cnn().eval()
    job = hr.Job(
        model=lambda: model,
        task=hr.tasks.multiclass(10),
        optimizer=functools.partial(torch.optim.SGD, lr=0.1),
        data=(images, labels),
        eval_data=(images, labels),
        global_batch_size=20,
        epochs=1,
    )
    return job, model


@converts
@pytest.mark.slow
def test_the_runtime_computes_the_prediction_and_int8_is_small(cnn: tuple[hr.Job, nn.Module], tmp_path: Path) -> None:
    job, model = cnn
    made = {
        kind: write_model(job, model, tmp_path / str(kind), FACTS, choose(target="mobile", quantize=kind))
        for kind in (None, "int8", "fp16")
    }
    whole, small, half = (each.files["model.pte"] for each in made.values())
    assert whole.difference is not None
    assert whole.difference <= 1e-4
    assert small.bytes <= 0.3 * whole.bytes
    assert half.bytes <= 0.55 * whole.bytes
    assert set(small.metrics) == {"loss", "accuracy"}
    signature = made[None]
    runner = open_runner(tmp_path / "None" / "model.pte", signature.inputs, signature.outputs)
    for count in (1, executorch.MOST_EXAMPLES):
        images = torch.rand(count, 1, 28, 28)
        with torch.no_grad():
            wanted = model(images).softmax(1)
        assert torch.allclose(runner.run({"input": images})["output"], wanted, atol=1e-6)


@pytest.mark.parametrize("size", [(7, 7), (3, 5), (1, 9), (4, None), (7, 1), 1])
def test_pooling_by_slices_is_that_of_torch(size: tuple[int, int | None] | int) -> None:
    images = torch.rand(2, 3, 7, 11)
    wanted = F.adaptive_max_pool2d(images, size)  # type: ignore[arg-type]
    with pooled_by_slices():
        assert torch.equal(nn.AdaptiveMaxPool2d(size)(images), wanted)
        with pytest.raises(NotImplementedError, match="where the largest"):
            F.adaptive_max_pool2d(images, 3, return_indices=True)


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("2.13.0+cpu", r"with torch 2\.13\.0 goes `pip install 'headrace\[mobile\]' 'executorch==1\.4\.\*'`"),
        ("2.11.1", r"for torch 2\.11\.1 no release of executorch was tried \(torch 2\.13 with executorch 1\.4, "),
    ],
)
def test_without_executorch_the_release_that_pairs_is_named(
    cnn: tuple[hr.Job, nn.Module], version: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executorch, "absent", lambda *names: list(names))
    monkeypatch.setattr(executorch, "installed", lambda name: None)
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(UnfitMachine, match=f"executorch and torchao are not installed; {told}"):
        write_model(*cnn, tmp_path / "m", FACTS, choose(target="mobile"))
    assert list(tmp_path.iterdir()) == []


def test_a_call_that_the_runtime_does_not_compute_is_told_with_what_else_may_do() -> None:
    class Method:
        def execute(self, inputs: list[torch.Tensor]) -> None:
            raise RuntimeError("method->execute() failed with error 0x12")

    runner = executorch.PteRunner.__new__(executorch.PteRunner)
    runner._inputs, runner._outputs, runner._name, runner._method = ["x"], ["y"], "model.pte", Method()
    with pytest.raises(
        JobError, match=r"cannot compute 5 examples with model\.pte: .* 0x12; .* --formats tflite, or ONNX"
    ):
        runner.run({"x": torch.zeros(5, 2)})


def test_the_format_and_the_target_go_together() -> None:
    assert choose(target="mobile", quantize="fp16").formats == ("pte",)
    with pytest.raises(UsageError, match="--target mobile takes the format pte or tflite alone, got onnx"):
        choose(target="mobile", formats=("onnx",))
    with pytest.raises(UsageError, match="pte goes with --target mobile"):
        choose(formats=("onnx", "pte"))
