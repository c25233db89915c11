"""Files for other servers are in the form that these read."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import UsageError
from headrace.export.deployment import triton_config, write_deployment
from headrace.export.signature import Artefact, Signature, TensorForm

FACTS = Signature(
    "Digits_a",
    (TensorForm("image", "float32", (-1, 1, 8, 8)), TensorForm("user", "int64", (-1,))),
    (TensorForm("output", "float32", (-1, 10)),),
    files={"model.onnx": Artefact(5, ""), "model.onnx.data": Artefact(9, ""), "model.pt2": Artefact(3, "")},
)


def parsed(config: str) -> Any:
    """Reads a config with the messages of Triton's own client, whose package would import gRPC."""
    text_format = pytest.importorskip("google.protobuf.text_format")
    client = importlib.util.find_spec("tritonclient")
    assert client is not None
    assert client.origin is not None
    path = Path(client.origin).parent / "grpc" / "model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("model_config_pb2", path)
    assert spec is not None
    assert spec.loader is not None
    messages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(messages)
    return text_format.Parse(config, messages.ModelConfig()), messages


def test_triton_reads_its_config() -> None:
    config, messages = parsed(triton_config(FACTS))
    assert (config.name, config.backend, config.max_batch_size) == ("Digits_a", "onnxruntime", 32)
    image, user = config.input
    assert (image.name, image.data_type, list(image.dims)) == ("image", messages.TYPE_FP32, [1, 8, 8])
    assert (list(user.dims), user.HasField("reshape"), list(user.reshape.shape)) == ([1], True, [])
    assert list(config.output[0].dims) == [10]
    assert config.dynamic_batching.max_queue_delay_microseconds == 2000
    fixed = Signature("a", (TensorForm("x", "bool", (4, 2)),), (TensorForm("y", "float16", (4,)),))
    config, messages = parsed(triton_config(fixed))
    assert (config.max_batch_size, list(config.input[0].dims), list(config.output[0].dims)) == (0, [4, 2], [4])
    assert not config.HasField("dynamic_batching")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in FACTS.files:
        (tmp_path / name).write_text(name)
    return tmp_path


def test_a_repository_for_triton(folder: Path) -> None:
    where, advice = write_deployment(folder, FACTS, "triton")
    assert advice == f"tritonserver --model-repository {where}"
    found = sorted(str(path.relative_to(where)) for path in where.rglob("*") if path.is_file())
    assert found == ["Digits_a/1/model.onnx", "Digits_a/1/model.onnx.data", "Digits_a/config.pbtxt"]
    assert (where / "Digits_a" / "1" / "model.onnx").read_text() == "model.onnx"


def test_a_service_for_kserve(folder: Path) -> None:
    where, advice = write_deployment(folder, FACTS, "kserve")
    manifest = json.loads(where.read_text())
    assert (manifest["kind"], manifest["metadata"]["name"]) == ("InferenceService", "digits-a")
    model = manifest["spec"]["predictor"]["model"]
    assert (model["protocolVersion"], model["storageUri"]) == ("v2", "pvc://models/Digits_a")
    assert str(folder / "triton") in advice


def test_a_container(folder: Path) -> None:
    where, advice = write_deployment(folder, FACTS, "docker")
    lines = where.read_text().splitlines()
    assert lines[-1] == 'ENTRYPOINT ["headrace", "serve", "/model", "--host", "0.0.0.0", "--public"]'
    assert any(line.startswith("COPY model.onnx* ") for line in lines)
    assert "docker build -t digits_a" in advice


def test_other_servers_and_models_without_onnx_are_refused(folder: Path) -> None:
    with pytest.raises(UsageError, match="--for takes docker, kserve, triton, got 'torchserve'"):
        write_deployment(folder, FACTS, "torchserve")
    with pytest.raises(UsageError, match=r"needs model\.onnx"):
        write_deployment(folder, Signature("a", FACTS.inputs, FACTS.outputs), "triton")
