"""The documentation as a site: it builds without a warning, and has every public name."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import headrace as hr
from docs.pages import ROOT

GROUPS = ("data", "metrics", "tasks")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.slow
def test_every_public_name_is_in_the_reference_of_the_site(site: Path) -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (site / "api").glob("*.html"))
    found = set(re.findall(r'id="headrace\.([\w.]+)"', text))
    names = {name for name in hr.__all__ if name not in GROUPS}
    names |= {f"{front}.{name}" for front in GROUPS for name in importlib.import_module(f"headrace.{front}").__all__}
    assert sorted(names - found) == []


@pytest.mark.slow
def test_the_site_asks_no_other_host(site: Path) -> None:
    asked = re.compile(r'<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)="(https?://[^"]+)"')
    found = {url for page in site.rglob("*.html") for url in asked.findall(page.read_text(encoding="utf-8"))}
    assert sorted(url for url in found if "canonical" not in url) == []


def test_every_page_is_in_the_navigation() -> None:
    shown = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if f" {page}\n" not in shown] == []


def test_twenty_tasks_are_found_within_three_clicks() -> None:
    docs, shown = ROOT / "docs", (ROOT / "docs" / "find.md").read_text(encoding="utf-8")
    rows = [row for row in shown.splitlines() if row.startswith("| ") and "](" in row]
    assert len(rows) == 20
    index = links(docs / "index.md")
    for row in rows:
        way = [docs / target for target in re.findall(r"\]\(([^)#]+)", row.split("|")[2])]
        # A click leads to a page, another to a heading of it.
        assert all(page in index for page in way), row
        assert row.count("›") <= 2, row


def links(page: Path) -> set[Path]:
    """Returns the pages that a page links to."""
    return {page.parent / target for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))}
