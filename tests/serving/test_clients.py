"""Clients that others wrote: Triton's for the Open Inference Protocol, schemathesis for the OpenAPI document."""

from __future__ import annotations

import os
import warnings
from typing import Any

import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from serving.folders import listening, looked_up, scaled

EXAMPLES = int(os.environ.get("HEADRACE_SERVE_EXAMPLES", "8"))
"""Requests of each operation."""
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    unsupported_method,
]
"""All that OpenAPI can say. That a shape multiplies to the number of values is not expressible, so that some requests
that fit the schema are refused."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("models")
    with listening(scaled(folder / "a", 2.0), looked_up(folder / "b")) as address:
        yield address


@pytest.mark.slow
@pytest.mark.parametrize("binary", [False, True])
def test_the_client_of_triton(address: str, binary: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its own dependencies warn while they are imported
        import tritonclient.http as triton

    client = triton.InferenceServerClient(address)
    try:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("m")
        assert client.is_model_ready("m", "1")
        assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
        listed = {(each["name"], each["version"], each["state"]) for each in client.get_model_repository_index()}
        assert listed == {("m", "1", "READY"), ("lookup", "1", "READY")}
        client.load_model("m")
        with pytest.raises(triton.InferenceServerException, match="start the server without it"):
            client.unload_model("m")
        with pytest.raises(triton.InferenceServerException, match="parameters and files in a request are refused"):
            client.load_model("m", config="{}")
        metadata = client.get_model_metadata("lookup", "1")
        inputs = []
        for form, value in zip(metadata["inputs"], (1, 2), strict=True):
            inputs.append(triton.InferInput(form["name"], [3], form["datatype"]))
            inputs[-1].set_data_from_numpy(np.full(3, value), binary_data=binary)
        wanted = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("sum", "row")]
        found = client.infer("lookup", inputs, outputs=wanted, request_id="7")
        assert found.get_response()["id"] == "7"
        assert found.as_numpy("row").tolist() == [[2.0, 3.0]] * 3
        assert found.as_numpy("sum").tolist() == [[6.0, 8.0]] * 3
        # Without named outputs, all come as binary data.
        assert client.infer("lookup", inputs).as_numpy("sum").tolist() == [[6.0, 8.0]] * 3
        wrong = triton.InferInput("x", [1, 3], "FP64")
        wrong.set_data_from_numpy(np.ones((1, 3)), binary_data=binary)
        with pytest.raises(triton.InferenceServerException, match="datatype 'FP64', expected 'FP32'"):
            client.infer("m", [wrong])
    finally:
        client.close()


@pytest.mark.slow
def test_every_operation_of_the_document_answers_as_it_says(address: str) -> None:
    document = schemathesis.openapi.from_url(f"http://{address}/openapi.json")
    operations = [each.ok() for each in document.get_all_operations()]
    assert len(operations) > 20
    for operation in operations:

        @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy())
        def ask(case: Any) -> None:
            case.call_and_validate(checks=CHECKS)

        ask()
