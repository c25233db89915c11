"""The page in headless Chromium: hostile names, growing runs, a server that comes back, keys, small screens."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from headrace.spec.events import (
    LAUNCHER,
    Evaluated,
    Failed,
    Lost,
    Notice,
    ParametersAveraged,
    RunEnded,
    Saved,
    ServerStarted,
    WorkerEnded,
)
from headrace.watch import application
from watch.browser import CHROMIUM, browser
from watch.made import begun, started, steps, write
from watch.test_state import EVIL, served
from web.servers import command_server

FILES = Path(application.__file__).parent / "page"


@contextmanager
def server(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yields a server of its own process, and its address."""
    with command_server("watch", *arguments) as (process, told):
        yield process, told["url"]


def hostile_run(run_dir: Path) -> Path:
    """A run in which every text is hostile, with something for each part of the page."""
    write(run_dir, started(strategy=EVIL, workers=2), Notice(LAUNCHER, 0.1, EVIL), begun(0, host=EVIL), begun(1))
    write(run_dir, ServerStarted(2, 0.5, EVIL, 9, 1, 40))
    write(run_dir, *steps(0, range(300)), *steps(1, range(200)))
    write(run_dir, Evaluated(0, 16.0, 150, 0, 9, {"loss": 0.5, EVIL: 1.0}, 0.1), Saved(0, 17.0, 160, 1234, 0.1, 0.2))
    write(run_dir, *(served(1.0 + n, 1000 * n, {"0": 10 * n, "2": 5 * n}, 0.5 * n) for n in range(1, 30)))
    write(run_dir, *(ParametersAveraged(0, 2.0 + n, n, 5, 4, EVIL, 0.1 + 0.01 * n, 0.2) for n in range(20)))
    write(run_dir, Failed(1, 21.0, 7, EVIL, f"Traceback {EVIL}"), Lost(LAUNCHER, 21.1, 1, 0, EVIL, True))
    write(run_dir, WorkerEnded(1, 21.0, 9, 5, 300_000_000, 4000, 8000))
    return run_dir


TEXT = "document.body.innerText"
UNFOLD = "document.querySelectorAll('details').forEach((each) => { each.open = true; })"
PARTS = (
    "loss",
    "metric",
    "spent",
    "rate",
    "lanes",
    "staleness",
    "traffic",
    "drift",
    "servers",
    "memory",
    "saves",
    "journal",
)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_the_page_shows_a_run_as_it_happens(tmp_path: Path, real_python: None) -> None:
    runs = tmp_path / "runs"
    hostile_run(runs / "<img src=x>")
    write(runs / "b", started(), *steps(0, range(50)), RunEnded(LAUNCHER, 9.0, "ok"))
    with browser(tmp_path / "home") as tab:
        with server(str(runs), "--port", "0") as (process, url):
            port = url.rpartition(":")[2]
            tab.open(f"{url}/#run={quote('runs/<img src=x>')}")
            tab.until(f"{TEXT}.includes('Faults and notices') && {TEXT}.includes('Traffic by server')")
            _begins(tab)
            tab.value(UNFOLD)
            # Every hostile text is there as text, and none has become an element.
            assert tab.value("document.querySelectorAll('main script, main img, header img').length") == 0
            assert tab.value(f"{TEXT}.split('<script>alert(1)</script>').length") > 8
            for id in PARTS:
                tab.until(f"document.getElementById('{id}').hidden === false")
            assert tab.value("document.querySelectorAll('#loss path').length") == 1
            assert tab.value("document.querySelectorAll('#loss circle').length") == 1
            _follows(tab, runs)
            _keys(tab)
            _small(tab, url)
            for each in tab.asked:
                assert each.startswith(url) or each == "about:blank"
            assert tab.errors == []
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        tab.until("document.getElementById('status').textContent.includes('trying again')")
        write(runs / "<img src=x>", *steps(0, range(310, 400), 40.0))
        with server(str(runs), "--port", port):
            tab.until("document.getElementById('facts').innerText.includes('400,')")
            assert "trying again" not in tab.value("document.getElementById('status').textContent")


def _begins(tab: Any) -> None:
    """The page begins with a sentence, four values and the last faults; the strategy's own picture is a fourth one."""
    tab.until("document.getElementById('headline').textContent.includes('Running for ')")
    assert tab.value("document.querySelectorAll('#tiles dd').length") == 4
    assert tab.value("document.querySelectorAll('#faults li').length") == 2
    tab.until("document.querySelectorAll('#spent .bar').length == 2")
    tab.until("document.querySelector('#curves > :last-child').id == 'staleness'")
    assert tab.value("document.getElementById('staleness').open && !document.getElementById('drift').open")


def _follows(tab: Any, runs: Path) -> None:
    """The page shows what is written while it is open, without being asked."""
    before = tab.value("document.querySelector('#loss path').getAttribute('d')")
    write(runs / "<img src=x>", *steps(0, range(300, 310), 31.0), Notice(0, 32.0, "one more thing"))
    tab.until(f"{TEXT}.includes('one more thing')")
    tab.until("document.getElementById('facts').innerText.includes('310,')")
    tab.until(f"document.querySelector('#loss path').getAttribute('d') !== {json.dumps(before)}")
    # The curves of another run beside it.
    tab.value("document.querySelector('#runs input[aria-label$=\"runs/b\"]').click()")
    tab.until("document.querySelectorAll('#loss path').length == 2")


def _keys(tab: Any) -> None:
    """Values are read by keys alone."""
    tab.value("document.querySelector('#loss .chart > svg').focus()")
    tab.press("ArrowLeft")
    tab.press("ArrowLeft")
    tab.until("document.querySelector('#loss output').textContent.includes(' examples: ')")
    # Lanes are hidden when runs are chosen, and drawn some time after they have come: what is hidden takes no focus.
    tab.until("document.getElementById('lanes').hidden === false")
    tab.value("document.querySelector('#lanes-canvas canvas').focus()")
    tab.press("ArrowDown")
    tab.until("document.querySelector('#lanes-canvas output').textContent.startsWith('rank 1, from')")
    tab.value("document.querySelector('input[value=seconds]').click()")
    tab.until("document.querySelector('#loss svg[role]').getAttribute('aria-label').includes('of training')")
    names = "[...document.querySelectorAll('button, input, svg[tabindex], canvas, [role=group]')]"
    named = (
        "(it.getAttribute('aria-label') || it.getAttribute('aria-labelledby') || it.textContent || it.labels?.length)"
    )
    assert tab.value(f"{names}.filter((it) => !{named}).length") == 0


def _small(tab: Any, url: str) -> None:
    """On a telephone nothing is wider than the screen, in light and dark; colours change with the ground."""
    grounds = []
    for dark in (False, True):
        tab.open(tab.value("location.href"), 390, dark)
        tab.until(f"{TEXT}.includes('Faults and notices') && document.querySelectorAll('#loss path').length")
        assert tab.value("document.documentElement.scrollWidth") == 390
        grounds.append(tab.value("getComputedStyle(document.body).backgroundColor"))
    assert grounds[0] != grounds[1]


CHECKS = """
import assert from "node:assert/strict";
import { EventParser, follow } from "./stream.js";
import { bytes, duration, short, ticks } from "./chart.js";
import { LaneStore } from "./lanes.js";
const parser = new EventParser();
assert.deepEqual(parser.push('data: {"a"'), []);
assert.deepEqual(parser.push(': 1}\\n\\nevent: end\\nda'), [{ event: "message", data: '{"a": 1}' }]);
assert.deepEqual(parser.push("ta: {}\\n\\n"), [{ event: "end", data: "{}" }]);
assert.deepEqual([0, 0.03125, 4.5678, 4312.3, 431000, null].map(short), ["0", "0.0313", "4.57", "4312", "431k", "–"]);
assert.deepEqual([1e12, 9.99e14, 1e15, -3.2e38].map(short), ["1.00T", "999T", "1e+15", "-3.2e+38"]);
assert.deepEqual([12, 1.69e6, null].map(bytes), ["12 B", "1.69 MB", "–"]);
assert.deepEqual([0.0123, 8.31, 245, 11520].map(duration), ["12.3 ms", "8.3 s", "4 min 05 s", "3 h 12 min"]);
assert.deepEqual(ticks(0, 10, 4), [0, 5, 10]);
assert.deepEqual(ticks(3, 3, 4), [3]);
assert.deepEqual(ticks(0.6931471805599452, 0.6931471805599453, 4), [0.6931471805599452]);
let selected = [], asked = [];
globalThis.fetch = async (url) => (asked.push(url), new Response('data: {"name": "first"}\\n\\n'));
await new Promise((done) => {
  const message = ({ name }) => {
    selected = [name];
    if (asked.length > 1) done(stop());
  };
  const stop = follow(() => selected, "", { open() {}, lost() {}, refused: done, message });
});
assert.deepEqual(asked, ["/stream?", "/stream?run=first"]);
const store = new LaneStore();
store.take({ width_s: 0.5, ranks: [0], bins: [1, 2, 3], parts: [[1], [2], [3]] }, true, 2);
assert.deepEqual([...store.bins.keys()], [2, 3]);
store.take({ width_s: 1, ranks: [0], bins: [1], parts: [[4]] }, false, 2);
assert.deepEqual([...store.bins], [[1, [4]]]);
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
def test_the_script_reads_streams_and_numbers(tmp_path: Path) -> None:
    for name in ("stream.js", "chart.js", "lanes.js"):
        shutil.copy(FILES / name, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "checks.mjs").write_text(CHECKS)
    done = subprocess.run(["node", "checks.mjs"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
