"""CONTRIBUTING.md and SECURITY.md name files that exist."""

from __future__ import annotations

import re

import pytest

from docs.pages import ROOT

_PATH = re.compile(r"`((?:\.ci|benchmarks|docs|examples|scripts|src|tests)/[^`\s]*)`")
_ROW = re.compile(r"^\d+\. `([\w/]+\.py)`", re.MULTILINE)
"""A numbered line that begins with a file of the package."""


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md"])
def test_every_path_on_the_page_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    paths = [ROOT / name for name in _PATH.findall(text)]
    paths += [ROOT / "src" / "headrace" / name for name in _ROW.findall(text)]
    assert len(paths) > 5
    assert [str(path.relative_to(ROOT)) for path in paths if not path.exists()] == []
