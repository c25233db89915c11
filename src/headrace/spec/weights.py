"""Where a model's first values are stored, and what of it is not there."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.errors import UsageError


@dataclass(frozen=True)
class Weights:
    """Stored values of which not all are the model's, or not by its names.

    Attributes:
        where: a folder of safetensors files, one such file, or the URL of either.
        rename: what names begin with there, and what the model has in its place: `{"": "backbone."}`. The longest
            beginning that fits counts.
        missing: names of the model's that are not there, or patterns of them: they keep what the constructor gave them,
            as a new head does.
        unused: names that are there and not in the model, or patterns of them.

    Raises:
        UsageError: an argument is of another kind.

    Examples:
        >>> hr.Weights("bert", rename={"bert.": "encoder."}, missing=["head.*"], unused=["cls.*"]).missing
        ['head.*']
    """

    where: str | os.PathLike[str]
    rename: Mapping[str, str] = field(default_factory=dict)
    missing: Sequence[str] = ()
    unused: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.where, str | os.PathLike) or self.where == "":
            raise UsageError(f"weights must be a folder, a file or a URL, got {self.where!r}")
        if not isinstance(self.rename, Mapping) or not _are_texts([*self.rename, *self.rename.values()]):
            raise UsageError(f"rename must be a dict of beginnings of names, {{'': 'backbone.'}}, got {self.rename!r}")
        for name, given in (("missing", self.missing), ("unused", self.unused)):
            if isinstance(given, str) or not isinstance(given, Sequence) or not _are_texts(given):
                raise UsageError(f"{name} must be a list of names or patterns, ['head.*'], got {given!r}")

    @classmethod
    def of(cls, given: str | os.PathLike[str] | Weights) -> Weights:
        """Returns what a job's `weights` are."""
        return given if isinstance(given, Weights) else cls(given)

    def renamed(self, name: str) -> str:
        """Returns the model's name of what is stored by a name."""
        begin = max((each for each in self.rename if name.startswith(each)), key=len, default=None)
        return name if begin is None else self.rename[begin] + name[len(begin) :]


def _are_texts(values: Sequence[object]) -> bool:
    return all(isinstance(each, str) for each in values)
