"""CONTRIBUTING.md names files that exist."""

from __future__ import annotations

import re

from docs.pages import ROOT

_PATH = re.compile(r"`((?:\.ci|benchmarks|docs|examples|scripts|src|tests)/[^`\s]*?)(?:::\w+)?`")
_ROW = re.compile(r"^\d+\. `([\w/]+\.py)`", re.MULTILINE)
"""A numbered line that begins with a file of the package."""


def test_every_path_in_contributing_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = [ROOT / name for name in _PATH.findall(text)]
    paths += [ROOT / "src" / "headrace" / name for name in _ROW.findall(text)]
    assert paths
    assert [str(path.relative_to(ROOT)) for path in paths if not path.exists()] == []
