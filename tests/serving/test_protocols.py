"""Both protocols answer as their specifications say, and say what they expected of a wrong request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving.folders import Client, looked_up, scaled, serving

TENSOR = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}


def run(folders: tuple[Path, ...], talk: Callable[[Client], Awaitable[Any]], **settings: Any) -> Any:
    async def whole() -> Any:
        async with serving(*folders, **settings) as client:
            return await talk(client)

    return asyncio.run(whole())


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, ...]:
    return scaled(tmp_path / "a", 2.0), looked_up(tmp_path / "b")


def test_metadata_and_health(folders: tuple[Path, ...]) -> None:
    async def talk(client: Client) -> None:
        assert (await client.ask("/v2")).document["extensions"] == ["binary_tensor_data", "model_repository"]
        for path in ("/v2/health/live", "/v2/health/ready", "/v2/models/m/ready", "/v2/models/m/versions/1/ready"):
            assert (await client.ask(path)).status == 200
        assert (await client.ask("/v2/models/lookup")).document == {
            "name": "lookup",
            "versions": ["1"],
            "platform": "onnxruntime_onnx",
            "inputs": [{"name": name, "datatype": "INT64", "shape": [-1]} for name in ("user", "item")],
            "outputs": [{"name": name, "datatype": "FP32", "shape": [-1, 2]} for name in ("row", "sum")],
        }
        (status,) = (await client.ask("/v1/models/m")).document["model_version_status"]
        assert (status["version"], status["state"]) == ("1", "AVAILABLE")
        assert [each["name"] for each in (await client.ask("/v2/models")).document["models"]] == ["lookup", "m"]
        page = await client.ask("/")
        assert page.body.startswith(b"<!doctype html>")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        client.server.draining = True
        assert (await client.ask("/v2/health/ready")).status == 503
        assert (await client.ask("/v2/health/live")).status == 200

    run(folders, talk)


def test_values_nested_or_flat_and_the_id_comes_back(folders: tuple[Path, ...]) -> None:
    async def talk(client: Client) -> None:
        large = await client.infer([[2**63, 2**64 - 1, 1]])
        assert large.document["outputs"][0]["data"] == pytest.approx([2.0**64, 2.0**65, 2.0])
        nested = await client.infer([[1, 2, 3], [4, 5, 6]], id="seven")
        assert nested.document == {
            "model_name": "m",
            "model_version": "1",
            "id": "seven",
            "outputs": [{"name": "y", "datatype": "FP32", "shape": [2, 3], "data": [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]}],
        }
        flat = await client.ask("/v2/models/m/versions/1/infer", {"inputs": [TENSOR]})
        assert flat.document["outputs"][0]["data"] == [2.0, 4.0, 6.0]
        inputs = [{"name": name, "datatype": "INT64", "shape": [2], "data": [5, 6]} for name in ("item", "user")]
        asked = {"inputs": inputs, "outputs": [{"name": "sum"}]}
        (only,) = (await client.ask("/v2/models/lookup/infer", asked)).document["outputs"]
        assert (only["name"], only["data"]) == ("sum", [20.0, 22.0, 24.0, 26.0])

    run(folders, talk)


def test_binary_tensors_both_ways(folders: tuple[Path, ...]) -> None:
    values = np.array([[1, 2, 3]], np.float32)

    async def talk(client: Client) -> None:
        tensor = {"name": "x", "datatype": "FP32", "shape": [1, 3], "parameters": {"binary_data_size": 12}}
        head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        path, header = "/v2/models/m/infer", {"inference-header-content-length": str(len(head))}
        found = await client.ask(path, head + values.tobytes(), header)
        length = int(found.headers["inference-header-content-length"])
        (output,) = json.loads(found.body[:length])["outputs"]
        assert output["parameters"]["binary_data_size"] == 12
        assert np.frombuffer(found.body[length:], np.float32).tolist() == [2, 4, 6]
        for count in (0, 11, 13):
            refused = await client.ask(path, head + bytes(count), header)
            told = f"{count} bytes of binary data, the inputs' binary_data_size add up to 12"
            assert (refused.status, refused.document["error"]) == (400, told)
        for length_text in ("-1", "0", "x", "²", str(len(head) + 100)):
            refused = await client.ask(path, head, {"inference-header-content-length": length_text})
            assert refused.status == 400
        nan = values.copy()
        nan[0, 1] = np.nan
        refused = await client.ask(path, head + nan.tobytes(), header)
        assert refused.status == 422
        assert "returned NaN or infinity in y for 1 of 1 examples" in refused.document["error"]

    run(folders, talk)


def test_the_form_of_tensorflow_serving(folders: tuple[Path, ...]) -> None:
    async def talk(client: Client) -> None:
        path = "/v1/models/m:predict"
        assert (await client.ask(path, {"instances": [[1, 2, 3]]})).document == {"predictions": [[2.0, 4.0, 6.0]]}
        assert (await client.ask(path, {"inputs": {"x": [[1, 2, 3]]}})).document == {"outputs": [[2.0, 4.0, 6.0]]}
        rows = {"instances": [{"user": 1, "item": 2}], "signature_name": "serving_default"}
        found = await client.ask("/v1/models/lookup/versions/1:predict", rows)
        assert found.document == {"predictions": [{"row": [2.0, 3.0], "sum": [6.0, 8.0]}]}

    run(folders, talk)


WRONG = [
    ("/v2/models/gone/infer", {"inputs": [TENSOR]}, 404, "there is no model 'gone'; there are lookup, m"),
    ("/v2/models/m/versions/2/infer", {"inputs": [TENSOR]}, 404, "no version '2'; loaded: 1"),
    ("/v2/models/m/versions/x/infer", {"inputs": [TENSOR]}, 404, "no version 'x'"),
    ("/v2/models/m/infer", b"{", 400, "not JSON"),
    ("/v2/models/m/infer", b"\xff", 400, "not JSON"),
    ("/v2/models/m/infer", b"[]", 400, "expected a JSON object, got a list"),
    ("/v2/models/m/infer", b"[" * 100_000, 400, "not JSON"),
    ("/v2/models/m/infer", b"[" * 200_000, 413, "lists, objects and texts"),
    ("/v2/models/m/infer", {"inputs": []}, 400, "expected x float32 (any, 3); got no input"),
    ("/v2/models/m/infer", {"inputs": 3}, 400, "inputs is a whole number, expected a list"),
    ("/v2/models/m/infer", {"inputs": [3]}, 400, "inputs is a list of objects"),
    ("/v2/models/m/infer", {"inputs": [TENSOR, TENSOR]}, 400, "got 'x', 'x'"),
    ("/v2/models/m/infer", {"inputs": [TENSOR], "id": 3}, 400, "id is a whole number, expected a text"),
    ("/v2/models/m/infer", {"inputs": [TENSOR], "outputs": [{"name": "z"}]}, 400, "expected y float32 (any, 3)"),
    ("/v2/models/m/infer", {"inputs": [TENSOR | {"name": "z"}]}, 400, "expected x float32 (any, 3); got 'z'"),
    ("/v2/models/m/infer", {"inputs": [TENSOR | {"datatype": "INT8"}]}, 400, "datatype 'INT8', expected 'FP32'"),
    ("/v2/models/m/infer", {"inputs": [TENSOR | {"shape": [3]}]}, 400, "expected x float32 (any, 3), got the shape (3"),
    ("/v2/models/m/infer", {"inputs": [TENSOR | {"shape": [2, 3]}]}, 400, "has 6 elements, data has 3"),
    ("/v2/models/m/infer", {"inputs": [TENSOR | {"shape": [-1, 3]}]}, 400, "expected a shape of whole numbers"),
    ("/v2/models/m/infer", {"inputs": [TENSOR | {"shape": [0, 3], "data": []}]}, 400, "there is no example"),
    ("/v2/models/m/infer", {"inputs": [TENSOR | {"shape": [0, 2**62], "data": []}]}, 400, "the shape is too large"),
    ("/v2/models/m/infer", {"inputs": [TENSOR | {"data": [1, 2, "a"]}]}, 400, "got numbers, text"),
    ("/v2/models/m/infer", {"inputs": [TENSOR | {"data": [1, 2, None]}]}, 400, "got null, numbers"),
    ("/v2/models/m/infer", {"inputs": [TENSOR | {"data": [True, True, False]}]}, 400, "got true and false"),
    ("/v2/models/m/infer", {"inputs": [TENSOR | {"data": [[1, 2], [3]]}]}, 400, "lists of different lengths"),
    ("/v2/models/m/infer", {"inputs": [TENSOR | {"data": [1e39, 2, 3]}]}, 400, "a number that float32 does not hold"),
    ("/v2/models/m/infer", {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3]}]}, 400, "has neither data"),
    ("/v1/models/m:predict", {"instances": [[1, 2]]}, 400, "expected x float32 (any, 3), got the shape (1, 2)"),
    ("/v1/models/m:predict", {"instances": []}, 400, "expected x float32 (any, 3)"),
    ("/v1/models/m:predict", {"instances": [1, {"x": 2}]}, 400, "not both"),
    ("/v1/models/m:predict", {}, 400, 'expected either "instances"'),
    ("/v1/models/m:predict", {"instances": [[1, 2, 3]], "signature_name": "s"}, 400, "signature_name 's'"),
    ("/v1/models/lookup:predict", {"instances": [{"user": 1}]}, 400, "user int64 (any), item int64 (any); got 'user'"),
    ("/v1/models/lookup:predict", {"instances": [{"user": 1, "item": 10}]}, 422, "out of data bounds, idx=10"),
    ("/v1/models/lookup:predict", {"instances": [{"user": 1, "item": 0.5}]}, 400, "a number that int64 does not hold"),
    ("/v1/models/lookup:predict", {"inputs": {"user": [1, 2], "item": [1]}}, 400, "as many examples, got user 2, item"),
    ("/nothing", None, 404, "there is no /nothing"),
    ("/v2/models/m/infer", None, 405, "POST is"),
]


def test_a_wrong_request_is_told_what_was_expected(folders: tuple[Path, ...]) -> None:
    async def talk(client: Client) -> None:
        for path, content, status, told in WRONG:
            found = await client.ask(path, content)
            assert (found.status, told in found.document["error"]) == (status, True), (path, content, found)

    run(folders, talk)


def test_bodies_are_bounded(folders: tuple[Path, ...]) -> None:
    async def talk(client: Client) -> None:
        found = await client.ask("/v2/models/m/infer", b" " * 1001)
        assert (found.status, found.document["error"]) == (413, "a request has at most 1,000 bytes")
        found = await client.ask("/v2/models/m/infer", b"{}", {"content-length": "²"})
        assert found.status == 400
        found = await client.ask("/v2/models/m/infer", b"{}", {"content-length": "1001"})
        assert found.status == 413

    run(folders, talk, max_body_bytes=1000)


def test_a_page_of_another_site_gets_no_prediction_computed(folders: tuple[Path, ...]) -> None:
    async def talk(client: Client) -> None:
        content = {"instances": [[1.0, 2.0, 3.0]]}
        for site, status in (("cross-site", 403), ("same-origin", 200), ("same-site", 200), ("none", 200)):
            found = await client.ask("/v1/models/m:predict", content, {"sec-fetch-site": site})
            assert found.status == status
        # A link may lead here from anywhere.
        assert (await client.ask("/v2", headers={"sec-fetch-site": "cross-site"})).status == 200

    run(folders, talk)


def test_other_hosts_names_and_missing_tokens_are_refused(folders: tuple[Path, ...]) -> None:
    async def talk(client: Client) -> None:
        assert (await client.ask("/v2", headers={"host": "evil.example"})).status == 403
        assert (await client.ask("/v2", headers={"host": "[::1]:8000"})).status == 401
        assert (await client.ask("/v2", headers={"authorization": "Bearer wrong"})).status == 401
        assert (await client.ask("/v2", headers={"authorization": "Bearer right"})).status == 200
        assert (await client.ask("/v2/health/live")).status == 200
        assert (await client.ask("/metrics")).status == 401

    run(folders, talk, token="right")
