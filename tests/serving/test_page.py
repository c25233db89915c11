"""The page of the server: in headless Chromium its rules for content let its own script ask the server.

Under Node its script runs on elements that only remember what they are given.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from export.test_in_browsers import CHROMIUM, seen_by_chromium
from headrace.serving.page import page_text
from serving.folders import listening, looked_up, scaled


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_the_page_shows_the_models(tmp_path: Path) -> None:
    with listening(scaled(tmp_path / "a", 2.0), looked_up(tmp_path / "b")) as address:
        seen = seen_by_chromium(f"http://{address}/", tmp_path / "home")
    assert ">lookup</option>" in seen
    assert ">m</option>" in seen
    assert "takes user INT64 (any), item INT64 (any); returns row FP32 (any, 2), sum FP32 (any, 2)" in seen


STAND_INS = """
import assert from "node:assert/strict";
const elements = {}, sent = [];
const made = () => ({
  value: "", children: [],
  replaceChildren(...all) { this.children = all; },
  append(...all) { this.children.push(...all); },
  insertCell() { const cell = made(); this.children.push(cell); return cell; },
});
globalThis.document = { getElementById: (id) => (elements[id] ??= made()), createElement: made };
globalThis.Option = class { constructor(text) { this.text = text; } };
const served = [
  ["ids", { datatype: "INT64", shape: [-1] }],
  ["picture", { datatype: "FP32", shape: [-1, 3, 8, 8] }],
  ["bytes", { datatype: "UINT8", shape: [-1, 3, 8, 8] }],
  ["wide", { datatype: "FP32", shape: [-1, 1, 8, -1] }],
  ["mask", { datatype: "BOOL", shape: [-1, 2] }],
  ["fixed", { datatype: "FP32", shape: [1, 2] }],
].map(([name, form]) => ({ name, inputs: [{ name: "x", ...form }], outputs: [] }));
globalThis.fetch = async (path, options) => {
  if (options.body) sent.push(options.body);
  const answer = path.includes("fixed") ? { outputs: [[4, 2]] } : { predictions: [7] };
  const content = path === "/v2/models" ? { models: served } : answer;
  return { ok: true, status: 200, json: async () => content };
};
"""
CHECKS = """
const settled = () => new Promise((done) => setTimeout(done, 5));
await settled();
const choose = (name) => {
  elements.model.selectedIndex = served.findIndex((each) => each.name === name);
  elements.model.onchange();
};
const pictures = served.filter(({ name }) => (choose(name), !elements.picture.hidden)).map(({ name }) => name);
assert.deepEqual(pictures, ["picture"]);
choose("mask");
assert.equal(elements.values.value, '{"x":[false,false]}');
choose("ids");
elements.values.value = '{"x": 9007199254740993}';
await elements.ask.onclick();
assert.deepEqual(sent, ['{"instances": [{"x": 9007199254740993}]}']);
elements.values.value = '1], "signature_name": ["x"';
await elements.ask.onclick();
assert.equal(sent.length, 1);
assert.equal(elements.told.className, "error");
choose("fixed");
await elements.ask.onclick();
assert.equal(elements.answer.children[0].children[0].children[0], "[[4,2]]");
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_sends_what_is_written_and_shows_what_comes(tmp_path: Path) -> None:
    script = re.search(rb"<script>(.*?)</script>", page_text(), re.DOTALL)
    assert script is not None
    (tmp_path / "page.mjs").write_text(STAND_INS + script[1].decode().replace('"use strict";', "") + CHECKS)
    done = subprocess.run(["node", "page.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
