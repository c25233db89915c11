"""axe-core finds nothing on the page that keeps people out, on wide and narrow screens, light and dark."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from headrace.spec.events import LAUNCHER, RunEnded
from watch.browser import CHROMIUM, browser
from watch.made import started, steps, write
from watch.test_page import PARTS, hostile_run, server

ARCHIVE = Path.home() / ".cache" / "headrace" / "axe-core-4.14.1.tgz"
"""`npm pack axe-core@4.14.1` makes it."""

_FAULTS = "axe.run(document).then((it) => it.violations.map((each) => `${each.impact} ${each.id}`))"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.skipif(not ARCHIVE.is_file(), reason=f"needs {ARCHIVE}")
def test_axe_finds_no_fault(tmp_path: Path, real_python: None) -> None:
    hostile_run(tmp_path / "runs" / "a")
    write(tmp_path / "runs" / "b", started(), *steps(0, range(50)), RunEnded(LAUNCHER, 9.0, "ok"))
    with tarfile.open(ARCHIVE) as archive:
        member = archive.extractfile("package/axe.min.js")
        assert member is not None
        axe = member.read().decode()
    with browser(tmp_path / "home") as tab, server(str(tmp_path / "runs"), "--port", "0") as (_, url):
        for width in (1280, 390):
            for dark in (False, True):
                tab.open(f"{url}/?{width}{dark}#run=runs/a&run=runs/b", width, dark)
                for id in PARTS:
                    tab.until(f"document.getElementById('{id}').hidden === false")
                # Past the content rules, which let no other script in.
                tab.call("Runtime.evaluate", expression=f"{axe};0")
                tab.value("document.querySelector('#lanes details').open = true")
                assert tab.value(_FAULTS) == [], (width, dark)
