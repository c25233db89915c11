"""Where a user reads how a run has ended, and whether all these places say the same."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from html import unescape
from io import StringIO
from pathlib import Path
from typing import Any

from headrace.api.run import Run
from headrace.cli import run as command_line
from headrace.report.model.glance import glanced
from headrace.report.model.summary import summarize
from headrace.watch.state import WatchedRun
from watch.made import read


@dataclass(frozen=True)
class Places:
    """What each place says.

    Attributes:
        texts: by the place's name.
        run: what a program has of the run.
        watched: what the page of `headrace watch` is told.
    """

    texts: Mapping[str, str]
    run: Run
    watched: Mapping[str, Any]

    def check(self, words: str) -> None:
        """Fails for the places that do not say these words."""
        silent = [name for name, text in self.texts.items() if closed(words) not in closed(text)]
        assert not silent, (words, {name: self.texts[name][-3000:] for name in silent})


def places_of(run_dir: Path, terminal: str | None) -> Places:
    """Returns all places; `terminal` is what the command has said, None where it could not."""
    status = summarize(run_dir).status
    run = Run(None, None, run_dir, status, None)  # type: ignore[arg-type]  # read from its files alone
    page = run_dir / "page.html"
    report = StringIO()
    with redirect_stdout(report):
        assert command_line(["report", str(run_dir), "--out", str(page)]) == 0
    watched = read(WatchedRun(run_dir)).details(-1)["run"]
    assert status == watched["status"] == glanced(run_dir)["status"]
    texts = {
        "report": report.getvalue(),
        "page's first line": text_of(page.read_text().partition('<p class="lede')[2].partition("</p>")[0]),
        "watch's first line": watched["headline"],
        "notebook": text_of(run._repr_html_()),
    }
    return Places(texts | ({} if terminal is None else {"terminal": terminal}), run, watched)


def text_of(html: str) -> str:
    return unescape(re.sub("<[^>]*>", " ", html))


def closed(text: str) -> str:
    """Returns a text without spaces and backticks: a terminal breaks lines, and pages have code in their place."""
    return re.sub(r"[\s`]", "", text)
