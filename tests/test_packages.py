"""What is published: the same bytes from the same source, wherever and whenever it is built."""

from __future__ import annotations

import ast
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCES = SETTINGS["tool"]["hatch"]["build"]["targets"]["sdist"]["only-include"]
BUILD = "import sys; from hatchling import build; build.build_wheel(sys.argv[1]); build.build_sdist(sys.argv[1])"
DOWNLOADS = {"headrace/data/datasets.py", "headrace/export/browser/runtime.py"}
"""What fetches files; tests/data/test_datasets.py and tests/export/test_browser.py change what comes."""


def copied(target: Path, backwards: bool, seconds: int, file_mode: int) -> Path:
    """Copies what packages are made of, in an order, with a time and with permissions of its own."""
    paths = [
        path
        for name in SOURCES
        for path in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    ]
    assert len(paths) > 500
    for path in sorted(paths, reverse=backwards):
        to = target / path.relative_to(ROOT)
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, to)
        to.chmod(file_mode | (path.stat().st_mode & 0o100))
        os.utime(to, (seconds, seconds))
    return target


def built(source: Path, environment: Mapping[str, str], umask: int) -> dict[str, str]:
    """Returns the SHA-256 of the wheel and the sdist of a source tree by name."""
    out = source.parent / f"{source.name}-dist"
    kept = {name: value for name, value in os.environ.items() if name not in ("SOURCE_DATE_EPOCH", "TZ")}
    subprocess.run(
        [sys.executable, "-c", BUILD, str(out)], cwd=source, env={**kept, **environment}, umask=umask, check=True
    )
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in out.iterdir()}


@pytest.mark.slow
def test_wheel_and_sdist_have_the_same_bytes_wherever_and_whenever_they_are_built(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="the build backend is not installed: pip install 'headrace[dev]'")
    first = copied(tmp_path / "a", backwards=False, seconds=1_700_000_000, file_mode=0o644)
    second = copied(tmp_path / "another" / "folder", backwards=True, seconds=1_750_000_000, file_mode=0o600)
    digests = built(first, {"TZ": "UTC", "PYTHONHASHSEED": "1"}, 0o022)
    assert sorted(name.rpartition("-")[2] for name in digests) == ["0.1.0.tar.gz", "any.whl"]
    assert built(second, {"TZ": "Asia/Tokyo", "PYTHONHASHSEED": "2", "HOME": str(tmp_path)}, 0o077) == digests

    wheel, sdist = (next((tmp_path / "a-dist").glob(form)) for form in ("*.whl", "*.tar.gz"))
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert "headrace/__init__.py" in names
        assert all(name.startswith(("headrace/", "headrace-0.1.0.dist-info/")) for name in names)
    with tarfile.open(sdist) as packed:
        top = {name.split("/")[1] for name in packed.getnames()}
        assert top == {*SOURCES, "PKG-INFO"}
        assert {(each.uid, each.uname, each.mtime) for each in packed.getmembers()} == {(0, "", 1580601600)}


def test_the_build_backend_is_one_version() -> None:
    """The wheel names it, and another one may write other bytes."""
    (backend,) = SETTINGS["build-system"]["requires"]
    assert backend.startswith("hatchling==")
    assert backend in SETTINGS["project"]["optional-dependencies"]["dev"]


@pytest.mark.slow
def test_only_modules_that_check_digests_download() -> None:
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [each.name for each in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            fetches = isinstance(node, ast.Constant) and node.value in ("apt-get", "curl", "npm", "pip", "wget")
            if fetches or {"urllib.request", "http.client", "requests", "aiohttp", "httpx"} & set(names):
                found.add(str(path.relative_to(ROOT / "src")))
    assert found == DOWNLOADS
