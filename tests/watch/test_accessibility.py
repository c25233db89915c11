"""axe-core finds nothing on the page that keeps people out, on wide and narrow screens, light and dark."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.spec.events import LAUNCHER, RunEnded
from watch.axe import faults
from watch.browser import CHROMIUM, browser
from watch.made import started, steps, write
from watch.test_page import PARTS, UNFOLD, hostile_run, server


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_axe_finds_no_fault(tmp_path: Path, real_python: None) -> None:
    hostile_run(tmp_path / "runs" / "a")
    write(tmp_path / "runs" / "b", started(), *steps(0, range(50)), RunEnded(LAUNCHER, 9.0, "ok"))
    with browser(tmp_path / "home") as tab, server(str(tmp_path / "runs"), "--port", "0") as (_, url):
        for width in (1280, 390):
            for dark in (False, True):
                tab.open(f"{url}/?{width}{dark}#run=runs/a&run=runs/b", width, dark)
                for id in PARTS:
                    tab.until(f"document.getElementById('{id}').hidden === false")
                tab.value(UNFOLD)
                assert faults(tab) == [], (width, dark)
