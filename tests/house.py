"""The rules of the house, read from source text alone: nothing here imports the package.

A rule is a function from modules to complaints, one line each; none is good. `test_architecture.py` applies
every rule to the package, and to planted violations.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

__all__ = [
    "PACKAGE",
    "Import",
    "Module",
    "Modules",
    "Rule",
    "complaint",
    "definitions",
    "floors",
    "read",
    "room",
    "words",
]

PACKAGE = "headrace"


@dataclass(frozen=True)
class Import:
    """One imported module.

    Attributes:
        target: its full name; the module of ours that `from package import module` names.
        name: what is taken from it; None for the module itself.
        local: the name that it is bound to here.
        line: where.
        when: "top" at import, "typing" under `TYPE_CHECKING`, "later" in a function.
    """

    target: str
    name: str | None
    local: str
    line: int
    when: str


@dataclass(frozen=True)
class Module:
    """One source file.

    Attributes:
        name: "headrace.spec.job"; of a package's `__init__` the package's.
        tree: parsed.
        lines: how many it has.
        imports: all of them, those in functions and for typing too.
    """

    name: str
    tree: ast.Module
    lines: int
    imports: tuple[Import, ...]

    @functools.cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All of the tree, which is walked once for all rules."""
        return tuple(ast.walk(self.tree))


Modules = Mapping[str, Module]
Rule = Callable[[Modules], list[str]]


def read(sources: Mapping[str, str]) -> dict[str, Module]:
    """Returns modules by name from source texts by path, "spec/job.py", relative to the package."""
    paths = {_name(path): path for path in sources}
    modules = {}
    for name, path in sorted(paths.items()):
        text = sources[path]
        tree = ast.parse(text, path)
        base = name if path.endswith("__init__.py") else name.rpartition(".")[0]
        imports = tuple(_imports(tree, base, frozenset(paths), "top"))
        modules[name] = Module(name, tree, text.count("\n"), imports)
    return modules


def _name(path: str) -> str:
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join((PACKAGE, *(parts[:-1] if parts[-1] == "__init__" else parts)))


def _imports(node: ast.AST, base: str, known: frozenset[str], when: str) -> Iterator[Import]:
    """Walks `node`; `base` is the package that relative imports start from."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            local = alias.asname or alias.name.partition(".")[0]
            yield Import(alias.name, None, local, node.lineno, when)
    elif isinstance(node, ast.ImportFrom):
        source = node.module or ""
        if node.level:
            source = ".".join([*base.split(".")[: len(base.split(".")) - node.level + 1], *filter(None, [source])])
        for alias in node.names:
            whole = f"{source}.{alias.name}"
            target, name = (whole, None) if whole in known else (source, alias.name)
            yield Import(target, name, alias.asname or alias.name, node.lineno, when)
    elif isinstance(node, ast.Call) and words(node.func)[-1:] in (["import_module"], ["__import__"]):
        named = [item.value for item in node.args[:1] if isinstance(item, ast.Constant)]
        yield from (Import(name, None, "", node.lineno, when) for name in named if isinstance(name, str))
    if isinstance(node, ast.If) and words(node.test)[-1:] == ["TYPE_CHECKING"]:
        for inner in node.body:
            yield from _imports(inner, base, known, "typing" if when == "top" else when)
        for inner in node.orelse:
            yield from _imports(inner, base, known, when)
        return
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        when = "later"
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, base, known, when)


def words(node: ast.AST) -> list[str]:
    """Returns a dotted expression as its words, `os.environ` as ["os", "environ"]; [] for any other."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (front := words(node.value)):
        return [*front, node.attr]
    return []


def floors(page: str) -> tuple[frozenset[str], ...]:
    """Returns the rooms of each floor, the lowest first, as docs/architecture.md has them; "" for the front door."""
    rows = re.findall(r"^\| *(-?\d+) *\|(.*)\|$", page, re.MULTILINE)
    found = {int(floor): re.findall(r"`([\w.]+?)(?:/|\.py)`", cells) for floor, cells in rows}
    return tuple(frozenset("" if name == "__init__" else name for name in found[floor]) for floor in sorted(found))


def room(name: str) -> str:
    """Returns the first part of a module's name below the package; "" for the front door."""
    return name.split(".")[1] if "." in name else ""


def complaint(module: Module, line: int, text: str) -> str:
    """Returns one line that an editor can jump to."""
    return f"{module.name}:{line}: {text}"


def definitions(module: Module) -> dict[str, ast.stmt]:
    """Returns what a module binds at its top by definition or assignment, by name."""
    found: dict[str, ast.stmt] = {}
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    return found


def packages(name: str) -> list[str]:
    """Returns the packages that a module is in, outermost first, and itself."""
    parts = name.split(".")
    return [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
