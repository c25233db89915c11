"""The page in headless Chromium: two screens for five strategies, no overflow, no request, hostile names, axe-core."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from headrace.report.model.summary import summarize
from headrace.report.model.verdict import References
from headrace.report.views.page import write_page
from watch.axe import faults
from watch.browser import CHROMIUM, browser
from watch.test_page import hostile_run

FIVE = ("one_device", "mirrored", "central_storage", "parameter_averaging", "parameter_server")
SCREENS = 2 * 900
HOSTILE = "<img src=x onerror=alert(1)>"

OVERLAPS = """(() => {
  const found = [];
  const beside = (a, b) => a.right < b.left + 0.5 || b.right < a.left + 0.5;
  const meet = (a, b) => !beside(a, b) && a.top < b.bottom - 2.5 && b.top < a.bottom - 2.5;
  for (const picture of document.querySelectorAll('svg[role=img]')) {
    const frame = picture.getBoundingClientRect();
    const words = [...picture.querySelectorAll('text')].map(each => [each, each.getBoundingClientRect()]);
    const bars = [...picture.querySelectorAll('rect')].map(each => each.getBoundingClientRect());
    words.forEach(([each, place], index) => {
      if (place.left < frame.left - 1 || place.right > frame.right + 1) found.push('outside: ' + each.textContent);
      for (const [other, there] of words.slice(0, index)) {
        if (meet(place, there)) found.push(each.textContent + ' on ' + other.textContent);
      }
      const struck = !each.classList.contains('in') && bars.some(bar => meet(place, bar));
      if (struck) found.push('on a bar: ' + each.textContent);
    });
  }
  return found;
})()"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_five_strategies_are_two_screens_and_no_label_touches_another(
    tmp_path: Path, make_run, make_served_run
) -> None:
    runs = [summarize(make_run(tmp_path / name, name, workers=1 + (name != "one_device"))) for name in FIVE[:4]]
    runs.append(summarize(make_served_run(tmp_path / FIVE[4], 2, 2)))
    references = References(100.0, {2: 150.0}, 70.0)
    page = write_page(tmp_path / "five.html", runs, references)
    hostile = [dataclasses.replace(each, label=f"{HOSTILE * 3}{each.label}") for each in runs[1:3]]
    evil = write_page(tmp_path / "evil.html", hostile, references)
    looked_at = [(page, width, dark) for width in (1280, 390) for dark in (False, True)]
    with browser(tmp_path / "home") as tab:
        tab.open(page.as_uri())
        assert tab.value("document.documentElement.scrollHeight") <= SCREENS
        for file, width, dark in (*looked_at, (evil, 390, False)):
            tab.open(file.as_uri(), width, dark)
            assert tab.value("document.querySelectorAll('details[open]').length") == 0
            assert faults(tab) == [], (file, width, dark)
            tab.value("document.querySelectorAll('details').forEach(each => each.open = true)")
            assert tab.value("document.documentElement.scrollWidth") <= width
            assert tab.value("document.querySelectorAll('figure').length") > 4
            assert tab.value(OVERLAPS) == []
            assert faults(tab) == [], (file, width, dark)
        assert tab.value("document.images.length") == 0
        assert HOSTILE in tab.value("document.body.innerText")
        assert tab.errors == []
        assert {address.partition(":")[0] for address in tab.asked} == {"file"}


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_the_page_of_one_run_shows_hostile_texts_as_text_and_keeps_nobody_out(tmp_path: Path) -> None:
    run_dir = hostile_run(tmp_path / HOSTILE.replace("/", ""))
    page = write_page(tmp_path / "page.html", [summarize(run_dir)])
    with browser(tmp_path / "home") as tab:
        for width, dark in ((1280, False), (390, True)):
            tab.open(page.as_uri(), width, dark)
            tab.value("document.querySelectorAll('details').forEach(each => each.open = true)")
            assert tab.value("document.documentElement.scrollWidth") <= width
            assert tab.value("document.querySelectorAll('script, img').length") == 0
            # Of strategy, hosts, metric, error, traceback and the reason for a period.
            assert tab.value("document.body.innerText.split('<script>alert(1)</script>').length") > 8
            assert faults(tab) == [], (width, dark)
        assert tab.errors == []
        assert {*tab.asked} == {page.as_uri()}
