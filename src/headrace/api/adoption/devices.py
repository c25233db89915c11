"""A script's tree without what moves tensors and models to a device: a job's strategy chooses devices."""

from __future__ import annotations

import ast

from headrace.api.adoption.facts import Facts
from headrace.api.adoption.syntax import text_of
from headrace.devices import DEVICES


def without_devices(tree: ast.Module, facts: Facts) -> set[int]:
    """Takes `.to(device)` and its like out of a tree; returns the lines where it did."""
    known = {name for frame in facts.frames for name in frame.devices}
    lines: set[int] = set()

    class Take(ast.NodeTransformer):
        def visit_Call(self, node: ast.Call) -> ast.AST:
            self.generic_visit(node)
            if not isinstance(node.func, ast.Attribute) or not _moves(node, known):
                return node
            lines.add(node.lineno)
            return node.func.value

    Take().visit(tree)
    return lines


def _moves(node: ast.Call, known: set[str]) -> bool:
    assert isinstance(node.func, ast.Attribute)
    if node.func.attr in DEVICES:
        return len(node.args) <= 1 and text_of(node.func.value) != "torch"
    if node.func.attr != "to" or len(node.args) != 1 or any(each.arg != "non_blocking" for each in node.keywords):
        return False
    given = node.args[0]
    constant = isinstance(given, ast.Constant) and isinstance(given.value, str)
    return text_of(given) in known or (constant and text_of(given).strip("'\"").partition(":")[0] in DEVICES)
