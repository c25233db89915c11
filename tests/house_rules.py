"""The rules themselves: each takes modules and returns complaints; see `house`."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TypeGuard

from house import PACKAGE, Import, Module, Modules, Rule, complaint, definitions, floors, packages, room, words

__all__ = ["RULES"]

FLOORS = floors((Path(__file__).resolve().parent.parent / "docs" / "architecture.md").read_text(encoding="utf-8"))
FLOOR = {name: floor for floor, rooms in enumerate(FLOORS) for name in rooms}
LOOSE = {"batches", "metrics", "targets", "tasks", "trees"}
"""Files that stand in no folder: those of one floor are one room."""
SIDEWAYS: set[tuple[str, str]] = set()
"""Room and module: the loader makes the `Share` that the compute takes."""

FRONTS = {"headrace", *(f"headrace.{name}" for name in ("accelerate", "data", "metrics", "strategies", "tasks"))}
"""What users import from."""
ENTRIES = {"headrace.strategies", "headrace.data.sources", "headrace.pipeline.schedules"}
"""One file an entry of a dict, however many there are."""

FORBIDDEN_WORDS = {"common", "helper", "helpers", "manager", "managers", "util", "utils", "v2"}
MODULES, FILE_LINES, FUNCTION_LINES, METHODS, ARGUMENTS, FIELDS = 12, 400, 60, 10, 8, 17

READS_ENVIRONMENT = {"engine", "cli", "devices", "machine"}
SHIPS_CODE = {"engine"}
PICKLES = {"pickle", "_pickle", "dill", "joblib", "marshal", "shelve"}
SAVES_AS_ASKED = "headrace.accelerate.saving"  # a script that calls `accelerator.save` asks for torch.save
PICKLING_CALLS = {
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
    *("recv_object_list", "send_object_list"),
}

LIGHT = {"", "cli", "errors", "policies", "report", "spec"}
HEAVY = {"torch", "torchvision", "cloudpickle", "sklearn"}
IMPURE = {"asyncio", "datetime", "random", "socket", "threading", "time", "torch", "zmq"}

OPEN_TREES = {"headrace.errors"}
"""Trees of values: their roots are caught and decoded as such."""


def directions(modules: Modules) -> list[str]:
    """A module imports from lower floors and its own room alone; models/ only for the command line."""
    found = []
    for module in modules.values():
        here = room(module.name)
        if here not in FLOOR:
            found.append(complaint(module, 1, f"room {here!r} stands on no floor"))
            continue
        for item in _own(module):
            there = room(item.target)
            same = there == here or (FLOOR.get(there) == FLOOR[here] and {here, there} <= LOOSE)
            lower = FLOOR.get(there, len(FLOORS)) < FLOOR[here] or there == "errors"
            if not (same or lower or (here, item.target) in SIDEWAYS):
                found.append(complaint(module, item.line, f"may not import {item.target}"))
            elif there == "models" and here not in ("models", "cli"):
                found.append(complaint(module, item.line, "models/ is for the command line alone"))
    return found


def circles(modules: Modules) -> list[str]:
    """Imports go round in no circle, in functions and for typing neither."""
    graph = {module.name: {item.target for item in _own(module)} for module in modules.values()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [f"a circle of imports: {' <- '.join(error.args[1])}"]
    return []


def names(modules: Modules) -> list[str]:
    """No module is named for what it is not about."""
    return [
        complaint(module, 1, f"{word!r} says nothing of what is inside")
        for module in modules.values()
        for word in sorted(FORBIDDEN_WORDS & set(module.name.replace("_", ".").split(".")))
    ]


def exports(modules: Modules) -> list[str]:
    """An `__all__` is a sorted list of literal strings, and the module binds what it lists; fronts have one."""
    found = []
    for module in modules.values():
        own = definitions(module)
        if "__all__" not in own:
            if module.name in FRONTS:
                found.append(complaint(module, 1, "has no __all__, and users import it"))
            continue
        listed = _listed(own["__all__"])
        if listed is None:
            found.append(complaint(module, 1, "has no __all__ of literal strings"))
            continue
        if listed != sorted(set(listed), key=_order):
            found.append(complaint(module, own["__all__"].lineno, "__all__ is not sorted"))
        if "__getattr__" in own:
            continue
        bound = {*own, *(item.local for item in module.imports if item.when == "top")}
        found += [complaint(module, 1, f"__all__ lists {name!r}, unbound") for name in listed if name not in bound]
    return found


def folders(modules: Modules) -> list[str]:
    """A folder has at most 12 modules besides its `__init__`; a folder of entries, one file each, may have more."""
    counts = Counter(
        module.name.rpartition(".")[0] for module in modules.values() if module.name not in _folders(modules)
    )
    return [
        f"{name}: {count} modules, at most {MODULES}"
        for name, count in sorted(counts.items())
        if count > MODULES and name not in ENTRIES
    ]


def meanings(modules: Modules) -> list[str]:
    """A public class name has one meaning in the whole package."""
    homes: dict[str, list[str]] = {}
    for module in modules.values():
        for name, node in definitions(module).items():
            if isinstance(node, ast.ClassDef) and not name.startswith("_"):
                homes.setdefault(name, []).append(module.name)
    return [f"{name} is a class in {', '.join(found)}" for name, found in sorted(homes.items()) if len(found) > 1]


def budgets(modules: Modules) -> list[str]:
    """Files, functions, classes and constructors stay small enough to be seen whole."""
    found = []
    for module in modules.values():
        if module.lines > FILE_LINES:
            found.append(complaint(module, module.lines, f"{module.lines} lines, at most {FILE_LINES}"))
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > FUNCTION_LINES:
                    found.append(
                        complaint(module, node.lineno, f"{node.name}: {length} lines, at most {FUNCTION_LINES}")
                    )
            elif isinstance(node, ast.ClassDef):
                found += [complaint(module, node.lineno, text) for text in _class_budget(modules, module, node)]
    return found


def environment(modules: Modules) -> list[str]:
    """Environment variables are read in engine/ and cli/ alone."""
    return [
        complaint(module, line, "reads the environment; only engine/ and cli/ do")
        for module in modules.values()
        if room(module.name) not in READS_ENVIRONMENT
        for line in (*_mentions(module, "os", {"environ", "environb", "getenv", "getenvb"}),)
    ]


def pickling(modules: Modules) -> list[str]:
    """cloudpickle in engine/ alone, pickle only in the module that ships with it, no pickling calls of torch."""
    found = []
    for module in modules.values():
        ships = room(module.name) in SHIPS_CODE
        roots = {item.target.partition(".")[0] for item in module.imports}
        for item in module.imports:
            root = item.target.partition(".")[0]
            if root == "cloudpickle" and not ships:
                found.append(complaint(module, item.line, "only engine/ ships code by cloudpickle"))
            elif root in PICKLES and not (ships and root == "pickle" and "cloudpickle" in roots):
                found.append(complaint(module, item.line, f"{root} reads what may not be trusted"))
        pickling = {"load", "save"} - ({"save"} if module.name == SAVES_AS_ASKED else set())
        found += [complaint(module, line, "torch.load pickles") for line in _mentions(module, "torch", pickling)]
        found += [
            complaint(module, node.lineno, f"{node.attr} pickles")
            for node in module.nodes
            if isinstance(node, ast.Attribute) and node.attr in PICKLING_CALLS
        ]
    return found


def finals(modules: Modules) -> list[str]:
    """No concrete class of ours is subclassed."""
    return [
        complaint(module, node.lineno, f"{node.name} subclasses {base.name}, which is concrete")
        for module in modules.values()
        for node in module.nodes
        if isinstance(node, ast.ClassDef)
        for home, base in _bases(modules, module, node)
        if not (home.name == module.name and module.name in OPEN_TREES) and not _is_abstract(modules, home, base)
    ]


def light(modules: Modules) -> list[str]:
    """Importing the front door, the command line, reports, the specification and policies is quick: no torch."""
    found = []
    for module in modules.values():
        if room(module.name) not in LIGHT:
            continue
        for path, item in _reached(modules, module):
            if item.target.partition(".")[0] in HEAVY or item.target == "safetensors.torch":
                found.append(complaint(module, item.line, f"imports {item.target} by {' -> '.join(path)}"))
    return found


def purity(modules: Modules) -> list[str]:
    """policies/ is pure: no torch, clock, socket or chance, inside functions neither."""
    return [
        complaint(module, item.line, f"policies/ is pure, {item.target} is not")
        for module in modules.values()
        if room(module.name) == "policies"
        for item in module.imports
        if item.target.partition(".")[0] in IMPURE or item.target == f"{PACKAGE}.machine"
    ]


def numbered_fields(modules: Modules) -> list[str]:
    """Fields of shared memory have names, by `ctypes.Structure`; a memoryview that is cast has numbered ones."""
    shared = [module for module in modules.values() if room(module.name) in ("shared_memory", "channels")]
    names = [(module, node) for module in shared for node in module.nodes if isinstance(node, ast.Attribute)]
    told = "a cast memoryview has numbered fields"
    return [complaint(module, node.lineno, told) for module, node in names if node.attr == "cast"]


def asking(modules: Modules) -> list[str]:
    """No `hasattr`: a seam is declared, not guessed."""
    return [
        complaint(module, node.lineno, "hasattr guesses; declare a Protocol")
        for module in modules.values()
        for node in module.nodes
        if isinstance(node, ast.Call) and words(node.func) == ["hasattr"]
    ]


def hiding(modules: Modules) -> list[str]:
    """Nothing catches everything and says nothing."""
    found = []
    for module in modules.values():
        for node in module.nodes:
            if isinstance(node, ast.ExceptHandler):
                silent = all(
                    isinstance(inner, ast.Pass | ast.Continue | ast.Expr) and not _calls(inner) for inner in node.body
                )
                if node.type is None or (silent and _is_everything(node.type)):
                    found.append(complaint(module, node.lineno, "catches everything and hides it"))
            elif _calls_suppress(node) and any(map(_is_everything, node.args)):
                found.append(complaint(module, node.lineno, "suppresses everything"))
    return found


RULES: tuple[Rule, ...] = (
    *(directions, circles, names, exports, folders, meanings, budgets, environment),
    *(pickling, finals, light, purity, numbered_fields, asking, hiding),
)
"""All of them."""


def _folders(modules: Modules) -> set[str]:
    """Returns the names of packages: modules that have modules in them."""
    return {name.rpartition(".")[0] for name in modules}


def _own(module: Module) -> Iterator[Import]:
    """Imports of our modules, relative to none."""
    yield from (item for item in module.imports if item.target.partition(".")[0] == PACKAGE)


def _listed(node: ast.stmt | None) -> list[str] | None:
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    if not isinstance(value, ast.List | ast.Tuple):
        return None
    texts = [item.value for item in value.elts if isinstance(item, ast.Constant) and isinstance(item.value, str)]
    return texts if len(texts) == len(value.elts) else None


def _order(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest: as ruff sorts."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2), name


def _class_budget(modules: Modules, module: Module, node: ast.ClassDef) -> Iterator[str]:
    methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)}
    public = [name for name in methods if not name.startswith("_")]
    if len(public) > METHODS:
        yield f"{node.name}: {len(public)} public methods, at most {METHODS}"
    if "__init__" in methods:
        given = methods["__init__"].args
        count = (
            len([*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, [given.vararg, given.kwarg])]) - 1
        )
        if count > ARGUMENTS:
            yield f"{node.name}: {count} arguments to construct it, at most {ARGUMENTS}"
    if _is_dataclass(node):
        count = len(_fields(modules, module, node))
        if count > FIELDS:
            yield f"{node.name}: {count} fields, at most {FIELDS}"


def _is_dataclass(node: ast.ClassDef) -> bool:
    plain = [item.func if isinstance(item, ast.Call) else item for item in node.decorator_list]
    return any(words(item)[-1:] == ["dataclass"] for item in plain)


def _fields(modules: Modules, module: Module, node: ast.ClassDef) -> set[str]:
    """Names of a dataclass's fields, inherited ones too."""
    found = {
        item.target.id
        for item in node.body
        if isinstance(item, ast.AnnAssign)
        and isinstance(item.target, ast.Name)
        and "ClassVar" not in ast.unparse(item.annotation)
    }
    for home, base in _bases(modules, module, node):
        found |= _fields(modules, home, base) if _is_dataclass(base) else set()
    return found


def _mentions(module: Module, package: str, wanted: set[str]) -> list[int]:
    """Lines that name `package.<wanted>`, whatever it is called here, or import it by name."""
    aliases = {
        item.local
        for item in module.imports
        if item.name is None and (item.target == package or (item.local == package and item.target.startswith(package)))
    }
    lines = [item.line for item in module.imports if item.target == package and item.name in wanted]
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and node.attr in wanted and "".join(words(node.value)) in aliases:
            lines.append(node.lineno)
    return lines


def _bases(modules: Modules, module: Module, node: ast.ClassDef) -> Iterator[tuple[Module, ast.ClassDef]]:
    """Yields the bases that are ours, each with the module that defines it."""
    for base in node.bases:
        said = words(base.value if isinstance(base, ast.Subscript) else base)
        if said and (found := _find(modules, module, said)):
            yield found


def _find(modules: Modules, module: Module, said: list[str]) -> tuple[Module, ast.ClassDef] | None:
    """Follows a dotted name to a class of ours, through imports and re-exports."""
    head, *rest = said
    node = definitions(module).get(head)
    if isinstance(node, ast.ClassDef):
        return module, node
    for item in module.imports:
        if item.local == head and item.name is not None and item.target in modules:
            return _find(modules, modules[item.target], [item.name, *rest])
        if item.local == head and item.name is None:
            # `import a.b` binds a; `import a.b as c` and `from a import b` bind the module itself.
            whole = said if item.target.partition(".")[0] == head else [*item.target.split("."), *rest]
            if ".".join(whole[:-1]) in modules:
                return _find(modules, modules[".".join(whole[:-1])], whole[-1:])
    return None


def _is_abstract(modules: Modules, module: Module, node: ast.ClassDef) -> bool:
    said = [words(base.value if isinstance(base, ast.Subscript) else base)[-1:] for base in node.bases]
    tagged = any(keyword.arg == "tag_field" for keyword in node.keywords)  # the base of a union of msgspec's
    return tagged or ["ABC"] in said or ["Protocol"] in said or bool(_missing(modules, module, node))


def _missing(modules: Modules, module: Module, node: ast.ClassDef) -> set[str]:
    """Names of abstract methods that neither the class nor its bases of ours define."""
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
    abstract = {
        item.name for item in methods if any(words(mark)[-1:] == ["abstractmethod"] for mark in item.decorator_list)
    }
    inherited = {name for home, base in _bases(modules, module, node) for name in _missing(modules, home, base)}
    return abstract | (inherited - {item.name for item in methods})


def _reached(modules: Modules, start: Module) -> Iterator[tuple[list[str], Import]]:
    """Yields what importing a module imports from outside, with the way there."""
    # Importing a module imports its packages first.
    todo = [name for name in packages(start.name) if name in modules]
    ways = {name: [start.name, name] if name != start.name else [name] for name in todo}
    while todo:
        name = todo.pop()
        for item in modules[name].imports:
            if item.when != "top":
                continue
            if item.target.partition(".")[0] != PACKAGE:
                yield ways[name], item
                continue
            for other in packages(item.target):
                if other in modules and other not in ways:
                    ways[other] = [*ways[name], other]
                    todo.append(other)


def _is_everything(node: ast.expr) -> bool:
    kinds = node.elts if isinstance(node, ast.Tuple) else [node]
    return any(words(kind)[-1:] in (["Exception"], ["BaseException"]) for kind in kinds)


def _calls_suppress(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and words(node.func)[-1:] == ["suppress"]


def _calls(node: ast.AST) -> bool:
    return any(isinstance(inner, ast.Call) for inner in ast.walk(node))
