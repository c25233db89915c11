"""What a model keeps in plain attributes: numbers, arrays and tensors that are neither parameters nor saved buffers.

Each process builds the model for itself. What a constructor draws from torch, numpy and `random` is the same in all,
since these are seeded; what comes from the time, `os.urandom`, a counter or `hash()` is not. Parameters and buffers are
rank 0's on all workers; attributes are those of the launcher's model, so that `run.model` predicts what was trained:

    launcher    build ─► values of attributes ─┐                                 run.model
    worker                                     └► build, take the values ─► train ─► parameters, buffers
"""

from __future__ import annotations

import base64
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from headrace import internals
from headrace.checkpoint.forms import pack, unpack
from headrace.errors import JobError
from headrace.machine import disk
from headrace.machine.identity import process_numbers
from headrace.modules import same_values
from headrace.spec.job import Job
from headrace.training.user_code.watching import Operations
from headrace.trees import tensors_of

if TYPE_CHECKING:
    from headrace.training.deferred.parts import Deferral

_MOST = 100_000
"""Values that are looked at: an attribute may lead to anything, a data set of a million examples, too."""
_FOREIGN = ("torch", "numpy", "builtins", "threading", "logging", "_thread", "io", "collections", "abc", "typing")
"""Libraries whose objects are not looked into."""
_QUICK_S = 0.1
"""A model that is built faster is built twice, to find what differs every time."""
_NUMBER = (bool, int, float, complex, np.generic)


@dataclass(frozen=True)
class Attribute:
    """A value, and what puts another one in its place; None where it is in a tuple."""

    value: Any
    put: Callable[[Any], None] | None

    def replace(self, value: Any) -> bool:
        """Puts a copy of another value in its place; returns whether it can."""
        if isinstance(self.value, Tensor) and (self.put is None or isinstance(self.value, nn.Parameter)):
            with torch.no_grad():
                self.value.copy_(value)
        elif self.put is not None:
            self.put(value.to(self.value.device, copy=True) if isinstance(value, Tensor) else copied(value))
        elif isinstance(self.value, np.ndarray) and self.value.shape == value.shape:
            self.value[...] = value
        else:
            return False
        return True


def attributes_of(module: nn.Module) -> dict[str, Attribute]:
    """Returns numbers, arrays and tensors in attributes of a model, nested, and the buffers that it does not save."""
    saved = module.state_dict(keep_vars=True)
    registered = {id(each) for each in module.parameters()}
    registered |= {id(each) for name, each in module.named_buffers() if name in saved}
    walk = AttributeWalk(registered)
    for name, part in module.named_modules():
        # Those of script modules live in TorchScript.
        if not isinstance(part, torch.jit.ScriptModule):
            walk.enter_module(f"{name}." if name else "", part)
    return walk.found


class AttributeWalk:
    """Finds numbers, arrays and tensors in an object, nested, but those that are registered, by their `id`."""

    def __init__(self, registered: set[int]) -> None:
        self.found: dict[str, Attribute] = {}
        self._registered = registered
        self._seen: set[int] = set()
        self._left = _MOST

    def enter_module(self, prefix: str, module: nn.Module) -> None:
        if id(module) in self._seen:
            return
        self._seen.add(id(module))
        for held in (internals.parameters(module), internals.buffers(module)):
            for key, tensor in held.items():
                self.visit(f"{prefix}{key}", tensor, partial(held.__setitem__, key))
        state = vars(module)
        for key in [key for key in state if key not in _OF_MODULES]:
            self.visit(f"{prefix}{key}", state[key], partial(state.__setitem__, key))

    def visit(self, path: str, value: Any, put: Callable[[Any], None] | None) -> None:
        self._left -= 1
        if value is None or isinstance(value, str | bytes | type | ModuleType) or self._left < 0:
            return
        if isinstance(value, Tensor):
            if id(value) not in self._registered and not value.is_meta:
                self.found[path] = Attribute(value, put)
        elif isinstance(value, _NUMBER) or (isinstance(value, np.ndarray) and value.dtype.kind in "biufc"):
            self.found[path] = Attribute(value, put)
        elif id(value) not in self._seen:
            self._seen.add(id(value))
            self._enter(path, value, put)

    def _enter(self, path: str, value: Any, put: Callable[[Any], None] | None) -> None:
        if isinstance(value, nn.Module):
            # One that is not registered, as in a list.
            self.enter_module(f"{path}.", value)
            for name, child in value.named_children():
                self.visit(f"{path}.{name}", child, None)
        elif isinstance(value, list | tuple):
            if value and type(value) in (list, tuple) and all(isinstance(item, _NUMBER) for item in value):
                self.found[path] = Attribute(value, put)
                return
            writes = value.__setitem__ if isinstance(value, list) else None
            for index, item in enumerate(value):
                self.visit(f"{path}[{index}]", item, partial(writes, index) if writes else None)
        elif isinstance(value, dict):
            for key in [key for key in value if isinstance(key, str | int)]:
                self.visit(f"{path}[{key!r}]", value[key], partial(value.__setitem__, key))
        elif isinstance(value, FunctionType):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                self.visit(f"{path}.{name}", _content(cell), partial(setattr, cell, "cell_contents"))
        elif isinstance(value, partial):
            self.visit(f"{path}.keywords", value.keywords, None)
        elif type(value).__module__.partition(".")[0] not in _FOREIGN:
            state: Any = getattr(value, "__dict__", {})
            for key in list(state) if isinstance(state, dict) else ():
                self.visit(f"{path}.{key}", state[key], partial(state.__setitem__, key))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None


_OF_MODULES = vars(nn.Module()).keys()


def _values_of(module: nn.Module) -> dict[str, Any]:
    return {path: each.value for path, each in attributes_of(module).items()}


def _without_numbers(build: Callable[[], nn.Module]) -> dict[str, Any] | None:
    """Builds a model whose tensors have no numbers, in a small part of the time, and returns its attributes' values.

    None where it needs numbers, or leaves a tensor in a class or a global variable, which forward would read.
    """
    storages: list[StorageWeakRef] = []

    def made(*call: Any) -> None:
        storages.extend(StorageWeakRef(each.untyped_storage()) for each in tensors_of(call[-1]) if each.is_meta)

    try:
        with warnings.catch_warnings(action="ignore"), Operations(made), torch.device("meta"):
            found = _values_of(build())
    except Exception:  # whatever a constructor raises of such tensors; it has run with others before
        return None
    return found if all(each.expired() for each in storages) else None


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.layout == other.layout and same_values(one, other.to(one.device))
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    # NaN is the same as NaN.
    return type(one) is type(other) and (one is other or bool(one == other) or repr(one) == repr(other))


def copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray | list) else value


@dataclass
class SameBuild:
    """A job's function that builds its model, with the attributes that the first one built has: all get the same.

    Attributes:
        values: of attributes, by their paths; None before the first is built.
        drawn: paths of those that differ whenever the model is built.
        names: of parameters and buffers, in their order.
        order: of the parameters, buffers and children of each module.
        quick: whether it is built so fast that it can be built again to compare.
        deferral: how it is built in parts; None where each process builds the whole.
    """

    build: Callable[[], Any]
    values: dict[str, Any] | None = None
    drawn: frozenset[str] = frozenset()
    names: tuple[str, ...] = ()
    order: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    quick: bool = field(default=False, compare=False)
    deferral: Deferral | None = field(default=None, compare=False)

    def __call__(self) -> Any:
        began = perf_counter()
        module = self.deferral.build(self.build) if self.deferral else self.build()
        if not isinstance(module, nn.Module):
            return module
        if self.values is None:
            self.quick = perf_counter() - began < _QUICK_S
            self.values = {path: copied(value) for path, value in _values_of(module).items()}
            self.names = _names(module)
            orders = {name: tuple(map(tuple, _held(part))) for name, part in module.named_modules()}
            self.order = {name: order for name, order in orders.items() if any(len(keys) > 1 for keys in order)}
        else:
            self._require_names(module)
            self.give(module)
        return module

    def compare(self, again: Callable[[], nn.Module]) -> None:
        """Builds the model again, and notes what differs."""
        values, found = self.values or {}, _without_numbers(again)
        if found is None or any(isinstance(values[path], Tensor) for path in values.keys() - found.keys()):
            found = _values_of(again())
        self.drawn = frozenset(path for path in found.keys() & values.keys() if not same(found[path], values[path]))

    def give(self, module: nn.Module) -> None:
        """Gives a model the attributes of the first one.

        Raises:
            JobError: it has others, or one that cannot be replaced.
        """
        found, here = attributes_of(module), process_numbers()
        for path, value in (self.values or {}).items():
            own = found.get(path)
            if own is None or isinstance(own.value, Tensor) != isinstance(value, Tensor):
                if isinstance(value, Tensor | np.ndarray):
                    raise JobError(f"the model of this process has no {path!r}, which the launcher's has; {_REMEDY}")
                continue
            if same(own.value, value) or (path not in self.drawn and type(own.value) is int and own.value in here):
                continue
            if not own.replace(value):
                raise JobError(
                    f"{path!r} of the model differs in each process, {own.value!r:.60} and {value!r:.60}, and is in a "
                    f"tuple, where it cannot be replaced; {_REMEDY}"
                )

    def _require_names(self, module: nn.Module) -> None:
        """Gives children, parameters and buffers the launcher's order, which that of a set may be."""
        for name, part in module.named_modules():
            order = self.order.get(name, ())
            for held, keys in zip(_held(part), order, strict=False):
                if keys != tuple(held) and held.keys() == set(keys):
                    items = {key: held[key] for key in keys}
                    held.clear()
                    held.update(items)
        names = _names(module)
        if names == self.names:
            return
        pairs = [(one, other) for one, other in zip(self.names, names, strict=False) if one != other]
        one, other = pairs[0] if pairs else (f"{len(self.names)} of them", f"{len(names)}")
        raise JobError(
            f"the model that this process builds has other parameters and buffers than the launcher's, or in another "
            f"order: {other!r} in the place of {one!r}; {_REMEDY}"
        )

    def text(self, drawn_alone: bool = False) -> str:
        """Returns the values as JSON, or those that differ whenever the model is built."""
        chosen = {path: each for path, each in (self.values or {}).items() if not drawn_alone or path in self.drawn}
        tensors = {path: each for path, each in chosen.items() if isinstance(each, Tensor)}
        arrays = {path: each for path, each in chosen.items() if isinstance(each, np.ndarray)}
        packed = pack(tensors | {path: torch.from_numpy(np.ascontiguousarray(each)) for path, each in arrays.items()})
        plain = {path: _plain(each) for path, each in chosen.items() if path not in tensors and path not in arrays}
        return json.dumps([base64.b64encode(packed).decode(), sorted(arrays), plain])

    def take(self, text: str, module: nn.Module) -> None:
        """Takes over values from what `text` returned elsewhere, and gives them to a model."""
        packed, arrays, plain = json.loads(text)
        tensors = unpack(base64.b64decode(packed))
        values = {path: each.numpy() if path in arrays else each for path, each in tensors.items()}
        values |= {path: _made(each) for path, each in plain.items()}
        self.values = {**(self.values or {}), **values}
        self.give(module)

    def save(self, run_dir: Path) -> None:
        """Writes the values that differ whenever the model is built beside the trained model, if there are any."""
        if self.drawn:
            _path(run_dir).write_text(self.text(drawn_alone=True), encoding="utf-8")


def load_attributes(module: nn.Module, run_dir: Path) -> None:
    """Gives a model the attributes that `SameBuild.save` has written, if it has."""
    if disk.is_file(_path(run_dir)):
        give_text(module, _path(run_dir).read_text(encoding="utf-8"))


def drawn_of(job: Job) -> dict[str, str]:
    """Returns what a checkpoint describes of a job: the attributes that differ whenever its model is built."""
    build = job.model
    return {"drawn": build.text(drawn_alone=True)} if isinstance(build, SameBuild) and build.drawn else {}


def give_text(module: nn.Module, text: str) -> None:
    """Gives a model the attributes in what `SameBuild.text` returned."""
    SameBuild(type(module), {}).take(text, module)


def _path(run_dir: Path) -> Path:
    return run_dir / "attributes.json"


_REMEDY = (
    "let its constructor draw from torch, numpy or random, which are seeded alike everywhere, or keep it as a buffer; "
    "where it goes by the order of a set or by hash(), sort it, or start Python with PYTHONHASHSEED=0"
)


def _held(module: nn.Module) -> tuple[dict[str, Any], ...]:
    if isinstance(module, torch.jit.ScriptModule):
        return ()
    return internals.parameters(module), internals.buffers(module), internals.children(module)


def _names(module: nn.Module) -> tuple[str, ...]:
    return (*(name for name, _ in module.named_parameters()), *(name for name, _ in module.named_buffers()))


def _plain(value: Any) -> Any:
    """Returns a number, or a list or tuple of numbers, as JSON values."""
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_plain(item) for item in value]}
    if isinstance(value, np.generic):
        return {"numpy": [value.dtype.str, _plain(value.item())]}
    return {"complex": [value.real, value.imag]} if isinstance(value, complex) else value


def _made(plain: Any) -> Any:
    if not isinstance(plain, dict):
        return plain
    ((kind, content),) = plain.items()
    if kind == "numpy":
        return np.dtype(content[0]).type(_made(content[1]))
    if kind == "complex":
        return complex(*content)
    items: Iterator[Any] = map(_made, content)
    return list(items) if kind == "list" else tuple(items)
