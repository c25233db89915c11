"""Programs that tests start begin without pytest: it takes 0.4 s of each, and the simulated devices refuse it."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
DEVICES = TESTS / "simulated" / "accelerator.py"


@functools.cache
def imported(file: Path) -> set[str]:
    """Returns what importing a file imports at once, by name: modules, and what may be one."""
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
    return names


def loads(file: Path, found: dict[Path, set[str]]) -> dict[Path, set[str]]:
    """Returns the files of tests that importing one loads, each with what it imports."""
    if file not in found:
        found[file] = imported(file)
        for name in found[file]:
            if (other := TESTS / (name.replace(".", "/") + ".py")).is_file():
                loads(other, found)
    return found


def test_what_programs_load_is_without_pytest() -> None:
    files = [each for kind in ("runs", "script") for each in TESTS.rglob(f"*_{kind}.py") if each.name[:5] != "test_"]
    programs = {file: loads(file, {}) for file in files}
    assert sum(DEVICES in loaded for loaded in programs.values()) > 4
    found = [(file, each) for file, loaded in programs.items() for each, names in loaded.items() if "pytest" in names]
    assert found == []
