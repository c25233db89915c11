"""Prints the site's pages in English as one file: `docs/pdf.py SITE FILE.pdf`; needs chromium."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_STYLE = (
    "h1 { break-before: page } pre code { white-space: pre-wrap } img { max-width: 100% } .headerlink { display: none }"
)
_CHROMIUM = ("chromium", "--headless=new", "--no-sandbox", "--disable-gpu", "--no-pdf-header-footer")


def main(site: Path, to: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (whole := Path(folder) / "whole.html").write_text(joined(site), encoding="utf-8")
        command = [*_CHROMIUM, f"--user-data-dir={folder}", f"--print-to-pdf={to}", whole.as_uri()]
        subprocess.run(command, stderr=subprocess.DEVNULL, check=True)


def joined(site: Path) -> str:
    """Returns the pages in the order of the navigation as one; links between them are links in it."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    names = re.findall(r"(?<= )((?!es/|api/)[\w/-]+)\.md$", navigation, re.MULTILINE)
    contents, body = "", ""
    for name in names:
        page = site / f"{name}.html"

        def inside(link: re.Match[str], name: str = name, page: Path = page) -> str:
            path, _, anchor = link[1].partition("#")
            to = os.path.relpath(page.parent / path, site).removesuffix(".html") if path else name
            return f'href="#{to}--{anchor}"' if to in names else ""

        text = re.findall(r"<article[^>]*>(.*)</article>", page.read_text(encoding="utf-8"), re.DOTALL)[0]
        text = text.replace("<details", "<details open").replace('id="', f'id="{name}--')
        text = re.sub(r'(?<= src=")(?=[^":]+")', f"{page.parent.resolve().as_uri()}/", text)
        text = re.sub(r'href="([^":]*)"', inside, text)
        title = re.findall(r"<h1[^>]*>(.*?)<a ", text, re.DOTALL)[0]
        contents += f'<li><a href="#{name}--">{title}</a></li>'
        body += f'<div id="{name}--">{text}</div>'
    sheets = "".join(f'<link rel="stylesheet" href="{file.resolve().as_uri()}">' for file in site.rglob("*.css"))
    head = f'<meta charset="utf-8"><title>headrace</title>{sheets}<style>{_STYLE}</style>'
    return f'<!doctype html>{head}<body class="md-typeset" data-md-color-scheme="default"><ol>{contents}</ol>{body}'


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve())
