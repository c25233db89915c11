"""What mkdocs does with the pages beyond their text: links that leave docs/ name a path; languages; a search's name."""

from __future__ import annotations

import os
import re
from pathlib import PurePosixPath
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
_ANSWERS, _SPANISH = "answers/", "es/"
_FENCE = re.compile(r"(^ *```.*?^ *```\s*?$)", re.MULTILINE | re.DOTALL)


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Replaces such links of a page by their text and the path, and leads to its twin; code stays as it is."""
    name = PurePosixPath(page.file.src_uri).name
    if page.file.src_uri.startswith(_SPANISH + _ANSWERS):
        markdown = markdown.replace("\n", f"\n\n[In English](../../{_ANSWERS}{name})\n", 1)
    elif page.file.src_uri.startswith(_ANSWERS):
        markdown = markdown.replace("\n", f"\n\n[En español](../{_SPANISH}{_ANSWERS}{name})\n", 1)
    parts = _FENCE.split(markdown)
    return "".join(part if number % 2 else _named(part, page.file.src_uri) for number, part in enumerate(parts))


def on_post_page(output: str, page: Any, **_: object) -> str:
    """Gives a page its language, and the theme's search its name for screen readers."""
    if page.file.src_uri.startswith(_SPANISH):
        output = output.replace('<html lang="en"', '<html lang="es"', 1)
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"')


def _named(text: str, page: str) -> str:
    def name(link: re.Match[str]) -> str:
        words, target = link.groups()
        path = os.path.normpath(PurePosixPath("docs", page).parent / target.partition("#")[0])
        if "://" in target or target.startswith("#") or path.startswith("docs/"):
            return link[0]
        return f"{words} (`{path}`)"

    return _LINK.sub(name, text)
