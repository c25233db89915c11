"""Leaves a user's objects as they were: whatever a trial changes in them, however deep, is put back.

with untouched(job.loss, module): ...   attributes, containers, arrays, tensors, generators, closures, globals
"""

from __future__ import annotations

import operator
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from headrace.modules import restore, same_values

_MOST = 100_000
"""Objects that are looked at: an attribute may lead to anything, a data set of a million examples, too."""
_MOST_BYTES = 1 << 26
"""Of the tensors and arrays that are copied."""
_FOREIGN = ("torch", "numpy", "builtins", "threading", "logging", "_thread", "io", "abc", "typing", "headrace")
"""Libraries whose objects are not looked into."""
LIBRARIES = ("torchvision", "transformers", "timm", "diffusers", "peft")
"""Libraries whose classes are not looked into: there are many, and they keep nothing there."""
_VARIABLES = (int, float, np.ndarray, list, dict, set, deque)
_COUNTING = (torch.int64, torch.int32, torch.float32, torch.float64)
_VALUES = (bool, int, float, complex, str, bytes, type, ModuleType)


@contextmanager
def untouched(*roots: Any, but: Iterable[Tensor] = ()) -> Iterator[None]:
    """Puts back what its body changes in objects, but in some tensors."""
    state = _State(but)
    for root in roots:
        state.enter(root)
    try:
        yield
    finally:
        state.put_back()


@contextmanager
def same_generators() -> Iterator[None]:
    """Puts the global generators of numpy and Python back to where they were."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def reachable(root: Any, but: Iterable[Any] = ()) -> list[Any]:
    """Returns what an object leads to: its attributes, what it has closed over, and so on, but some objects."""
    state = _State(but)
    state.enter(root)
    return list(state.seen.values())


class Counters:
    """The numbers in what an object leads to: attributes, variables, lengths of lists, tensors of one element."""

    def __init__(self, root: Any, but: Sequence[Any]) -> None:
        skipped = set(map(id, but))
        self.seen = [each for each in reachable(root, but) if id(each) not in skipped]
        self._names: dict[int, str] = {}
        for value in self.seen:
            self._names |= {id(each): name for name, each in _named(value)}
        cells = [each for each in self.seen if isinstance(each, CellType)]
        self._names |= {id(each): self._names.get(id(cell), "") for cell in cells for each in _content(cell)}
        self._held = [(each, self._numbers(each)) for each in self.seen]

    def changed(self) -> list[str]:
        """Returns the names of those that have changed; also iterators, which tell nothing of where they are."""
        found = [
            self._names.get(id(each), type(each).__name__)
            for each in self.seen
            if isinstance(each, Iterator) and type(each).__module__ in ("builtins", "itertools")
        ]
        for value, before in self._held:
            found += [name for name, number in self._numbers(value).items() if before.get(name) != number]
        return list(dict.fromkeys(found))

    def _numbers(self, value: Any) -> dict[str, float]:
        name = self._names.get(id(value), type(value).__name__)
        if isinstance(value, list | deque | set):
            items = [each for each in value if type(each) in (int, float)] if isinstance(value, list) else []
            return {name: hash((len(value), *items))}
        if isinstance(value, Tensor):
            return {name: float(value)} if value.numel() == 1 and value.dtype in _COUNTING else {}
        pairs = [(name, each) for each in _content(value)] if isinstance(value, CellType) else _named(value)
        return {key: each for key, each in pairs if type(each) in (int, float)}


def _named(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields what a value keeps by names."""
    if isinstance(value, FunctionType):
        yield from zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        places = reversed(value.__code__.co_varnames[: value.__code__.co_argcount])
        yield from zip(places, reversed(value.__defaults__ or ()), strict=False)
        space = {} if _is_foreign(value) else value.__globals__
        yield from ((name, space[name]) for name in value.__code__.co_names if name in space)
    elif isinstance(value, dict | type):
        yield from ((str(key), each) for key, each in [*(value if isinstance(value, dict) else vars(value)).items()])


class _State:
    def __init__(self, but: Iterable[Tensor]) -> None:
        self.seen: dict[int, Any] = {id(each): each for each in but}
        self._undo: list[Callable[[], object]] = []
        self._bytes = 0

    def put_back(self) -> None:
        for undo in self._undo:
            undo()

    def enter(self, value: Any) -> None:
        waiting = [value]
        while waiting and len(self.seen) < _MOST:
            value = waiting.pop()
            if value is None or isinstance(value, _VALUES) or id(value) in self.seen:
                continue
            # Held, so that no other object gets its id.
            self.seen[id(value)] = value
            waiting += self._note(value)

    def _note(self, value: Any) -> Iterable[Any]:
        """Notes how to put a value back; returns what is inside."""
        if isinstance(value, Tensor):
            self._note_tensor(value)
        elif isinstance(value, np.ndarray):
            if value.flags.writeable and value.dtype != object and self._fits(value.nbytes):
                self._undo.append(partial(np.copyto, value, value.copy()))
        elif isinstance(value, dict):
            self._undo.append(partial(_refill, value, dict(value)))
            return value.values()
        elif isinstance(value, list | deque | set):
            self._undo.append(partial(_refill, value, list(value)))
            return value
        elif isinstance(value, tuple | frozenset):
            return value
        elif isinstance(value, random.Random):
            self._undo.append(partial(value.setstate, value.getstate()))
        elif isinstance(value, torch.Generator):
            self._undo.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, np.random.Generator):
            self._undo.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        elif isinstance(value, np.random.RandomState):
            self._undo.append(partial(value.set_state, value.get_state()))
        else:
            return self._note_object(value)
        return ()

    def _note_object(self, value: Any) -> Iterable[Any]:
        if isinstance(value, CellType):
            content = _content(value)
            self._undo.append(partial(_set_content, value, content))
            return content
        if isinstance(value, FunctionType):
            if value.__closure__ is None and _is_foreign(value):
                return ()
            # The variables of its module that it names.
            kinds = (*_VARIABLES, Tensor, FunctionType, nn.Module)
            variables = [] if _is_foreign(value) else self._note_names(value, kinds)
            return (*(value.__closure__ or ()), *(value.__defaults__ or ()), vars(value), *variables)
        if isinstance(value, MethodType):
            return value.__self__, value.__func__
        if isinstance(value, partial):
            return value.func, value.args, value.keywords
        if isinstance(value, torch.jit.ScriptModule):
            return (*value.parameters(), *value.buffers())
        users = isinstance(value, nn.Module | Dataset | DataLoader)
        if users or type(value).__module__.partition(".")[0] not in _FOREIGN:
            for kind in type(value).__mro__:
                self._note_class(kind)
            state: Any = getattr(value, "__dict__", None)
            slots = [name for kind in type(value).__mro__ for name in _slots(kind)]
            slots = [name for name in slots if getattr(value, name, _NOTHING) is not _NOTHING]
            for name in slots:
                self._undo.append(partial(_set_again, value, name, getattr(value, name)))
            inside = [getattr(value, name) for name in slots]
            return [state, *inside] if isinstance(state, dict) else inside
        return ()

    def _note_class(self, kind: type) -> None:
        """Notes the numbers and containers of a class of the user's own, and of the modules of its methods."""
        if id(kind) in self.seen or kind.__module__.partition(".")[0] in (*_FOREIGN, *LIBRARIES):
            return
        self.seen[id(kind)] = kind
        for name, each in list(vars(kind).items()):
            if isinstance(each, FunctionType):
                for content in self._note_names(each, _VARIABLES):
                    self._note(content)
            elif isinstance(each, _VARIABLES) and not name.startswith("__"):
                self._undo.append(partial(_set_again, kind, name, each))
                self._note(each)

    def _note_names(self, function: FunctionType, kinds: tuple[type, ...]) -> list[Any]:
        """Notes and returns the variables of a function's module that it names, of some kinds."""
        space = function.__globals__
        names = [name for name in function.__code__.co_names if name in space]
        found = {name: space[name] for name in names if isinstance(space[name], kinds)}
        self._undo.append(partial(space.update, found))
        return list(found.values())

    def _note_tensor(self, tensor: Tensor) -> None:
        if tensor.is_meta or not self._fits(tensor.nbytes if tensor.layout is torch.strided else 0):
            return
        value = tensor.detach().clone()

        def undo() -> None:
            # By their values: writing to `.data` counts up no version.
            if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
                tensor.data = value
            elif not same_values(tensor, value):
                with torch.no_grad():
                    restore(tensor, value)

        self._undo.append(undo)

    def _fits(self, size: int) -> bool:
        self._bytes += size
        return self._bytes <= _MOST_BYTES


def _is_foreign(function: FunctionType) -> bool:
    return function.__module__ is None or function.__module__.partition(".")[0] in _FOREIGN


def _refill(container: Any, content: Any) -> None:
    """Puts a container's content back, if it is another one."""
    if isinstance(container, dict):
        if len(container) == len(content) and all(
            key is other and value is content[other]
            for (key, value), other in zip(container.items(), content, strict=True)
        ):
            return
    elif len(container) == len(content) and all(map(operator.is_, container, content)):
        return
    container.clear()
    (container.extend if isinstance(container, list | deque) else container.update)(content)


_NOTHING = object()


def _content(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # nothing yet
        return []


def _set_content(cell: CellType, content: list[Any]) -> None:
    now = _content(cell)
    for value in content:
        if not now or now[0] is not value:
            cell.cell_contents = value


def _set_again(owner: Any, name: str, value: Any) -> None:
    if getattr(owner, name, _NOTHING) is not value:
        # An object may refuse it, as one that is frozen does.
        (type if isinstance(owner, type) else object).__setattr__(owner, name, value)


def _slots(kind: type) -> Iterable[str]:
    named: Any = vars(kind).get("__slots__", ())
    return [named] if isinstance(named, str) else [each for each in named if each not in ("__dict__", "__weakref__")]
