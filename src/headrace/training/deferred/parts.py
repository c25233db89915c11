"""A model of which each large parameter is made when it is asked for: in its constructor's place, bit for bit."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from headrace import internals
from headrace.machine.allocator import give_back
from headrace.modules import memory_of, replace_tensors
from headrace.training.deferred.record import Region, Tape
from headrace.training.deferred.recorder import Deferring, Log, Unrecordable

LEAST_BYTES = 1 << 20
"""Of a tensor that gets no memory in a constructor."""

_known: WeakKeyDictionary[nn.Module, Parts] = WeakKeyDictionary()


class Parts:
    """The parameters of a model that have no memory yet.

    Attributes:
        views: by name, tied ones once.
        saved: returns what a parameter has instead, by its name, such as that of a checkpoint; None for what the
            constructor gave it.
    """

    def __init__(
        self, record: Tape, views: dict[str, Region], cuts: Mapping[str, Callable[[Tensor], Tensor]] | None = None
    ) -> None:
        self.views = views
        self.saved: Callable[[str], Tensor] | None = None
        self._record = record
        self._cuts = cuts or {}

    @property
    def bytes(self) -> int:
        return sum(torch.Size(each.size).numel() * each.dtype.itemsize for each in self.views.values())

    def value(self, name: str) -> Tensor:
        """Makes what a parameter has at the begin, in host memory."""
        if name in self._cuts:
            return self._cuts[name](self._whole(name)).clone(memory_format=torch.contiguous_format)
        return self._whole(name)

    def write(self, name: str, target: Tensor) -> None:
        """Writes what a parameter has at the begin to memory that is all of its storage."""
        if name in self._cuts:
            target.copy_(self._cuts[name](self._whole(name)))
            return
        value = self._whole(name, target if target.device.type == "cpu" else None)
        if value.data_ptr() != target.data_ptr():
            target.copy_(value)

    def sliced(self, cuts: Mapping[str, Callable[[Tensor], Tensor]]) -> Parts:
        """Returns those of a model that has slices of some of them: what `cuts` return of a whole one, by name."""
        assert not self._cuts
        made = Parts(self._record, self.views, cuts)
        made.saved = self.saved
        return made

    @property
    def digest(self) -> int:
        """A number of 48 bits that differs where another constructor, or another seed, has made them."""
        return self._record.digest

    def _whole(self, name: str, into: Tensor | None = None) -> Tensor:
        if self.saved:
            return self.saved(name)
        return self._record.value(self.views[name], into.untyped_storage() if into is not None else None)

    def fill(self, module: nn.Module, names: Iterable[str], make: Callable[[str, Tensor], Tensor]) -> None:
        """Gives memory to named parameters of the module; `make` gets name and tensor, and returns the value."""
        named = dict(module.named_parameters())
        for name in names:
            empty = named[name]
            if name not in self.views or not empty.is_meta:
                continue
            # What earlier ones have left, of which a process that makes none has some, too.
            give_back()
            _put(module, empty, make(name, empty))


@contextmanager
def set_aside(module: nn.Module, names: Collection[str] | None = None) -> Iterator[None]:
    """Takes out of a module what has no memory, of such names; afterwards it is in its places again.

    None stands for all that a model made in parts has without memory.
    """
    if names is None:
        names = parts.views.keys() if (parts := parts_of(module)) else ()
    empty = {id(each) for name, each in module.named_parameters() if name in names and each.is_meta}
    places = [
        (table, name, each)
        for part in module.modules()
        for table in (internals.parameters(part),)
        for name, each in table.items()
        if id(each) in empty
    ]
    for table, name, _ in places:
        table[name] = None
    try:
        yield
    finally:
        for table, name, each in places:
            table[name] = each


def with_memory(module: nn.Module) -> None:
    """Gives a copy of a model that was made in parts memory for all parameters, which are to be loaded."""
    for each in list(module.parameters()):
        if each.is_meta:
            _put(module, each, torch.empty_like(each, device="cpu"))


def _put(module: nn.Module, empty: nn.Parameter, value: Tensor) -> None:
    """Puts a parameter with memory in the places of one without."""
    filled = nn.Parameter(value, empty.requires_grad)
    vars(filled).update(vars(empty))
    swap(module, empty, filled)


def swap(module: nn.Module, one: nn.Parameter, other: nn.Parameter) -> None:
    """Puts a parameter in all places of another one."""
    for part in module.modules():
        for name in [name for name, each in internals.parameters(part).items() if each is one]:
            # Recurrent layers of torch renew the list that they hold.
            setattr(part, name, other)


def parts_of(module: nn.Module) -> Parts | None:
    """Returns the parameters of a model that have no memory; None for one that was built whole."""
    return _known.get(module)


def keep_parts(module: nn.Module, parts: Parts) -> None:
    """Says of what a model is made now, as when it has slices of its parameters."""
    _known[module] = parts


@dataclass
class Deferral:
    """How the processes of a run build a model in parts: the first time it is recorded, then this is followed.

    Attributes:
        problem: why it is built whole; "" where it is not.
    """

    problem: str = ""
    log: Log = field(default_factory=Log)
    recorded: bool = False

    def build(self, build: Callable[[], Any]) -> Any:
        """Builds a model in parts; whole where that cannot be, with the reason in `problem`."""
        if self.problem:
            return build()
        recorder = Deferring(Tape(), LEAST_BYTES, self.log, self.recorded)
        before = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            with recorder.running():
                module = build()
            if isinstance(module, nn.Module):
                _known[module] = _finished(recorder, module)
        except Exception as error:  # whatever a constructor raises of such tensors; the second time it is its own
            if self.recorded:
                raise
            self.problem = recorder.problem or f"{type(error).__name__}: {error}"
        self.recorded = True
        if not self.problem:
            return module
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
        return build()

    def settle(self, module: nn.Module) -> tuple[Parts | None, str]:
        """Returns what of a model that was built has no memory, and what the user is told."""
        if parts := _known.get(module):
            return parts, (
                f"{parts.bytes:,} bytes of parameters are made one by one, so that no process has the whole model; "
                "checks that train it in one process are left out: run the job in a smaller shape for these"
            )
        size = sum(each.nbytes for each in module.parameters() if not is_lazy(each))
        return None, f"deferred=True, and each process builds the whole model, {size:,} bytes: {self.problem}"


def _finished(recorder: Deferring, module: nn.Module) -> Parts:
    """Gives memory to all that is no parameter; returns the parameters that have none.

    Raises:
        Unrecordable: memory is shared, or something is kept that is neither a parameter nor a buffer.
    """
    record = recorder.record
    if recorder.problem:
        raise Unrecordable(recorder.problem)
    if any(map(is_lazy, (*module.parameters(), *module.buffers()))):
        raise recorder.fail("layers get their shapes from the first batch")
    views = {name: Region.of(each) for name, each in module.named_parameters() if record.has(each)}
    kinds = {name: type(each) for name, each in module.named_parameters()}
    if other := [name for name in views if kinds[name] is not nn.Parameter]:
        raise recorder.fail(f"{other[0]!r} is a {kinds[other[0]].__name__}")
    buffers = {id(each): Region.of(each) for each in module.buffers() if record.has(each)}
    places = [each.storage for each in (*views.values(), *buffers.values())]
    if len(set(places)) < len(places):
        raise recorder.fail("two parameters or buffers share memory without being one")
    replace_tensors(module, {key: record.value(view) for key, view in buffers.items()})
    _require_places(recorder, module, {each.storage for each in views.values()})
    if len(kinds) == len(views) and views:
        # The smallest says on which device the model is.
        name = min(views, key=lambda name: record.bytes_of(views[name].storage))
        _put(module, module.get_parameter(name), record.value(views.pop(name)))
    if not views:
        raise recorder.fail(f"it has no two parameters of which one has {recorder.least:,} bytes")
    return Parts(record, views)


def _require_places(recorder: Deferring, module: nn.Module, trained: set[int]) -> None:
    """Raises Unrecordable where a tensor without memory lives that is no parameter."""
    record, own = recorder.record, {id(each) for each in module.parameters()}
    # What only a cycle holds is gone for the user.
    gc.collect()
    if kept := record.living() - trained:
        size = sum(map(record.bytes_of, kept))
        raise recorder.fail(f"it keeps {size:,} bytes in tensors that are neither parameters nor buffers")
    # Of a type that says what it is itself, `isinstance` would ask the object.
    tensors = (each for each in gc.get_objects() if issubclass(type(each), Tensor) and id(each) not in own)
    if views := [each for each in tensors if record.has(each) and memory_of(each) in trained]:
        raise recorder.fail(f"it keeps a view of a parameter, of shape {tuple(views[0].shape)}")
