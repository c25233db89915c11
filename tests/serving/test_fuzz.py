"""Whatever a body holds, the answer is a prediction or says what is wrong: never a defect of the server."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from belongings import private_bytes
from serving.bodies import bodies
from serving.folders import looked_up, scaled, serving

TENSOR = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [0, 0, 0]}
CASES = int(os.environ.get("HEADRACE_SERVE_BODIES", "1500"))
_MOST_GROWTH_BYTES = 64 << 20


@pytest.mark.slow
def test_no_body_gets_more_than_an_answer(tmp_path: Path) -> None:
    async def talk() -> dict[int, int]:
        statuses: dict[int, int] = {}
        async with serving(scaled(tmp_path / "a", 2.0), looked_up(tmp_path / "b")) as client:
            before = 0
            for number, (path, content, headers) in enumerate(bodies(np.random.default_rng(7), CASES)):
                found = await client.ask(path, content, headers)
                assert found.status in (200, 400, 404, 413, 422), (path, content[:300], found)
                statuses[found.status] = statuses.get(found.status, 0) + 1
                if found.status != 200:
                    assert list(found.document) == ["error"]
                    assert "Traceback" not in found.document["error"]
                    assert len(found.body) < 2000
                if number == 50:
                    before = private_bytes()
            assert private_bytes() - before < _MOST_GROWTH_BYTES
        return statuses

    found = asyncio.run(talk())
    # Some fit, so that not all end at the first check.
    assert found[200] > CASES / 50
    assert found[400] > CASES / 4


@pytest.mark.parametrize(
    "content",
    [
        json.dumps({"inputs": [TENSOR | {"data": ["a" * 50_000] + [""] * 60_000}]}),
        json.dumps({"inputs": [TENSOR | {"shape": [1 << 62, 3]}]}),
        json.dumps({"inputs": [TENSOR | {"shape": [1] * 40}]}),
        json.dumps({"instances": [[]] * 60_000}),
        '{"instances": ' + "[" * 900 + "1" + "]" * 900 + "}",
        '{"instances": [1e999999999]}',
        '{"instances": [' + "9" * 100_000 + "]}",
    ],
)
def test_small_bodies_take_little_memory(tmp_path: Path, content: str) -> None:
    async def talk() -> Any:
        async with serving(scaled(tmp_path / "a", 2.0)) as client:
            before = private_bytes()
            for path in ("/v2/models/m/infer", "/v1/models/m:predict"):
                found = await client.ask(path, content.encode())
                assert found.status in (400, 413), found
            assert private_bytes() - before < _MOST_GROWTH_BYTES

    asyncio.run(talk())
