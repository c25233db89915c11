"""What is public exists, says what it is, and costs nothing before it is used."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from house import PACKAGE, Module, Modules, definitions, read

SOURCE = Path(__file__).resolve().parent.parent / "src" / PACKAGE


@cache
def modules() -> Modules:
    return read({str(path.relative_to(SOURCE)): path.read_text() for path in SOURCE.rglob("*.py")})


@cache
def public() -> list[str]:
    return sorted(name for name in modules() if not any(part.startswith("_") for part in name.split(".")))


def is_front(name: str) -> bool:
    """Of the front door, the rooms' fronts and the files that are rooms: there constants are explained too."""
    return name.count(".") < 2


def documented(module: Module, name: str, constants: bool) -> bool:
    """Whether a name has words of its own where it is defined, not those that Python makes up for a dataclass."""
    node = definitions(module).get(name)
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return bool(ast.get_docstring(node))
    if node is not None:
        if not constants:
            return True
        after = module.tree.body[module.tree.body.index(node) + 1 :][:1]
        return any(isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) for item in after)
    for item in module.imports:
        if item.local == name and item.target in modules():
            return item.name is None or documented(modules()[item.target], item.name, constants)
    return True  # taken from another package


def test_what_a_module_lists_exists_and_is_documented() -> None:
    listing = [name for name in public() if "__all__" in definitions(modules()[name])]
    assert len(listing) > 5
    for name in listing:
        module = importlib.import_module(name)
        assert [item for item in module.__all__ if not documented(modules()[name], item, is_front(name))] == [], name
        for item in module.__all__:
            getattr(module, item)


def test_a_module_says_what_it_is() -> None:
    """The first line of a module says what is in it."""
    assert len(public()) > 100
    assert [name for name in public() if not ast.get_docstring(modules()[name].tree)] == []


def test_every_public_class_is_documented() -> None:
    missing = [
        f"{module}.{name}"
        for module in public()
        for name, node in definitions(modules()[module]).items()
        if isinstance(node, ast.ClassDef) and not name.startswith("_") and not ast.get_docstring(node)
    ]
    assert missing == []


def test_the_front_door_lists_what_it_has() -> None:
    front = importlib.import_module(PACKAGE)
    assert front.__doc__
    assert {"Job", "Options", "Run", "compare", "fit", "launch", "setup", "tasks"} <= set(front.__all__)
    assert set(front.__all__) <= set(dir(front))
    with pytest.raises(AttributeError, match="no_such_name"):
        front.no_such_name  # noqa: B018


@pytest.mark.parametrize("name", ["data", "strategies"])
def test_a_room_that_users_import_lists_names_that_were_not_used_yet(name: str) -> None:
    front = importlib.import_module(f"{PACKAGE}.{name}")
    assert set(front.__all__) <= set(dir(front))


@pytest.mark.usefixtures("real_python")
@pytest.mark.parametrize(
    "name", [PACKAGE, f"{PACKAGE}.cli", f"{PACKAGE}.report", f"{PACKAGE}.spec", f"{PACKAGE}.engine.ray.engine"]
)
def test_importing_it_does_not_import_torch(name: str) -> None:
    heavy = {"torch", "sklearn", "matplotlib", "transformers", "tokenizers", "datasets", "ray"}
    program = f"import sys, {name}; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
