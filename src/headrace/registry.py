"""Tables of things that are imported when they are first asked for, so that a run loads only what it uses."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.errors import HeadraceError, UsageError, in_one_line

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Things by name: those of this package, and those that other installed packages add by an entry point.

    Looking for a name of this package imports that thing alone. Other packages are asked, by the metadata that pip has
    written, for names that are unknown here, and where all names are listed.

    Besides, a place is a name: "mine.py:SlowMo" is what that file calls SlowMo, "package.module:SlowMo" a module.

    Args:
        group: of the entry points: `[project.entry-points."headrace.strategies"]` of another package's pyproject.toml.
        places: "module:Name" by name.
        base: "module:Name" of the class that things of other places are of; "" for any.
        made: whether they are objects of that class, not classes; a class is then called.

    Examples:
        >>> Registry("headrace.strategies", {"mirrored": "headrace.strategies.mirrored:Mirrored"})["mirrored"].name
        'mirrored'
    """

    def __init__(self, group: str, places: Mapping[str, str], base: str = "", made: bool = False) -> None:
        self.group, self._base, self._made = group, base, made
        self.places = dict(sorted(places.items()))

    @cached_property
    def added(self) -> Mapping[str, tuple[EntryPoint, ...]]:
        """The entry points of other packages by name; a name of this package stays this package's."""
        # Not at the top: it takes longer to import than the rest of `import headrace`.
        from importlib.metadata import entry_points

        points: dict[str, tuple[EntryPoint, ...]] = {}
        for point in entry_points(group=self.group) if self.group else ():
            if point.name not in self.places and point not in points.get(point.name, ()):
                points[point.name] = (*points.get(point.name, ()), point)
        return points

    def __getitem__(self, name: str) -> T:
        if name in self.places:
            thing: T = imported(self.places[name])
        elif is_place(name) and self.group:
            thing = self._checked(name, placed(name))
        else:
            thing = self._checked(name, self._load(*self.added[name]))
        return thing

    def __contains__(self, name: object) -> bool:
        """Whether there is such a thing; a place is looked for, and one with nothing of the kind is an error."""
        if is_place(name) and self.group:
            return self[str(name)] is not None
        return name in self.places or name in self.added

    def __iter__(self) -> Iterator[str]:
        return iter((*self.places, *sorted(self.added)))

    def __len__(self) -> int:
        return len(self.places) + len(self.added)

    def find(self, thing: str, added: bool) -> T | None:
        """Returns what has this name in its module, "Mirrored", of this package or `added`; None if there is none."""
        if added:
            things = {point.attr: name for name, (point, *_) in self.added.items()}
        else:
            things = {place.rpartition(":")[2]: name for name, place in self.places.items()}
        return self[things[thing]] if thing in things else None

    def _checked(self, name: str, thing: Any) -> Any:
        if not self._base:
            return thing
        base = imported(self._base)
        if isinstance(thing, type) and issubclass(thing, base):
            said = {each for each, kind in vars(base).get("__annotations__", {}).items() if "ClassVar" in str(kind)}
            lacking = {*getattr(thing, "__abstractmethods__", ()), *(said - {*dir(thing)})}
            if lacking:
                what = f"{', '.join(sorted(lacking))}, which each {base.__name__} has"
                raise UsageError(f"{name} lacks {what}; write it in {thing.__name__}")
            try:
                return thing() if self._made else thing
            except TypeError as error:
                raise UsageError(f"{name} cannot be made without values: {error}; give them defaults") from error
        if self._made and isinstance(thing, base):
            return thing
        raise UsageError(f"{name} is {thing!r:.100}, and must be a subclass of {base.__module__}.{base.__name__}")

    def _load(self, point: EntryPoint, *others: EntryPoint) -> Any:
        what = f"the entry point {point.name} = {point.value!r} of the group {self.group!r}"
        if others:
            raise UsageError(f"{what} is {others[0].value!r} in another installed package; uninstall one of the two")
        try:
            return point.load()
        except (Exception, SystemExit) as error:
            raise UsageError(
                f"{what} cannot be loaded: {in_one_line(error)}; mend or uninstall the package that has it"
            ) from error


def is_place(name: object) -> bool:
    """Returns whether a name says where something is: "mine.py:SlowMo", "package.module:SlowMo"."""
    return isinstance(name, str) and ":" in name


PLACED: dict[str, Any] = {}
"""What was found at places, by these; workers get it, and need not find the files."""
FILES: dict[str, ModuleType] = {}
"""The modules of files that were loaded, by their absolute path."""


def placed(place: str) -> Any:
    """Returns what a place names, and remembers it for workers.

    Raises:
        UsageError: there is no such file, module or name, or it cannot be imported.
    """
    if place not in PLACED:
        where, _, name = place.rpartition(":")
        module = _module_at(place, where)
        if not name or (thing := getattr(module, name, None)) is None:
            names = [key for key, each in vars(module).items() if getattr(each, "__module__", "") == module.__name__]
            there = f"no name {name!r} in {where}, which defines {', '.join(sorted(names)) or 'nothing':.200}"
            raise UsageError(f"{place} cannot be loaded: there is {there}")
        PLACED[place] = thing
    return PLACED[place]


def _module_at(place: str, where: str) -> ModuleType:
    is_file = where.endswith(".py") or "/" in where
    try:
        return _loaded(Path(where)) if is_file else importlib.import_module(where)
    except HeadraceError:
        raise
    except (Exception, SystemExit) as error:
        there = f"{where}.".startswith(f"{error.name}.") if isinstance(error, ModuleNotFoundError) else False
        if there or not where or (is_file and isinstance(error, OSError) and error.filename == where):
            why, remedy = f"there is no {where!r} here", "write it as file.py:Name or module:Name"
        else:
            why, remedy = in_one_line(error), f"mend {where}"
        raise UsageError(f"{place} cannot be loaded: {why}; {remedy}") from error


def _loaded(file: Path) -> ModuleType:
    path = file.resolve(strict=True)
    if str(path) not in FILES:
        spec = importlib.util.spec_from_file_location(f"headrace_file_{len(FILES)}_{path.stem}", path)
        if spec is None or spec.loader is None:
            raise UsageError(f"{file} is no Python file; its name must end in .py")
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        if str(path.parent) not in sys.path:
            # For what the file imports from beside it.
            sys.path.append(str(path.parent))
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[spec.name]
            raise
        FILES[str(path)] = module
    return FILES[str(path)]


def imported(place: str) -> Any:
    """Returns what "module:Name" names."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def lazy_names(package: str, places: Mapping[str, str], *tables: Registry[Any]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package (PEP 562), which imports a name, or what a table has, at its first use."""

    def find(name: str) -> Any:
        if name in places:
            return imported(places[name])
        # Those of this package first: the others are asked for names that are unknown here alone.
        things = (table.find(name, added) for added in (False, True) for table in tables if name[:1].isupper())
        thing = next((thing for thing in things if thing is not None), None)
        if thing is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return thing

    return find
