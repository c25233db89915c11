"""The page of the server, in headless Chromium: an example, a drawing, a token, the command for a terminal."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from headrace.export.signature import Signature, TensorForm
from serving.folders import listening, looked_up, scaled, written
from watch.axe import faults
from watch.browser import CHROMIUM, Tab, browser

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")]


def seen(folder: Path) -> Path:
    """Writes a model of grey images of 8 x 8, whose two outputs are how light the left and the right half are."""
    weight = np.zeros((64, 2), np.float32)
    columns = np.arange(64) % 8
    weight[columns < 4, 0] = weight[columns >= 4, 1] = 1 / 32
    graph = helper.make_graph(
        [helper.make_node("Flatten", ["x"], ["flat"]), helper.make_node("MatMul", ["flat", "weight"], ["y"])],
        "halves",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 1, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 2])],
        [helper.make_tensor("weight", TensorProto.FLOAT, weight.shape, weight.ravel())],
    )
    form = TensorForm("x", "float32", (-1, 1, 8, 8), (0.0,), (1.0,))
    facts = Signature("halves", (form,), (TensorForm("y", "float32", (-1, 2)),), "multiclass(2)", ("left", "right"))
    x = np.zeros((2, 1, 8, 8), np.float32)
    x[0, :, :, :4] = x[1, :, :, 4:] = 1
    return written(folder, graph, facts, {"x": x}, {"y": x.reshape(2, 64) @ weight})


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    with browser(tmp_path_factory.mktemp("browser")) as tab:
        yield tab


def text(tab: Tab, where: str) -> str:
    return str(tab.value(f"document.querySelector('{where}').textContent"))


def drawn(tab: Tab, *places: tuple[float, float]) -> None:
    """Draws with the mouse, in parts of the picture's width and height."""
    left, top, width, height = tab.value(
        "(({left, top, width, height}) => [left, top, width, height])"
        "(document.querySelector('canvas').getBoundingClientRect())"
    )
    kinds = ["mousePressed", *["mouseMoved"] * (len(places) - 1), "mouseReleased"]
    for kind, (x, y) in zip(kinds, [*places, places[-1]], strict=True):
        where = {"x": left + width * x, "y": top + height * y}
        tab.call("Input.dispatchMouseEvent", type=kind, **where, button="left", buttons=1, clickCount=1)


def test_a_model_answers_an_example_and_the_command_says_the_same(tab: Tab, tmp_path: Path) -> None:
    with listening(looked_up(tmp_path / "b")) as address:
        tab.open(f"http://{address}/", 1280)
        tab.until("document.getElementById('answer').textContent.includes('sum')")
        # Rows 1 and 3 of the table.
        assert "8" in text(tab, "#answer")
        command = text(tab, "#curl")
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=20)
        found = {each["name"]: each["data"] for each in json.loads(done.stdout)["outputs"]}
        assert found == {"row": [2.0, 3.0], "sum": [8.0, 10.0]}
        tab.value(
            "document.querySelector('textarea').value = '9007199254740993'; document.getElementById('run').click()"
        )
        tab.until("document.getElementById('error').textContent !== ''")
        assert "9007199254740993" in text(tab, "#curl")


def test_what_is_drawn_is_what_the_model_sees(tab: Tab, tmp_path: Path) -> None:
    with listening(seen(tmp_path / "a")) as address:
        tab.open(f"http://{address}/", 390)
        tab.until("document.querySelectorAll('meter').length === 2")
        assert text(tab, "#answer th") == "left"
        drawn(tab, (0.8, 0.1), (0.8, 0.9))
        tab.until("document.querySelector('#answer th').textContent === 'right'")
        values = [
            float(each) for each in tab.value("[...document.querySelectorAll('.number')].map((e) => e.textContent)")
        ]
        assert values[0] > 0.15
        assert values[1] == 0


def test_a_token_is_asked_for(tab: Tab, tmp_path: Path) -> None:
    with listening(scaled(tmp_path / "a", 2.0), token="secret") as address:
        tab.open(f"http://{address}/", 1280)
        tab.until("!document.getElementById('guard').hidden")
        tab.value("document.getElementById('token').value = 'secret'; document.getElementById('token').onchange()")
        tab.until("document.getElementById('answer').textContent.includes('4')")
        assert "$HEADRACE_SERVE_TOKEN" in text(tab, "#curl")


def test_axe_finds_no_serious_fault(tab: Tab, tmp_path: Path) -> None:
    with listening(seen(tmp_path / "a"), scaled(tmp_path / "b", 2.0)) as address:
        for width, dark in ((1280, False), (390, True)):
            tab.open(f"http://{address}/", width, dark)
            tab.until("document.querySelectorAll('meter').length === 2")
            assert [each for each in faults(tab) if each.startswith(("serious", "critical"))] == []
