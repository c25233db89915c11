"""Small model folders, as `headrace export` writes them, without torch; and requests to a server in this process."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import uvicorn
from onnx import TensorProto, helper
from safetensors.numpy import save_file

from headrace.export import signature
from headrace.export.signature import Artefact, Signature, TensorForm
from headrace.serving.application import PredictionServer
from headrace.serving.settings import ServeSettings
from web.servers import http_scope

INPUTS = (TensorForm("x", "float32", (-1, 3)),)
OUTPUTS = (TensorForm("y", "float32", (-1, 3)),)


def scaled(folder: Path, factor: float, name: str = "m") -> Path:
    """Writes a model that multiplies: y = factor * x."""
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "factor"], ["y"])],
        "scaled",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor("factor", TensorProto.FLOAT, [], [factor])],
    )
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    return written(folder, graph, Signature(name, INPUTS, OUTPUTS), {"x": x}, {"y": x * np.float32(factor)})


def looked_up(folder: Path, name: str = "lookup") -> Path:
    """Writes a model of two whole numbers an example: rows of a table, and their sum."""
    table = np.arange(20, dtype=np.float32).reshape(10, 2)
    graph = helper.make_graph(
        [
            helper.make_node("Gather", ["table", "user"], ["u"]),
            helper.make_node("Gather", ["table", "item"], ["i"]),
            helper.make_node("Add", ["u", "i"], ["sum"]),
            helper.make_node("Identity", ["u"], ["row"]),
        ],
        "lookup",
        [helper.make_tensor_value_info(each, TensorProto.INT64, ["batch"]) for each in ("user", "item")],
        [helper.make_tensor_value_info(each, TensorProto.FLOAT, ["batch", 2]) for each in ("row", "sum")],
        [helper.make_tensor("table", TensorProto.FLOAT, table.shape, table.ravel())],
    )
    forms = tuple(TensorForm(each, "int64", (-1,)) for each in ("user", "item"))
    found = tuple(TensorForm(each, "float32", (-1, 2)) for each in ("row", "sum"))
    user, item = np.array([1, 2]), np.array([3, 4])
    outputs = {"row": table[user], "sum": table[user] + table[item]}
    return written(folder, graph, Signature(name, forms, found), {"user": user, "item": item}, outputs)


def written(folder: Path, graph: Any, facts: Signature, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> Path:
    folder.mkdir(parents=True)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(model, folder / "model.onnx")
    tensors = {f"input/{name}": array for name, array in inputs.items()}
    save_file(tensors | {f"output/{name}": array for name, array in outputs.items()}, folder / "sample.safetensors")
    return signed(folder, facts)


def signed(folder: Path, facts: Signature) -> Path:
    """Writes the signature of the files that are there."""
    files = {
        path.name: Artefact(path.stat().st_size, signature.digest(path))
        for path in folder.iterdir()
        if path.name != signature.NAME
    }
    fields = {name: getattr(facts, name) for name in ("name", "inputs", "outputs", "task", "labels")}
    signature.write(folder, Signature(**fields, files=files))
    return folder


@dataclass(frozen=True)
class Answered:
    """Status, headers and body of an answer."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)


class Client:
    """Asks a server in this process."""

    def __init__(self, server: PredictionServer) -> None:
        self.server = server

    async def ask(
        self, path: str, content: Any = None, headers: Mapping[str, str] | None = None, method: str | None = None
    ) -> Answered:
        """Sends a request: POST where there is content, bytes or what becomes JSON, else GET."""
        body = content if isinstance(content, bytes) else b"" if content is None else json.dumps(content).encode()
        fields = {"host": "localhost:8000", **(headers or {})}
        scope = http_scope(method or ("GET" if content is None else "POST"), path, fields)
        came = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[Any] = []

        async def receive() -> Any:
            return came.pop() if came else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        await self.server(scope, receive, send)
        found = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
        return Answered(sent[0]["status"], found, b"".join(each.get("body", b"") for each in sent[1:]))

    async def infer(self, values: Any, model: str = "m", **more: Any) -> Answered:
        """Asks for predictions of examples of the model `scaled`."""
        tensor = {"name": "x", "datatype": "FP32", "shape": list(np.shape(values)), "data": values}
        return await self.ask(f"/v2/models/{model}/infer", {"inputs": [tensor], **more})


@asynccontextmanager
async def serving(*folders: Path, watch: bool = False, **settings: Any) -> AsyncIterator[Client]:
    """Yields a client of a server that has loaded the folders."""
    server = PredictionServer(folders, ServeSettings(**settings))
    await server.load()
    watching = asyncio.create_task(server.catalog.watch()) if watch else None
    try:
        yield Client(server)
    finally:
        if watching:
            watching.cancel()
        await server.catalog.close()


@contextmanager
def listening(*folders: Path, **settings: Any) -> Iterator[str]:
    """Yields the address of a server in a thread of this process, "localhost:40000"."""
    server = uvicorn.Server(
        uvicorn.Config(PredictionServer(folders, ServeSettings(**settings)), port=0, log_config=None, ws="none")
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until = time.monotonic() + 30
        while not server.started:
            assert thread.is_alive(), "the server has ended"
            assert time.monotonic() < until
            time.sleep(0.005)
        yield f"localhost:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
