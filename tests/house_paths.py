"""The rule that a path is asked in one way; see `house`."""

from __future__ import annotations

import ast

from house import PACKAGE, Modules, complaint

__all__ = ["path_questions"]

ASKED = {"exists", "is_dir", "is_file"}
OTHERS = {f"{PACKAGE}.devices", f"{PACKAGE}.report.model.glance", f"{PACKAGE}.watch.tail"}
"""Below `machine/`, which looks for a driver; and what asks entries of `os.scandir`, which raise."""


def path_questions(modules: Modules) -> list[str]:
    """What a path leads to is asked of `machine/disk.py`: from Python 3.14 on a `Path` says no where a disk fails."""
    return [
        complaint(module, node.lineno, f".{node.func.attr}() hides a disk that fails; use machine/disk.py")
        for module in modules.values()
        if module.name not in OTHERS
        for node in module.nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ASKED
        if not node.args
    ]
