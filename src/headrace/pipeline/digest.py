"""A digest of a model's code and configuration: models with one digest have the same layers.

It covers what forward can read. Modules and other objects count by their attributes, which hold submodules, hooks and
configurations; classes and functions by their code, with the defaults, closures and globals that it uses; parameters
by their form, since training changes their values; other tensors by their content, too. Installed packages do not
change while a process runs, so of their code only what the model itself holds counts, where it may have been
replaced, not what that calls.
"""

from __future__ import annotations

import functools
import hashlib
import os
import sys
import sysconfig
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from headrace import internals

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), range, slice, torch.Size)
_FOLDERS = (*map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")), Path(__file__).parents[1])
_INSTALLED = ("<frozen", *(f"{folder}{os.sep}" for folder in _FOLDERS))
_SITES = {"site-packages", "dist-packages"}
_MOST_BYTES = 1 << 25
"""A model that holds more than this beside its parameters has no digest: making one would take too long."""
_OF_CLASSES = {"__dict__", "__weakref__", "__doc__", "__annotations__", internals.ABC_STATE}
"""Attributes of a class that no forward reads, or that hold nothing of its own."""


class _Unseen(Exception):
    """An object's content cannot be seen."""


def digest(*values: Any) -> str | None:
    """Returns a digest of models, functions, tensors and other objects; None if the content of one cannot be seen."""
    walk = _Walk()
    try:
        for value in (torch.get_default_dtype(), *values):
            walk.add(value)
    except (_Unseen, RecursionError):
        return None
    return walk.hash.hexdigest()


class _Walk:
    """Adds objects to a hash, each once."""

    def __init__(self) -> None:
        self.hash = hashlib.blake2b(digest_size=20)
        self._left = _MOST_BYTES
        # What is seen stays alive, so that no other object gets its id.
        self._seen: dict[int, tuple[int, Any]] = {}

    def add(self, value: Any) -> None:
        """Adds one object, and what it holds."""
        if type(value) in _PLAIN:
            return self._write(type(value).__name__, repr(value))
        if id(value) in self._seen:
            return self._write("again", str(self._seen[id(value)][0]))
        self._seen[id(value)] = (len(self._seen), value)
        self._write(type(value).__qualname__)
        if isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, FunctionType):
            self._function(value)
        elif isinstance(value, CodeType):
            self._code(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, ModuleType):
            self._package(value, ())
        else:
            self._all(_parts(value))

    def _all(self, values: Any) -> None:
        self._write(str(len(values)))
        for value in values:
            self.add(value)

    def _write(self, *texts: str) -> None:
        for text in texts:
            self._update(f"{len(text)}:{text}".encode("utf-8", "surrogatepass"))

    def _update(self, content: bytes | memoryview) -> None:
        self._left -= len(content)
        if self._left < 0:
            raise _Unseen
        self.hash.update(content)

    def _tensor(self, tensor: Tensor) -> None:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
            raise _Unseen
        self._all([str(tensor.dtype), str(tensor.device), tensor.shape, tensor.requires_grad])
        if isinstance(tensor, nn.Parameter):
            return
        if tensor.nbytes > self._left:
            raise _Unseen
        flat = tensor.detach().cpu().contiguous().resolve_conj().resolve_neg().reshape(-1)
        self._update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")

    def _function(self, function: FunctionType) -> None:
        self._code(function.__code__)
        cells = [_content(cell) for cell in function.__closure__ or ()]
        if _is_installed(function.__code__.co_filename):
            # Of a decorator's wrapper the code is in a cell.
            return self._all([cell for cell in cells if isinstance(cell, FunctionType)])
        self._all([function.__defaults__, function.__kwdefaults__, cells, vars(function)])
        names = _names(function.__code__)
        for name in names:
            if name in function.__globals__:
                self._named(name, function.__globals__[name], names)

    def _named(self, name: str, value: Any, names: tuple[str, ...]) -> None:
        self._write(name)
        if isinstance(value, ModuleType):
            self._package(value, names)
        else:
            self.add(value)

    def _package(self, module: ModuleType, names: tuple[str, ...]) -> None:
        """Adds a module of Python's; of the user's what code may read of it, by the names that the code has."""
        self._write(module.__name__)
        if _is_of_installed(module.__name__):
            return
        if not names:
            raise _Unseen
        for name in names:
            if name in vars(module):
                self._named(name, vars(module)[name], names)

    def _code(self, code: CodeType) -> None:
        self._update(code.co_code)
        self._all([code.co_names, code.co_varnames, code.co_freevars, code.co_consts])

    def _class(self, kind: type) -> None:
        self._write(kind.__module__, kind.__qualname__)
        own = {name: value for name, value in vars(kind).items() if name not in _OF_CLASSES}
        if _is_of_installed(kind.__module__):
            own = {name: value for name, value in own.items() if isinstance(value, FunctionType)}
        self._all([kind.__bases__, own])


def _parts(value: Any) -> Any:
    """Returns what an object is made of."""
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, property):
        return [value.fget, value.fset]
    if isinstance(value, classmethod | staticmethod):
        return [value.__func__]
    if isinstance(value, functools.cached_property):
        return [value.func]
    if isinstance(value, BuiltinFunctionType):
        # Of a function its module, of a method the object.
        return [value.__qualname__, str(value.__module__), value.__self__]
    if type(value) in (dict, MappingProxyType):
        return [each for item in value.items() for each in item]
    if type(value) in (list, tuple):
        return value
    # As copy.copy sees it. An object with state of its own in C tells it here, or refuses.
    try:
        reduced = value.__reduce_ex__(2)
    except Exception as error:
        raise _Unseen from error
    if isinstance(reduced, str):
        return [reduced]
    make, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    return [make, arguments, state, list(items or ()), list(pairs or ())]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # A name that has no value yet.
        return None


def _is_installed(path: str) -> bool:
    # Some packages are not in this environment's folder: those of a venv that sees another's, or the system's.
    return path.startswith(_INSTALLED) or not _SITES.isdisjoint(path.split(os.sep))


def _is_of_installed(module: str) -> bool:
    """Tells whether a module, by name, is of the standard library or of an installed package."""
    package = module.partition(".")[0]
    # A notebook's __main__ has no file.
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return package in sys.stdlib_module_names or _is_installed(file)


def _names(code: CodeType) -> tuple[str, ...]:
    """Returns the names that code reads, also in the functions that it defines."""
    inner = [name for const in code.co_consts if isinstance(const, CodeType) for name in _names(const)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))
