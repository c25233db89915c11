"""Bodies of requests, from right to random: for tests and the benchmark."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

_PATHS = ("/v2/models/m/infer", "/v1/models/m:predict", "/v2/models/lookup/infer", "/v1/models/lookup:predict")
_ODD: tuple[Any, ...] = (
    *(None, True, "", "x", "\ud800", -1, 0, 1, 10, 2**31, 2**63, -(2**63), 2**64, 10**40, 0.5, 1e38, 1e39, 1e308),
    *([], [[]], [[], [1]], {}, {"x": 1}, [None], ["1"], [1, [2]], "BYTES", "FP16"),
)


def bodies(random: np.random.Generator, count: int) -> Iterator[tuple[str, bytes, dict[str, str]]]:
    """Yields path, content and headers of requests for the models `scaled` and `looked_up`."""
    for _ in range(count):
        path = _PATHS[random.integers(len(_PATHS))]
        document = _right(random, path)
        headers: dict[str, str] = {}
        for _ in range(random.integers(4)):
            _spoil(random, document)
        content = json.dumps(document).encode()
        kind = random.integers(6)
        if kind == 0:
            content = _flipped(random, content)
        elif kind == 1:
            data = random.integers(0, 256, random.integers(64), np.uint8).tobytes()
            length = len(content) if random.integers(2) else int(random.integers(-2, 400))
            headers["inference-header-content-length"] = str(length)
            content += data
        elif kind == 2 and random.integers(4) == 0:
            content = random.integers(0, 256, random.integers(200), np.uint8).tobytes()
        yield path, content, headers


def _right(random: np.random.Generator, path: str) -> Any:
    rows = int(random.integers(1, 4))
    if "lookup" in path:
        values = {name: random.integers(-12, 12, rows).tolist() for name in ("user", "item")}
        kind = "INT64"
    else:
        values = {"x": random.normal(0, 10, (rows, 3)).tolist()}
        kind = "FP32"
    if path.endswith("infer"):
        return {
            "id": "a",
            "inputs": [
                {"name": name, "datatype": kind, "shape": list(np.shape(each)), "data": each, "parameters": {}}
                for name, each in values.items()
            ],
        }
    if random.integers(2):
        return {"inputs": values}
    return {"instances": [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]}


def _spoil(random: np.random.Generator, document: Any) -> None:
    """Changes one value somewhere in a document."""
    node = document
    while isinstance(node, dict | list) and node:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = keys[random.integers(len(keys))]
        inner = node[key]
        if not isinstance(inner, dict | list) or not inner or random.integers(4) == 0:
            kind = random.integers(4)
            if kind == 0:
                del node[key]
            elif kind == 1 and isinstance(node, list):
                node.append(inner)
            elif kind == 2 and isinstance(node, dict):
                node[str(_ODD[random.integers(len(_ODD))])] = inner
            else:
                node[key] = copy.deepcopy(_ODD[random.integers(len(_ODD))])
            return
        node = inner


def _flipped(random: np.random.Generator, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(random.integers(1, 8)):
        changed[random.integers(len(changed))] = random.integers(256)
    return bytes(changed)
