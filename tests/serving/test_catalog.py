"""Folders that are not what was exported are refused; versions come and go, and no request fails."""

from __future__ import annotations

import asyncio
import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from headrace.errors import DataError, HeadraceError, UsageError
from headrace.export import signature
from headrace.serving.catalog import Catalog
from headrace.serving.metrics import ServerMetrics
from headrace.serving.programs import open_program
from headrace.serving.settings import ServeSettings
from serving.folders import Client, scaled, serving, signed


def edited(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads((folder / signature.NAME).read_text())
    change(document)
    (folder / signature.NAME).write_text(json.dumps(document))


def linked(folder: Path) -> None:
    (folder / "model.onnx").rename(folder.parent / "elsewhere.onnx")
    (folder / "model.onnx").symlink_to(folder.parent / "elsewhere.onnx")


def another_digest(folder: Path) -> None:
    content = (folder / "model.onnx").read_bytes()
    (folder / "model.onnx").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def outside(folder: Path) -> None:
    """Weights in a file beside the folder, by the model's own record of where they are."""
    (folder.parent / "secret").write_bytes(struct.pack("<f", 2.0))
    model = onnx.load(folder / "model.onnx")
    (factor,) = model.graph.initializer
    factor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(factor).reshape(1), "factor"))
    factor.ClearField("raw_data")
    factor.data_location = TensorProto.EXTERNAL
    for key, value in (("location", "../secret"), ("offset", "0"), ("length", "4")):
        factor.external_data.add(key=key, value=value)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    signed(folder, signature.read(folder))


def other_program(folder: Path) -> None:
    scaled(folder.parent / "other", 3.0)
    (folder / "model.onnx").write_bytes((folder.parent / "other" / "model.onnx").read_bytes())
    signed(folder, signature.read(folder))


def piped(folder: Path) -> None:
    (folder / signature.NAME).unlink()
    os.mkfifo(folder / signature.NAME)


def long_header(folder: Path) -> None:
    (folder / "sample.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + bytes(100))
    signed(folder, signature.read(folder))


def listing(folder: Path, name: str) -> None:
    """One more file, which the server does not need."""
    edited(folder, lambda it: it["files"].update({name: it["files"]["model.onnx"]}))


def no_program(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(b"no model")
    signed(folder, signature.read(folder))


def custom_operator(folder: Path) -> None:
    graph = helper.make_graph(
        [helper.make_node("Strange", ["x"], ["y"], domain="elsewhere")],
        "strange",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 3])],
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("elsewhere", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=10), folder / "model.onnx")
    signed(folder, signature.read(folder))


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (linked, "is a link"),
        (piped, "it is no plain file"),
        (another_digest, "is not the file that was exported"),
        (outside, "cannot be run"),
        (other_program, r"computes y of its own sample 0\.5 off"),
        (long_header, r"has a header of 1,099,511,627,776 bytes, at most 1,048,576 are read"),
        (no_program, "cannot be run"),
        (custom_operator, "cannot be run"),
        (lambda folder: (folder / "model.onnx").unlink(), "is missing"),
        (lambda folder: (folder / "sample.safetensors").unlink(), "is missing"),
        (lambda folder: listing(folder, "../model.onnx"), "lists '../model.onnx', which is not a path inside"),
        (lambda folder: listing(folder, "/etc/passwd"), "lists '/etc/passwd', which is not a path inside"),
        (lambda folder: edited(folder, lambda it: it.update(files={})), "has neither model.onnx nor model.pt2"),
        (lambda folder: edited(folder, lambda it: it.update(inputs=[])), "has no inputs"),
        (lambda folder: edited(folder, lambda it: it["inputs"][0].update(dtype="object")), "numpy does not have"),
        (lambda folder: edited(folder, lambda it: it["inputs"][0].update(name="z")), "its signature says z float32"),
        (lambda folder: edited(folder, lambda it: it["inputs"][0].update(dtype="int8")), "its signature says x int8"),
    ],
)
def test_a_folder_that_is_not_what_was_exported_is_refused(
    tmp_path: Path, spoil: Callable[[Path], None], told: str
) -> None:
    folder = scaled(tmp_path / "a", 2.0)
    open_program(folder)
    spoil(folder)
    with pytest.raises(DataError, match=told):
        open_program(folder)


def test_a_torch_program_is_not_loaded_unless_it_is_trusted(tmp_path: Path) -> None:
    """What torch would unpickle and evaluate while it loads such a file comes from the author of the folder."""
    folder = scaled(tmp_path / "a", 2.0)
    (folder / "model.onnx").rename(folder / "model.pt2")
    signed(folder, signature.read(folder))
    with pytest.raises(DataError, match=r"has model\.pt2 and no model\.onnx; .* say --trust-pt2 where"):
        open_program(folder)


def test_folders_without_a_model_and_names_that_clash(tmp_path: Path) -> None:
    def catalog(*folders: Path) -> Catalog:
        return Catalog(folders, ServeSettings(), ServerMetrics())

    with pytest.raises(UsageError, match="does not exist"):
        catalog(tmp_path / "gone")
    with pytest.raises(DataError, match=r"nor folders 1, 2, \.\.\. with one"):
        catalog(tmp_path)
    first, second = scaled(tmp_path / "a", 1.0), scaled(tmp_path / "b", 2.0)
    with pytest.raises(UsageError, match="are both called m"):
        catalog(first, second)
    with pytest.raises(DataError, match="cannot be a model's name"):
        catalog(signed(second, replace(signature.read(second), name="../m")))
    assert sorted(catalog(first).models) == ["m"]


async def answer(client: Client, version: str = "") -> float:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 1, 1]}
    found = await client.ask(f"/v2/models/m{version}/infer", {"inputs": [tensor]})
    assert found.status == 200, found
    return float(found.document["outputs"][0]["data"][0])


def test_versions_come_and_go_and_no_request_fails(tmp_path: Path) -> None:
    models = tmp_path / "m"
    scaled(models / "1", 1.0)
    scaled(models / "2", 2.0)
    (models / "7").symlink_to(tmp_path)

    async def ask(client: Client, seen: list[float], until: float) -> None:
        while not seen or seen[-1] != until:
            seen.append(await answer(client))

    async def talk() -> list[float]:
        async with serving(models, watch=True, poll_s=0.02) as client:
            assert (await client.ask("/v2/models/m")).document["versions"] == ["1", "2"]
            assert (await answer(client, "/versions/1"), await answer(client, "/versions/2")) == (1.0, 2.0)
            seen: list[list[float]] = [[] for _ in range(8)]
            asking = [asyncio.create_task(ask(client, each, until=10.0)) for each in seen]
            broken = scaled(tmp_path / "next", 9.0)
            another_digest(broken)
            broken.rename(models / "9")
            while not client.server.catalog.models["m"].refused(9):
                await asyncio.sleep(0.01)
            scaled(tmp_path / "next", 10.0).rename(models / "10")
            await asyncio.wait_for(asyncio.gather(*asking), 30)
            # The two newest that can be used, and not the one that is broken.
            while "1" in (versions := (await client.ask("/v2/models/m")).document["versions"]):
                await asyncio.sleep(0.01)
            assert versions == ["2", "10"]
            return [value for each in seen for value in each]

    found = asyncio.run(asyncio.wait_for(talk(), 60))
    assert set(found) == {2.0, 10.0}


def test_the_repository_says_why_a_version_is_not_loaded_and_looks_when_it_is_asked(tmp_path: Path) -> None:
    models = tmp_path / "m"
    scaled(models / "1", 1.0)
    load = "/v2/repository/models/m/load"

    async def talk() -> None:
        # It would not look by itself for an hour.
        async with serving(models, watch=True, poll_s=3600.0) as client:

            async def index(**asked: bool) -> list[tuple[str, str, bool]]:
                rows = (await client.ask("/v2/repository/index", asked)).document
                return [(row["version"], row["state"], "digest" in row["reason"]) for row in rows]

            another_digest(scaled(models / "2", 2.0))
            assert await index() == [("1", "READY", False)]
            refused = await client.ask(load, b"")
            assert (refused.status, "version 2 of m is not loaded" in refused.document["error"]) == (400, True)
            assert await index() == [("1", "READY", False), ("2", "UNAVAILABLE", True)]
            assert await index(ready=True) == [("1", "READY", False)]
            assert await answer(client) == 1.0
            scaled(models / "3", 3.0)
            assert (await client.ask(load, {})).document == {}
            assert await answer(client) == 3.0
            assert await index() == [("1", "READY", False), ("3", "READY", False)]
            assert (await client.ask(load, {"parameters": {"config": "{}"}})).status == 400
            assert (await client.ask("/v2/repository/models/none/load", b"")).status == 404

    asyncio.run(asyncio.wait_for(talk(), 60))


def test_a_version_that_is_copied_while_it_is_read_is_loaded_at_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tmp_path / "m"
    scaled(models / "1", 1.0)
    copied = scaled(models / "2", 2.0)
    (copied / "model.onnx").rename(tmp_path / "model.onnx")

    def open_too_early(folder: Path, *given: Any) -> Any:
        try:
            return open_program(folder, *given)
        finally:
            if (tmp_path / "model.onnx").exists() and folder == copied:
                (tmp_path / "model.onnx").rename(copied / "model.onnx")

    monkeypatch.setattr("headrace.serving.catalog.open_program", open_too_early)

    async def talk() -> None:
        loaded = Catalog([models], ServeSettings(), ServerMetrics())
        (model,) = loaded.models.values()
        await loaded._update(model)
        assert sorted(model.versions) == [1]
        await loaded._update(model)
        assert sorted(model.versions) == [1, 2]
        await loaded.close()

    asyncio.run(talk())


def test_a_folder_that_cannot_be_used_at_the_start_is_said(tmp_path: Path) -> None:
    folder = scaled(tmp_path / "a", 2.0)
    another_digest(folder)

    async def talk() -> None:
        async with serving(folder):
            raise AssertionError("it must not start")

    with pytest.raises(HeadraceError, match="is not the file that was exported"):
        asyncio.run(talk())
