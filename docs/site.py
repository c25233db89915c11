"""The documentation as a site, which Zensical builds: `docs/site.py FOLDER` writes it, `docs/site.py` alone serves it.

Zensical has no hooks. What it reads is a copy of the pages, in which links that leave docs/ name a path, and answers
lead to their twins in the other language. What it writes has a search of its own for the pages in Spanish.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
_ANSWERS, _SPANISH = "answers/", "es/"
_FENCE = re.compile(r"(^ *```.*?^ *```\s*?$)", re.MULTILINE | re.DOTALL)
_BASE = re.compile(r'(?<="base":")([^"]*)(?=")')


def main() -> None:
    """Builds the site into the folder that is named, or serves it and follows changes until Ctrl-C."""
    with tempfile.TemporaryDirectory(prefix="site-") as name:
        copy = Path(name).resolve()
        (copy / "src").symlink_to(ROOT / "src")
        take(copy)
        if len(sys.argv) > 1:
            if code := _zensical("build", "--strict", copy=copy).wait():
                sys.exit(code)
            give_spanish_its_search(copy / "site")
            shutil.copytree(copy / "site", sys.argv[1], dirs_exist_ok=True)
            return
        server = _zensical("serve", copy=copy)
        with contextlib.suppress(KeyboardInterrupt):
            while server.poll() is None:
                time.sleep(1)
                take(copy)
        server.wait()


def take(copy: Path) -> None:
    """Brings a copy of mkdocs.yml and docs/ up to date."""
    for file in (ROOT / "mkdocs.yml", *(ROOT / "docs").rglob("*")):
        path = file.relative_to(ROOT)
        taken = copy / path
        if not file.is_file() or (taken.exists() and taken.stat().st_mtime >= file.stat().st_mtime):
            continue
        taken.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".md":
            taken.write_text(as_page(file.read_text(encoding="utf-8"), path.relative_to("docs").as_posix()))
        else:
            shutil.copy(file, taken)


def as_page(markdown: str, page: str) -> str:
    """Replaces links that leave docs/ by their text and the path, and leads to the page's twin; code stays as it is."""
    name = PurePosixPath(page).name
    if page.startswith(_SPANISH + _ANSWERS):
        markdown = markdown.replace("\n", f"\n\n[In English](../../{_ANSWERS}{name})\n", 1)
    elif page.startswith(_ANSWERS):
        markdown = markdown.replace("\n", f"\n\n[En español](../{_SPANISH}{_ANSWERS}{name})\n", 1)
    parts = _FENCE.split(markdown)
    return "".join(part if number % 2 else _named(part, page) for number, part in enumerate(parts))


def give_spanish_its_search(site: Path) -> None:
    """Divides the index of the search by language: pages in es/ have one of their own there."""
    index = json.loads((site / "search.json").read_text(encoding="utf-8"))
    spanish = [item for item in index["items"] if item["location"].startswith(_SPANISH)]
    index["items"] = [item for item in index["items"] if item not in spanish]
    (site / "search.json").write_text(json.dumps(index, ensure_ascii=False), encoding="utf-8")
    for item in spanish:
        item["location"] = item["location"].removeprefix(_SPANISH)
    index |= {"config": index["config"] | {"lang": ["es"]}, "items": spanish}
    (site / _SPANISH / "search.json").write_text(json.dumps(index, ensure_ascii=False), encoding="utf-8")
    for page in (site / _SPANISH).rglob("*.html"):
        # The search, and nothing else on these pages, begins where this says.
        above = os.path.relpath(site / _SPANISH, page.parent)
        page.write_text(_BASE.sub(above, page.read_text(encoding="utf-8"), count=1), encoding="utf-8")


def _zensical(*arguments: str, copy: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "zensical", *arguments], cwd=copy)


def _named(text: str, page: str) -> str:
    def name(link: re.Match[str]) -> str:
        words, target = link.groups()
        path = os.path.normpath(PurePosixPath("docs", page).parent / target.partition("#")[0])
        if "://" in target or target.startswith("#") or path.startswith("docs/"):
            return link[0]
        return f"{words} (`{path}`)"

    return _LINK.sub(name, text)


if __name__ == "__main__":
    main()
