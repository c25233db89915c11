"""Parameters chosen by patterns of their names, as in a shell: `*.bias`, `encoder.*`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from headrace.errors import UnknownName, UsageError

_NAME = re.compile(r"[\w .:/-]{1,120}")


def require_name(name: object) -> None:
    """Raises a UsageError where a curve or a picture cannot have this name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"a name has letters, digits, spaces and _ . : / - (at most 120), got {name!r:.140}")


@dataclass(frozen=True)
class GroupedOptimizer:
    """What `grouped` returns: makes the optimizer, with one group for each pattern and one for the rest."""

    optimizer: Callable[..., Any]
    groups: Mapping[str, Mapping[str, Any]]
    options: Mapping[str, Any]

    def __call__(self, named: Iterable[tuple[str, Any]]) -> Any:
        chosen: dict[str, list[tuple[str, Any]]] = {pattern: [] for pattern in self.groups}
        rest: list[tuple[str, Any]] = []
        for name, parameter in named:
            pattern = next((group for group in self.groups if fnmatchcase(name, group)), None)
            (rest if pattern is None else chosen[pattern]).append((name, parameter))
        # A part of a model, as a pipeline's stage has, may have none of a pattern's.
        groups = [{**self.groups[pattern], "params": members} for pattern, members in chosen.items() if members]
        return self.optimizer([*([{"params": rest}] if rest else []), *groups], **self.options)

    def check(self, names: Iterable[str]) -> None:
        """Raises UnknownName where a pattern fits no parameter of the whole model."""
        require_matches(self.groups, names)


def grouped(optimizer: Callable[..., Any], groups: Mapping[str, Mapping[str, Any]], **options: Any) -> GroupedOptimizer:
    """Returns a job's optimizer whose parameter groups are chosen by patterns of names.

    `Job(optimizer=hr.grouped(torch.optim.AdamW, {"*.bias": {"weight_decay": 0.0}}, lr=0.1), ...)`

    Args:
        optimizer: a class of `torch.optim`, or a function as it: parameter groups and `options`.
        groups: pattern to the options of its group; a parameter belongs to the first pattern that fits its name.
        options: of the parameters that no pattern fits, and of the groups, where those say nothing else.

    Raises:
        UsageError: a group is no mapping of options; at the run's start, where a pattern fits no parameter.

    Examples:
        >>> from dataclasses import replace
        >>> optimizer = hr.grouped(torch.optim.SGD, {"*.bias": {"weight_decay": 0.0}}, lr=0.1, weight_decay=0.01)
        >>> hr.fit(replace(job, optimizer=optimizer)).status
        'ok'
    """
    for pattern, settings in groups.items():
        if not isinstance(settings, Mapping) or "params" in settings:
            raise UsageError(f"the group {pattern!r} needs options by name, as {{'lr': 0.01}}, got {settings!r:.60}")
    return GroupedOptimizer(optimizer, groups, options)


def require_matches(patterns: Iterable[str], names: Iterable[str]) -> None:
    """Raises UnknownName where a pattern fits no name."""
    known = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise UnknownName("parameter that fits", pattern, known, "the model")
