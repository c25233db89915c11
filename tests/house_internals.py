"""The rule that keeps private names of other libraries in one module; see `house`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from house import PACKAGE, Module, Modules, complaint

__all__ = ["private_names"]

HOME = f"{PACKAGE}.internals"
DOCUMENTED = {"_asdict", "_exit", "_fields", "_replace", "_typeshed"}
"""Names with an underscore that Python's documentation has: of named tuples, of `os`, of typing."""
INSIDE = {"torch._dynamo", "torch._inductor", "torch._C", "torch._ops", "torch.utils._pytree"}


def private_names(modules: Modules) -> list[str]:
    """A private name of another library stands in `internals` alone."""
    return [
        complaint(module, line, f"{name} is private: internals alone has such names")
        for module in modules.values()
        if module.name != HOME
        for line, name in sorted(_private(module))
    ]


def _private(module: Module) -> Iterator[tuple[int, str]]:
    for item in module.imports:
        if item.target.partition(".")[0] != PACKAGE:
            path = f"{item.target}.{item.name or ''}".rstrip(".")
            if any(map(_is_private, path.split("."))):
                yield item.line, path
    known = set(_defined(module))
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in known:
            if not _is_own(node):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _is_inside(node.value):
            yield node.lineno, node.value


def _defined(module: Module) -> Iterator[str]:
    """Yields the names that a module gives itself, and the attributes that it gives its own objects."""
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_own(node):
            yield node.attr


def _is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _is_inside(text: str) -> bool:
    return any(text == name or text.startswith(f"{name}.") for name in INSIDE)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED
