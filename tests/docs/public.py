"""What is public: the names that docs/api.md promises, and the signatures that stable ones had in the last release.

`scripts/public-names` writes the signatures as they are now to tests/docs/public_names.txt, a file of stubs that griffe
reads as it reads the package.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import griffe

from docs.pages import ROOT, blocks

RECORD = ROOT / "tests" / "docs" / "public_names.txt"
FRONTS = (
    *("headrace", "headrace.accelerate", "headrace.checkpoint", "headrace.collectives", "headrace.data"),
    *("headrace.errors", "headrace.metrics", "headrace.parameter_server", "headrace.tasks", "headrace.testing"),
)
"""All that their `__all__` lists is public."""
LOOK_INSIDE = ("answers", "es", "ideas", "tensor_parallel")
"""Folders of pages that show how headrace works by what is not public."""
MADE_BY_RUNS = ("Comparison", "Moment", "Run", "Worker")
"""Classes whose objects users are given: their constructors are not public."""
_ROW = re.compile(r"^\| `(headrace[\w.]+)` \| (.*?) \| (.*) \|$", re.MULTILINE)
_IMPORT = re.compile(r"^from (headrace[\w.]*) import (?:\(([^)]*)\)|([\w, ]+))", re.MULTILINE)
REMEDY = (
    "Keep the old call working for two minor versions, with a DeprecationWarning (docs/api.md). If it must break now, "
    "name it under '### Breaking' in CHANGELOG.md and record the new signatures with scripts/public-names."
)


@dataclass(frozen=True)
class Break:
    """A stable name that no longer is what it was, or takes what it took."""

    name: str
    what: str
    was: str
    now: str

    def __str__(self) -> str:
        return f"{self.name}: {self.what}\n    it was  {self.was}\n    it is   {self.now}"


def rows() -> list[tuple[str, str, str]]:
    """Returns each row of docs/api.md: name, promise, and what it is."""
    return _ROW.findall((ROOT / "docs" / "api.md").read_text(encoding="utf-8"))


def promised(kind: str) -> list[str]:
    """Returns the names with a promise."""
    return [name for name, promise, _ in rows() if promise == kind]


def public_names() -> set[str]:
    """Returns the names that the package lists, and those that pages have a user import from its insides."""
    names = {f"{front}.{name}" for front in FRONTS for name in importlib.import_module(front).__all__}
    known = {id(value_of(name)) for name in names}
    return names | {name for name in imported_by_pages() if id(value_of(name)) not in known}


def imported_by_pages() -> Iterator[str]:
    """Yields what the code of pages, and of the files that `headrace new` writes, imports from headrace."""
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.md"), ROOT / "README.md"]
    shown = [page for page in pages if not any(name in page.parts for name in LOOK_INSIDE)]
    texts = [block.text for page in shown for block in blocks(page) if block.language == "python"]
    templates = ROOT / "src" / "headrace" / "cli" / "commands" / "extending" / "templates"
    for text in (*texts, *(file.read_text(encoding="utf-8") for file in templates.glob("*.txt"))):
        for module, several, one in _IMPORT.findall(text):
            yield from (f"{module}.{name.strip()}" for name in (several or one).split(",") if name.strip())


def value_of(name: str) -> object:
    """Returns what a dotted name stands for; an AttributeError or ImportError if there is nothing."""
    module, _, last = name.rpartition(".")
    found = importlib.import_module(module)
    return getattr(found, last) if hasattr(found, last) else importlib.import_module(name)


def signatures(names: Iterable[str], provisional: Iterable[str], source: Path = ROOT / "src") -> str:
    """Returns the stubs of names of the package in a folder, as text; a name that is not there has none.

    Of a class with a base that is provisional there are its constructor, and the attributes that this sets.
    """
    package = griffe.load("headrace", search_paths=[source], allow_inspection=False)
    loose = {target.path for name in provisional if isinstance(target := _find(package, name), griffe.Class)}
    stubs: dict[str, list[str]] = {}
    for name in sorted(names):
        module, _, last = name.rpartition(".")
        if (target := _find(package, name)) is not None:
            stubs.setdefault(module, []).append(_stub(target, last, loose))
    return "\n".join(f"# {module}\n{''.join(lines)}" for module, lines in stubs.items())


def _find(package: griffe.Object | griffe.Alias, name: str) -> griffe.Object | None:
    try:
        found = package[name.partition(".")[2]]
        return found.final_target if isinstance(found, griffe.Alias) else found
    except (KeyError, griffe.AliasResolutionError):
        return None


def _stub(target: griffe.Object, name: str, loose: set[str]) -> str:
    if isinstance(target, griffe.Function):
        return f"def {target.signature(name=name)}: ...\n"
    if not isinstance(target, griffe.Class):
        value = target.value if isinstance(target, griffe.Attribute) else repr(target.kind.value)
        return f"{name} = {value}\n"
    members = {each: member for base in reversed([target, *target.mro()]) for each, member in base.members.items()}
    made = members.pop("__init__", None) if name in MADE_BY_RUNS else members.get("__init__")
    only = {"__init__", *(each.name for each in getattr(made, "parameters", ()))}
    narrow = any(base.path in loose for base in target.mro())
    lines = [f"class {name}:\n"]
    for each, member in sorted(members.items()):
        if each in only if narrow else each in ("__init__", "__call__") or not each.startswith("_"):
            own = member.final_target if isinstance(member, griffe.Alias) else member
            call = f"def {own.signature()}: ..." if isinstance(own, griffe.Function) else f"{each} = ..."
            lines.append(f"    {call}\n")
    return "".join(lines) if len(lines) > 1 else f"class {name}: ...\n"


def breaks(before: str, now: str) -> Iterator[Break]:
    """Yields what the stubs of a release have and those of another do not, or not in that form."""
    others = dict(_modules(now))
    for module, old in _modules(before):
        new = others.get(module) or griffe.visit(module, Path(module), "")
        for found in griffe.find_breaking_changes(old, new):
            path = found.obj.path.removeprefix(f"{module}.")
            parameter = getattr(found.old_value or found.new_value, "name", "")
            what = f"{found.kind.value} ({parameter})" if "arameter" in found.kind.value else found.kind.value
            yield Break(found.obj.path, what, _shown(old, path), _shown(new, path))
        for name, member in old.members.items():
            # A preset, such as LocalSGD: griffe compares no values.
            if isinstance(member, griffe.Attribute) and name in new.members and _shown(old, name) != _shown(new, name):
                yield Break(f"{module}.{name}", "Value changed", _shown(old, name), _shown(new, name))


def _modules(stubs: str) -> Iterator[tuple[str, griffe.Module]]:
    for text in stubs.split("\n# "):
        module, _, code = text.removeprefix("# ").partition("\n")
        yield module, griffe.visit(module, Path(module), code)


def _shown(module: griffe.Module, path: str) -> str:
    try:
        found = module[path]
    except KeyError:
        return "gone"
    if isinstance(found, griffe.Function):
        return found.signature(name=path)
    return f"{path} = {found.value}" if isinstance(found, griffe.Attribute) else path


def unannounced(found: Iterable[Break], changelog: str) -> list[Break]:
    """Returns the breaks whose names the changelog's newest version does not have below "### Breaking"."""
    newest = "\n## ".join(changelog.split("\n## ")[1:2])
    told = newest.partition("### Breaking\n")[2].partition("\n### ")[0]
    return [each for each in found if f"`{each.name.removesuffix('.__init__')}`" not in told]


def recorded() -> tuple[str, str]:
    """Returns the version that the record is of, and its stubs."""
    head, _, stubs = RECORD.read_text(encoding="utf-8").partition("\n")
    return head.removeprefix("# headrace "), stubs


def version_of(changelog: str) -> tuple[str, bool]:
    """Returns the changelog's newest version, and whether it is released."""
    heading = re.search(r"^## (\S+?),? (.*)$", changelog, re.MULTILINE)
    assert heading is not None, "CHANGELOG.md has no heading such as '## 0.1.0, unreleased'"
    return heading[1], heading[2] != "unreleased"


def main() -> None:
    """Records the signatures of stable names, unless one breaks of which the changelog does not say so."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    now = signatures(promised("stable"), promised("provisional"))
    if RECORD.exists() and (left := unannounced(breaks(recorded()[1], now), changelog)):
        sys.exit("\n".join([*map(str, left), "nothing was recorded: name them under '### Breaking' in CHANGELOG.md"]))
    RECORD.write_text(f"# headrace {version_of(changelog)[0]}\n{now}", encoding="utf-8")


if __name__ == "__main__":
    main()
