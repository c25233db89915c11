"""Environments with some of the packages that are installed here, and none of the others."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PROJECT: Mapping[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def closure(requirements: Iterable[str]) -> set[str]:
    """Returns the names of the packages that these bring, with what those bring."""
    names: set[str] = set()
    todo = [(Requirement(line), frozenset[str]()) for line in requirements]
    seen = set()
    while todo:
        requirement, extras = todo.pop()
        name = canonicalize_name(requirement.name)
        marker = requirement.marker
        applies = marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *extras})
        key = (name, frozenset(requirement.extras))
        if not applies or key in seen:
            continue
        seen.add(key)
        names.add(name)
        todo += [(Requirement(line), key[1]) for line in distribution(name).requires or ()]
    return names


def install(target: Path, names: Iterable[str]) -> Path:
    """Makes a folder for PYTHONPATH that has headrace and these packages, with their metadata."""
    target.mkdir()
    (target / "headrace").symlink_to(ROOT / "src" / "headrace")
    for name in ("headrace", *names):
        package = distribution(name)
        for entry in {file.parts[0] for file in package.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not entry.endswith(".pth"):
                (target / entry).symlink_to(Path(str(package.locate_file(entry))))
    # This tree's, where the installed one is older.
    (metadata,) = target.glob("headrace-*.dist-info")
    metadata.unlink()
    metadata.mkdir()
    lines = [f"Requires-Dist: {line}" for line in PROJECT["dependencies"]]
    for extra, wanted in PROJECT["optional-dependencies"].items():
        lines += [f"Provides-Extra: {extra}", *(f'Requires-Dist: {line}; extra == "{extra}"' for line in wanted)]
    head = f"Metadata-Version: 2.4\nName: headrace\nVersion: {PROJECT['version']}\n"
    (metadata / "METADATA").write_text(head + "\n".join(lines) + "\n")
    return target


def make_older(target: Path, name: str) -> None:
    """Lets a package of such a folder say that it is version 0.0.1."""
    (metadata,) = target.glob(f"{name}-*.dist-info")
    text = (metadata / "METADATA").read_text()
    metadata.unlink()
    metadata.mkdir()
    version = distribution(name).version
    assert f"\nVersion: {version}\n" in text
    (metadata / "METADATA").write_text(text.replace(f"\nVersion: {version}\n", "\nVersion: 0.0.1\n"))
