"""Keeps torch's compiler out of processes that compile nothing.

Every optimizer imports `torch._dynamo` when it is made, and again when it steps, only to be left out of graphs: as much
work as importing torch itself, in runs of which most never compile. A module in its place answers such calls, and is
replaced by the compiler as soon as anything else of it is wanted.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from headrace.internals import COMPILER, COMPILER_DISABLED, compiler_place

_switch = threading.Lock()


def postpone_compiler() -> None:
    """Lets torch run without its compiler until something uses it; does nothing where it is imported already."""
    if COMPILER not in sys.modules:
        sys.modules[COMPILER] = _Postponed()
        compiler_place(sys.modules[COMPILER])


def has_compiler() -> bool:
    """Tells whether this process has imported the compiler."""
    return COMPILER in sys.modules and not isinstance(sys.modules[COMPILER], _Postponed)


def import_whole(name: str) -> None:
    """Imports a module now, also the compiler where it was postponed."""
    held = sys.modules.get(name)
    if isinstance(held, _Postponed):
        held.give_way()
    importlib.import_module(name)


class _Postponed(ModuleType):
    """Stands for the compiler while there are no graphs."""

    def __init__(self) -> None:
        super().__init__(COMPILER)
        self.__spec__ = importlib.util.find_spec(COMPILER)
        self.__file__ = self.__spec__.origin if self.__spec__ else None
        # What a process group calls for the sake of graphs that name others.
        self.trace_rules = SimpleNamespace(clear_lru_cache=_nothing)
        self.graph_break = _nothing
        self._plain: list[Callable[..., Any]] = []

    def disable(self, fn: Any = None, recursive: bool = True, **options: Any) -> Any:
        """Returns a function of torch's own as it is, since no graph could contain it."""
        if options == {"wrapping": False}:
            self._plain.append(fn)
            return fn
        return self._compiler().disable(fn, recursive, **options)

    def __getattr__(self, name: str) -> Any:
        # Those who go through all modules ask for more such names.
        if name.startswith("__") and name != "__path__":
            raise AttributeError(f"module {COMPILER!r} has no attribute {name!r}")
        return getattr(self._compiler(), name)

    def _compiler(self) -> Any:
        self.give_way()
        return importlib.import_module(COMPILER)

    def give_way(self) -> None:
        """Leaves its place to the compiler, which the next import of it finds."""
        with _switch:
            if sys.modules.get(COMPILER) is self:
                del sys.modules[COMPILER]
                compiler_place(None)
                for function in self._plain:
                    # It may be part of a graph from now on.
                    function.__dict__.pop(COMPILER_DISABLED, None)


def _nothing() -> None:
    """There is no graph."""
