"""Digests of functions and values: they change with a function's code and with the values that it uses."""

from __future__ import annotations

import copyreg
import dis
import hashlib
import os
import platform
import sys
import sysconfig
import types
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace import internals
from headrace.errors import UsageError

_DIGEST_BYTES = 16
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_OURS = str(Path(__file__).parents[2])
_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(Ellipsis))


def fingerprint(*values: Any) -> str:
    """Returns a digest of values: functions by their code, closure, defaults and the globals that they name.

    Installed packages and headrace count by name and version; a user's module that a function uses as a whole counts by
    its name alone. A UsageError if a value cannot be digested.
    """
    digest = _Digest()
    digest.add_all(values)
    return digest.hash.hexdigest()


class _Digest:
    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self._seen: dict[int, int] = {}
        # Keeps the objects alive, so that no id is used twice.
        self._alive: list[Any] = []

    def add(self, value: Any) -> None:
        if isinstance(value, _PLAIN) and type(value) in _PLAIN:
            self._tell(type(value).__name__, repr(value).encode("utf-8", "surrogatepass"))
            return
        number = self._seen.setdefault(id(value), len(self._seen))
        if number < len(self._alive):
            self._tell("again", str(number).encode())
            return
        self._alive.append(value)
        match value:
            case Tensor() if value.layout is torch.strided:
                self._tell(f"tensor {value.dtype} {tuple(value.shape)}", b"")
                flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
                self.hash.update(flat.view(torch.uint8).numpy().data if len(flat) else b"")
            case np.ndarray() if value.dtype.kind != "O":
                self._tell(f"array {value.dtype.str} {value.shape}", b"")
                self.hash.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
            case list() | tuple() if type(value) in (list, tuple):
                self._tell(type(value).__name__, str(len(value)).encode())
                self.add_all(value)
            case dict() if type(value) is dict:
                self._tell("dict", str(len(value)).encode())
                self.add_all(part for item in value.items() for part in item)
            case set() | frozenset():
                # Sorted, since the order of a set differs from process to process.
                self._tell("set", "".join(sorted(fingerprint(item) for item in value)).encode())
            case types.ModuleType():
                self._tell("module", f"{value.__name__} {_version(value.__name__)}".encode())
            case types.CodeType():
                self._tell("code", platform.python_version().encode() + value.co_code)
                named = value.co_varnames[: value.co_argcount + value.co_kwonlyargcount]
                self.add_all((value.co_flags, value.co_names, named, value.co_consts))
            case types.FunctionType():
                self._function(value)
            case types.MethodType():
                self._tell("method", value.__name__.encode())
                self.add_all((value.__func__, value.__self__))
            case type():
                self._class(value)
            case staticmethod() | classmethod():
                self.add(value.__func__)
            case property():
                self.add_all((value.fget, value.fset))
            case types.BuiltinFunctionType():
                self._tell("built-in", value.__qualname__.encode())
                self.add(value.__self__ if value.__self__ is not None else str(value.__module__))
            case types.MethodDescriptorType() | types.WrapperDescriptorType() | types.ClassMethodDescriptorType():
                self._tell("built-in", f"{value.__objclass__.__qualname__}.{value.__name__}".encode())
            case types.MethodWrapperType():
                self._tell("built-in", value.__name__.encode())
                self.add(value.__self__)
            case _:
                self._object(value)

    def add_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.add(value)

    def _function(self, function: types.FunctionType) -> None:
        if _installed(function.__module__):
            self._named(function)
            return
        self.add(function.__code__)
        self.add_all((function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self.add(content)
        for name in _globals_of(function.__code__):
            if name in function.__globals__:
                self._tell("global", name.encode())
                self.add(function.__globals__[name])

    def _class(self, kind: type) -> None:
        if _installed(kind.__module__):
            self._named(kind)
            return
        self._tell("class", kind.__qualname__.encode())
        self.add_all(kind.__bases__)
        for name, value in sorted(vars(kind).items()):
            if not (name.startswith("__") and name.endswith("__")) or isinstance(value, types.FunctionType):
                if name == internals.ABC_STATE:
                    continue
                self._tell("attribute", name.encode())
                self.add(value)

    def _named(self, value: Any) -> None:
        module = str(value.__module__)
        self._tell("installed", f"{module}.{value.__qualname__} {_version(module)}".encode())

    def _object(self, value: Any) -> None:
        """Adds the parts of an object that a copy of it would be made of."""
        try:
            registered = copyreg.dispatch_table.get(type(value))
            parts = registered(value) if registered else value.__reduce_ex__(4)
        except Exception as error:
            kind = type(value)
            raise UsageError(
                f"a cache cannot tell whether a {kind.__module__}.{kind.__qualname__} is still the same ({error}); "
                'give .cache(folder, key="..."), and another key whenever the data or the transforms change'
            ) from error
        if isinstance(parts, str):
            self._tell("global", f"{type(value).__qualname__} {parts}".encode())
            wrapped = getattr(value, "__wrapped__", None)
            if wrapped is not None:
                self.add(wrapped)
            return
        function, arguments, *rest = parts
        self._tell("object", str(len(rest)).encode())
        self.add_all((function, arguments))
        for position, part in enumerate(rest):
            # The last parts are iterators over the items of lists and dicts.
            self.add(part if position == 0 or part is None or callable(part) else list(part))

    def _tell(self, kind: str, content: bytes) -> None:
        self.hash.update(f"{kind} {len(content)}:".encode())
        self.hash.update(content)


def _globals_of(code: types.CodeType) -> list[str]:
    """Returns the names of the globals that a function and its inner functions read."""
    names = {
        str(instruction.argval)
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(_globals_of(constant))
    return sorted(names)


def _installed(module: str) -> bool:
    """Returns whether a module counts by the version of its package."""
    loaded = sys.modules.get(module)
    if loaded is None or module == "__main__":
        return False
    file = getattr(loaded, "__file__", None)
    if file is None or file.startswith((*_LIBRARIES, _OURS)):
        return True
    # Also the user's site-packages, those of another environment, and what `pip install --target` has filled.
    return any(_has_installed(folder) for folder in sys.path if folder and file.startswith(os.path.join(folder, "")))


@cache
def _has_installed(folder: str) -> bool:
    """Returns whether packages have been installed into a folder; not of one whose package is installed editable."""
    return any(Path(folder).glob("*.dist-info"))


def _version(module: str) -> str:
    root: Mapping[str, Any] = vars(sys.modules.get(module.partition(".")[0], types.ModuleType("none")))
    return str(root.get("__version__", platform.python_version() if _installed(module) else ""))
