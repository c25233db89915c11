"""The optional dependencies of headrace, its extras: what its metadata asks for, and what of it is installed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution, distributions, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from headrace.errors import UnfitMachine

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_FOR_DEVELOPERS = "dev"
_MODULES = {"mlflow-skinny": "mlflow", "opencv-python-headless": "cv2", "scikit-learn": "sklearn"}
"""Of packages whose module has another name. Several packages may bring one module, opencv-python also cv2."""


@dataclass(frozen=True)
class Lack:
    """A package that is not installed, or in a version that is not asked for."""

    requirement: str
    installed: str | None

    def __str__(self) -> str:
        return f"{self.requirement} ({f'installed is {self.installed}' if self.installed else 'not installed'})"


def extras() -> tuple[str, ...]:
    """Returns the names of the extras for users; none where headrace is not installed but imported from its source."""
    try:
        names = distribution("headrace").metadata.get_all("Provides-Extra") or []
    except PackageNotFoundError:
        return ()
    return tuple(sorted({*names} - {_FOR_DEVELOPERS}))


def requirements(extra: str = "", of: str = "headrace") -> Iterator[Requirement]:
    """Yields what an extra of a package asks for, without an extra what every installation does."""
    for one in _requirements(of):
        if _is_of(one, extra) and (extra == "" or not _is_of(one, "")):
            yield one
            for inner in one.extras:
                yield from requirements(inner, one.name)


def lacks(wanted: Iterable[Requirement]) -> tuple[Lack, ...]:
    """Returns which of these packages are missing, too old or too new."""
    return tuple(lack for requirement in wanted if (lack := _lack(requirement)))


def half_installed() -> Mapping[str, tuple[Lack, ...]]:
    """Returns what is lacking of each extra of which a package is here that nothing else that is installed needs."""
    lacking = {extra: lacks(requirements(extra)) for extra in extras()}
    needed = {_name(one) for extra, lack in lacking.items() if not lack for one in requirements(extra)}
    for package in distributions():
        needed.update(_name(one) for one in _requirements(package.name) if _is_of(one, ""))
    alone = {
        extra: [one for one in requirements(extra) if _name(one) not in needed and installed(one.name)]
        for extra, lack in lacking.items()
        if lack
    }
    return {extra: lacking[extra] for extra, here in alone.items() if here}


def require_extra(extra: str, user: str) -> None:
    """Raises UnfitMachine where something of an extra is lacking; `user` is what needs it, "the page"."""
    if lacking := lacks(requirements(extra)):
        raise UnfitMachine(f"{user} needs {', '.join(map(str, lacking))}: {remedy(extra)}")


def remedy(extra: str) -> str:
    """Returns the command that installs an extra."""
    return f"pip install 'headrace[{extra}]'"


def import_package(name: str, need: str, install: str = "") -> Any:
    """Imports an optional module; an UnfitMachine says what `need`s it if it is missing, and how to `install` it.

    Without `install` it is of the extra `data`.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise UnfitMachine(f"{need} ({error}): {install or remedy('data')}") from error


def absent(*names: str) -> list[str]:
    """Returns those packages that are not installed, and whose module no other package brings."""
    return [name for name in names if installed(name) is None and not _has_module(name)]


def installed(name: str) -> str | None:
    """Returns the version of a package, None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _requirements(of: str) -> Iterator[Requirement]:
    # Here, because it takes 20 ms, and `remedy` needs none of it.
    from packaging.requirements import Requirement

    try:
        yield from map(Requirement, distribution(of).requires or ())
    except PackageNotFoundError:
        return


def _is_of(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def _name(requirement: Requirement) -> str:
    from packaging.utils import canonicalize_name

    return canonicalize_name(requirement.name)


def _lack(requirement: Requirement) -> Lack | None:
    name = _name(requirement)
    asked = f"{name}{requirement.specifier}"
    here = installed(name)
    if here is None:
        return None if _has_module(name) else Lack(asked, None)
    return None if requirement.specifier.contains(here, prereleases=True) else Lack(asked, here)


def _has_module(name: str) -> bool:
    """Returns whether there is the module of a package; a folder that has its name, of curves or runs, is none."""
    module = find_spec(_MODULES.get(name, name.replace("-", "_")))
    return module is not None and module.origin is not None
