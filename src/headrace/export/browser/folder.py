"""Writes what a page needs beside the model: the page itself and onnxruntime-web."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from headrace.export.browser.runtime import WebRuntime

PAGE = ("index.html", "page.css", "page.js", "tensors.js")


def write_page(place: Path, runtime: WebRuntime) -> None:
    """Writes the page into the folder of a model."""
    page = files("headrace.export.browser") / "page"
    for name in PAGE:
        (place / name).write_bytes((page / name).read_bytes())
    for name, content in runtime.files.items():
        (place / name).write_bytes(content)
