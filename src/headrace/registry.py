"""Tables of things that are imported when they are first asked for, so that a run loads only what it uses."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any, TypeVar

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """Things by name: those of this package, and those that other installed packages add by an entry point.

    Looking for a name of this package imports that thing alone. Other packages are asked, by the metadata that pip has
    written, for names that are unknown here, and where all names are listed.

    Args:
        group: of the entry points: `[project.entry-points."headrace.strategies"]` of another package's pyproject.toml.
        places: "module:Name" by name.

    Examples:
        >>> Registry("headrace.strategies", {"mirrored": "headrace.strategies.mirrored:Mirrored"})["mirrored"].name
        'mirrored'
    """

    def __init__(self, group: str, places: Mapping[str, str]) -> None:
        self.group = group
        self.own_places = dict(places)

    @cached_property
    def places(self) -> Mapping[str, str]:
        """Every "module:Name" by name, those of other packages too; a name of this package stays this package's."""
        # Not at the top: it takes longer to import than the rest of `import headrace`.
        from importlib.metadata import entry_points

        added = {point.name: point.value for point in entry_points(group=self.group)}
        return dict(sorted({**added, **self.own_places}.items()))

    def __getitem__(self, name: str) -> T:
        thing: T = imported(self.own_places.get(name) or self.places[name])
        return thing

    def __contains__(self, name: object) -> bool:
        return name in self.own_places or name in self.places

    def place(self, thing: str) -> str | None:
        """Returns the place of what has this name in its module, "Mirrored"; None if there is none."""
        own = {place.rpartition(":")[2]: place for place in self.own_places.values()}
        return own.get(thing) or next((place for place in self.places.values() if place.endswith(f":{thing}")), None)

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)


def imported(place: str) -> Any:
    """Returns what "module:Name" names."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def lazy_names(package: str, places: Mapping[str, str], *tables: Registry[Any]) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a package (PEP 562), which imports a name, or what a table has, at its first use."""

    def find(name: str) -> Any:
        place = places.get(name)
        if place is None and name[:1].isupper():
            place = next(filter(None, (table.place(name) for table in tables)), None)
        if place is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return imported(place)

    return find
