"""The documentation as a site: it builds without a warning, and has every public name."""

from __future__ import annotations

import functools
import html
import importlib
import json
import re
import runpy
import subprocess
import sys
import threading
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from filelock import FileLock

import headrace as hr
from docs.pages import ROOT
from watch.axe import faults
from watch.browser import CHROMIUM, browser

GROUPS = ("accelerate", "data", "metrics", "tasks")
SEARCHED = {
    "MirroredStrategy": "coming-from",
    "ParameterServerStrategy": "answers/what-is-each-part-of-tensorflow-here",
    "zero": "coming-from",
    "fsdp": "coming-from",
    "ddp": "coming-from",
    "no_sync": "coming-from",
    "Lightning": "coming-from",
    "Horovod": "coming-from",
    "deepspeed": "coming-from",
    "FAQ": "answers/index",
    "out of memory": "troubleshooting",
    "NCCL timeout": "troubleshooting",
    "early stopping": "cookbook",
    "trabajador": "es/answers/device-worker-replica",
    "variable reflejada": "es/answers/why-mirrored-variables-stay-equal",
    "canalización": "es/answers/what-micro-batches-do",
}
"""What people search for, and a page that is right for it."""
ROOTS = "[...document.querySelectorAll('*')].map((it) => it.shadowRoot).filter(Boolean)"
LINKS = f"{ROOTS}.flatMap((root) => [...root.querySelectorAll('a')].map((link) => link.href))"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The site, which the first process that needs it builds for all."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / "site"
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            made = folder.with_suffix(".new")
            command = [sys.executable, ROOT / "docs" / "site.py", made]
            built = subprocess.run(command, capture_output=True, text=True, timeout=300)
            assert built.returncode == 0, built.stdout + built.stderr
            # What the reader of docstrings does not understand is no error to the builder.
            assert "griffe:" not in built.stdout + built.stderr
            made.rename(folder)
    return folder


def test_every_public_name_has_its_place_in_the_reference() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    assert sorted(re.findall(r"^::: headrace\.([\w.]+)$", text, re.MULTILINE)) == sorted([*hr.__all__, "accelerate"])


@pytest.mark.full
@pytest.mark.slow
def test_every_public_name_is_in_the_reference_of_the_site(site: Path) -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (site / "api").glob("*.html"))
    found = set(re.findall(r'id="headrace\.([\w.]+)"', text))
    names = {name for name in hr.__all__ if name not in GROUPS}
    names |= {f"{front}.{name}" for front in GROUPS for name in importlib.import_module(f"headrace.{front}").__all__}
    assert sorted(names - found) == []


@pytest.mark.full
@pytest.mark.slow
def test_names_that_share_a_line_are_rows_of_the_reference(site: Path) -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (site / "api").glob("*.html"))
    rows = set(re.findall(r'<td><code>(?:<span title="[^"]*">)?([^<]+)<', text))
    # "slow_share, slow_factor: ..." of hr.Assumptions.
    assert {"slow_share", "slow_factor"} <= rows
    assert [name for name in rows if name.endswith(",")] == []


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_axe_finds_no_serious_fault_on_the_site(site: Path, tmp_path: Path) -> None:
    with browser(tmp_path) as tab:
        for page in (
            *("index", "gallery", "cookbook", "troubleshooting", "guide/strategies", "api/strategies"),
            *("answers/which-strategy-for-which-hardware", "es/quiz"),
        ):
            for width, dark in ((1280, False), (390, True)):
                tab.open((site / f"{page}.html").as_uri(), width, dark)
                assert tab.value("document.body.dataset.mdColorScheme") == ("slate" if dark else "default")
                assert [each for each in faults(tab) if each.startswith(("serious", "critical"))] == [], (page, width)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_on_a_phone_no_result_is_cut_and_no_name_is_broken(site: Path, tmp_path: Path) -> None:
    with browser(tmp_path) as tab:
        tab.open((site / "answers" / "why-mirrored-variables-stay-equal.html").as_uri(), 390)
        tab.value("document.querySelector('details').open = true")
        wide = "document.querySelectorAll('details .language-{} code').values()"
        cut = f"[...{wide}].map((it) => it.scrollWidth > it.clientWidth)"
        assert tab.value(cut.format("console")) == [False]
        assert tab.value(cut.format("python")) == [True]
        tab.open((site / "guide" / "options.html").as_uri(), 390)
        names = "[...document.querySelectorAll('tr > td:first-child code')]"
        assert set(tab.value(f"{names}.map((it) => it.getClientRects().length)")) == {1}


@pytest.mark.full
@pytest.mark.slow
def test_the_site_asks_no_other_host(site: Path) -> None:
    asked = re.compile(r'<(?:script|link|img|iframe)\b[^>]*?\b(?:src|href)="(https?://[^"]+)"')
    found = {url for page in site.rglob("*.html") for url in asked.findall(page.read_text(encoding="utf-8"))}
    assert sorted(url for url in found if "canonical" not in url) == []


def test_every_page_is_once_in_the_navigation() -> None:
    shown = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if shown.count(f" {page}\n") != 1] == []


@pytest.mark.full
@pytest.mark.slow
def test_a_page_is_in_its_language(site: Path) -> None:
    for page in site.rglob("*.html"):
        spanish = page.is_relative_to(site / "es")
        text = page.read_text(encoding="utf-8")
        assert f'<html lang="{"es" if spanish else "en"}"' in text
        assert f'aria-label="{"Buscar" if spanish else "Search"}"' in text
    assert 'href="../es/answers/twenty-machines.html"' in (site / "answers" / "twenty-machines.html").read_text("utf-8")
    assert 'href="../../answers/twenty-machines.html"' in (site / "es/answers/twenty-machines.html").read_text("utf-8")


@pytest.mark.full
@pytest.mark.slow
def test_tasks_are_found_within_three_clicks(site: Path) -> None:
    shown = (ROOT / "docs" / "find.md").read_text(encoding="utf-8")
    rows = [row for row in shown.splitlines() if row.startswith("| ") and "](" in row]
    assert len(rows) >= 40
    for row in rows:
        # Several pages have a comma or "or" between them; "›" is before what is clicked next.
        for way in re.split(r", (?:or )?(?=\[)", row.split("|")[2]):
            here, clicks = Page.at(site / "index.html"), re.findall(r"\]\(([^)]+)\)", way)
            assert 1 <= len(clicks) <= 3, row
            for target in clicks:
                path, _, anchor = target.partition("#")
                leads_to = (site / path).with_suffix(".html").resolve(), anchor
                assert leads_to in here.links, (row, target)
                here = Page.at(leads_to[0])
                assert not anchor or anchor in here.ids, (row, target)


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.every
@pytest.mark.parametrize("words", SEARCHED)
def test_what_people_search_for_is_found(words: str, site: Path) -> None:
    front = "es/" if SEARCHED[words].startswith("es/") else ""
    index = json.loads((site / front / "search.json").read_text(encoding="utf-8"))
    assert index["config"]["lang"] == [front.strip("/") or "en"]
    split = re.compile(index["config"]["separator"])
    sought = {part.lower() for part in split.split(words)}
    found = set()
    for item in index["items"]:
        text = html.unescape(re.sub(r"<[^>]+>", " ", f"{item['title']} {item['text']}"))
        if sought <= {part.lower() for part in split.split(text)}:
            found.add(front + item["location"].partition(".html")[0])
    assert SEARCHED[words] in found


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_the_search_of_a_page_is_in_its_language(site: Path, tmp_path: Path) -> None:
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, browser(tmp_path) as tab:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for page, words in (("index", "NCCL timeout"), ("es/quiz", "trabajador")):
            tab.open(f"http://127.0.0.1:{server.server_port}/{page}.html")
            tab.value("document.querySelector('.md-search__button').click()")
            tab.until(f"{ROOTS}.some((root) => root.activeElement)")
            tab.call("Input.insertText", text=words)
            found = tab.until(f"((found) => found.length && found)({LINKS})")
            assert {"/es/" in link for link in found} == {page.startswith("es/")}
        server.shutdown()


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_the_pages_are_printed_as_one_file_whose_links_lead_somewhere(site: Path, tmp_path: Path) -> None:
    text = str(runpy.run_path(str(ROOT / "docs" / "pdf.py"))["joined"](site))
    named = set(re.findall(r'\bid="([^"]+)"', text))
    leads_to = re.findall(r'href="#([^"]+)"', text)
    assert len(leads_to) > 500
    assert sorted(set(leads_to) - named) == []
    assert text.count("<h1") > 80
    printed = tmp_path / "all.pdf"
    subprocess.run([sys.executable, ROOT / "docs" / "pdf.py", site, printed], check=True, timeout=120)
    assert printed.read_bytes().startswith(b"%PDF-")
    assert printed.stat().st_size > 1_000_000


class Page(HTMLParser):
    """A page of the site: the files and headings that it links to, and its own headings."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file
        self.links: set[tuple[Path, str]] = set()
        self.ids: set[str] = set()

    @classmethod
    @functools.cache
    def at(cls, file: Path) -> Page:
        page = cls(file)
        page.feed(file.read_text(encoding="utf-8"))
        return page

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.ids.add(given.get("id") or "")
        if tag == "a" and "://" not in (target := given.get("href") or ""):
            path, _, anchor = target.partition("#")
            self.links.add(((self._file.parent / path).resolve() if path else self._file.resolve(), anchor))
