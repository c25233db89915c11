"""What guards a private name of another library: it is found late, and where it is missing a feature is refused."""

from __future__ import annotations

import importlib
import importlib.metadata
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.errors import UnfitMachine


@dataclass(frozen=True)
class PrivateName:
    """A name that an import finds.

    Attributes:
        path: "module:name".
        purpose: what headrace needs it for.
        without: what headrace does where it is missing; "refused: FEATURE" if the feature is.
        substitute: what stands in its place there.
    """

    path: str
    purpose: str
    without: str
    substitute: Callable[[], Any] | None = None

    def find(self) -> Any:
        """Returns what the name stands for, or what headrace does with instead; never raises."""
        module, _, name = self.path.partition(":")
        try:
            return operator.attrgetter(name)(importlib.import_module(module))
        except (ImportError, AttributeError):
            return self.substitute() if self.substitute else _absent(self)


@dataclass(frozen=True)
class PrivateAttribute:
    """An attribute of objects of another library, as a function of the object.

    Attributes:
        name: of the attribute.
        of: the class whose objects have it, "torch:Tensor".
        purpose, feature: what headrace needs it for, and what is refused without it.
        newer: the name in newer releases, which may keep the other for those who still call it.
    """

    name: str
    of: str
    purpose: str
    feature: str
    newer: str = ""

    def name_in(self, owner: Any) -> str:
        """Returns the name by which `owner` has it and uses it."""
        return self.newer if self.newer and getattr(owner, self.newer, None) is not None else self.name

    def __call__(self, owner: Any) -> Any:
        """Returns the attribute of `owner`; raises UnfitMachine if this version of the library has none."""
        try:
            return getattr(owner, self.name_in(owner))
        except AttributeError:
            raise UnfitMachine(refusal(self.feature, f"{self.of}.{self.name}")) from None


def refusal(feature: str, path: str) -> str:
    library = path.partition(":")[0].partition(".")[0]
    installed = importlib.metadata.version(library)
    remedy = f"an older release may have it: pip install '{library}<{installed}'"
    if library == "torch":
        remedy = "`headrace doctor` lists the versions that the tests ran with: install one of them"
    return f"{feature} needs {path.replace(':', '.')}, which {library} {installed} lacks; {remedy}"


def _absent(name: PrivateName) -> Any:
    """Returns what can be imported, subclassed and caught in the place of a missing name, but not used."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise UnfitMachine(refusal(name.without.removeprefix("refused: "), name.path))

    return type(name.path.rpartition(":")[2], (Exception,), {"__new__": refuse, "__init__": refuse})


def one_by_one(method: str) -> Callable[..., list[Any]]:
    """Returns what calls a method of each tensor: the same numbers, slower."""

    def run(tensors: Any, *arguments: Any, **options: Any) -> list[Any]:
        def of(at: int) -> list[Any]:
            return [one[at] if isinstance(one, list | tuple) else one for one in arguments]

        return [getattr(tensor, method)(*of(at), **options) for at, tensor in enumerate(tensors)]

    return run
