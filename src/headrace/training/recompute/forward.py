"""A block's forward that is run again in backward, by torch's checkpoint without reentrance.

    forward    state noted ─► block ─► output          kept: the inputs (and chosen results, "selective")
    backward   state put back ─► block ─► what backward needs ─► state as it was

torch gives torch's random numbers again. What else a forward reads and writes is given here: the generators of Python
and numpy, attributes of modules, and buffers. So all of it is written once, as without; hooks of a user's are called
once where what they do is not needed again.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headrace import internals
from headrace.errors import JobError
from headrace.training.user_code.untouched import same_generators
from headrace.trees import map_leaves, tensors_of

_STATISTICS = ("running_mean", "running_var")
"""Buffers that torch's kernels of BatchNorm write to without counting it as a version."""
_SMALL = 1 << 14
"""Bytes of a buffer that is copied before each forward; larger ones where a forward has written to them."""
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}


class RecomputedForward:
    """Stands, from `install` on, in the place of a module's `forward`, and keeps of it the inputs alone.

    Hooks of submodules that there are when it is made are called once a forward, if they do nothing to it.
    """

    __slots__ = ("_again", "_forward", "_module", "_name", "_selective", "_written")

    def __init__(self, name: str, module: nn.Module, selective: bool) -> None:
        self._name = name
        self._module = module
        self._forward: Any = None
        self._selective = selective
        # Buffers that forward writes to, by module and name; None until it has run once.
        self._written: set[tuple[int, str]] | None = None
        self._again = False
        for part in module.modules():
            # A block's own hooks are called around all of this.
            for table in (internals.forward_pre_hooks(part), internals.forward_hooks(part)) * (part is not module):
                for key, hook in table.items():
                    table[key] = _Hook(hook, self)

    def install(self) -> None:
        """Has the module's calls come here."""
        self._forward = self._module.forward
        vars(self._module)["forward"] = self

    @property
    def again(self) -> bool:
        """Whether it is run again at the moment."""
        return self._again

    def __call__(self, *values: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*values, **named)
        call = _Call(self, values, named)
        contexts: dict[str, Any] = {}
        if self._selective:
            from headrace.training.recompute.selective import contexts as selective

            contexts = {"context_fn": selective}
        # All tensors as arguments: torch notices if one of those is written to before backward.
        return checkpoint(call, *tensors_of((values, named)), use_reentrant=False, **contexts)

    def first(self, values: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[Any, _Before]:
        """Runs it in forward; returns its output, and what it began with."""
        before = _Before(self._module, self._written)
        output = self._forward(*values, **named)
        written = before.written()
        if later := sorted(name for _, name in written - before.copied):
            raise JobError(
                f"recompute: forward of {self._name!r} has written to the buffer {later[0]!r} for the first time in a "
                "later step, so that what it was is not known; write to it in each, or leave the block out of recompute"
            )
        self._written = written | (self._written or set())
        before.keep(self._written)
        before.note_parameters()
        return output, before

    def repeat(self, before: _Before, values: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Runs it once more, from what it began with, and leaves no trace."""
        if name := before.moved():
            raise JobError(
                f"recompute: the buffer {name!r} of {self._name!r} was written to between forward and backward, so "
                "that the block would compute something else; write to it in the block's forward, or leave the block "
                "out"
            )
        if name := before.changed_parameter():
            raise JobError(
                f"recompute: the parameter {name!r} of {self._name!r} was changed between forward and backward, so "
                "that the block would compute something else; change it after backward, or leave the block out"
            )
        self._again = True
        try:
            with before.put_back():
                return self._forward(*values, **named)
        finally:
            self._again = False
            # What its forward writes by itself (max_norm of an embedding) is no change, however often it runs.
            before.note_parameters()


class _Call:
    """One call of a block: run in forward, and then as often as backward asks."""

    def __init__(self, block: RecomputedForward, values: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        self._block = block
        self._given: tuple[Any, Any] | None = (values, named)
        # Without the tensors, which torch keeps; containers as they are before forward writes to them.
        self._form = map_leaves(lambda _, leaf: _TENSOR if isinstance(leaf, Tensor) else leaf, (values, dict(named)))
        self._before: _Before | None = None

    def __call__(self, *tensors: Tensor) -> Any:
        if self._before is None:
            assert self._given is not None
            given, self._given = self._given, None
            output, self._before = self._block.first(*given)
            return output
        left = iter(tensors)
        values, named = map_leaves(lambda _, leaf: next(left) if leaf is _TENSOR else leaf, self._form)
        return self._block.repeat(self._before, values, named)


_TENSOR = object()
"""The place of a tensor in a tree."""


class _Before:
    """What a block's forward may change, as it was before: attributes, buffers, generators of Python and numpy.

    `copied` are the buffers, by module and name, whose values are kept.
    """

    def __init__(self, module: nn.Module, written: set[tuple[int, str]] | None) -> None:
        self._parts = list(module.modules())
        self._attributes = [
            {key: value for key, value in vars(part).items() if key not in _OF_MODULES} for part in self._parts
        ]
        self._buffers = [dict(internals.buffers(part)) for part in self._parts]
        self._versions = {
            (place, name): internals.version(buffer)
            for place, held in enumerate(self._buffers)
            for name, buffer in held.items()
            if buffer is not None
        }
        self._values = {
            key: self._buffer(key).clone()
            for key in self._versions
            if written is None or key in written or self._buffer(key).nbytes <= _SMALL
        }
        self.copied = self._values.keys()
        self._parameters: dict[str, tuple[Tensor, int]] = {}
        self._python, self._numpy = random.getstate(), np.random.get_state(legacy=False)

    def written(self) -> set[tuple[int, str]]:
        """Returns which buffers have been written to since, and what may be written to without a trace."""
        return {
            key
            for key, version in self._versions.items()
            if key[1] in _STATISTICS or internals.version(self._buffer(key)) != version
        }

    def keep(self, written: set[tuple[int, str]]) -> None:
        """Keeps copies of those alone, and looks whether the others are written to from now on."""
        self._values = {key: value for key, value in self._values.items() if key in written}

    def moved(self) -> str:
        """Returns the name of a buffer whose value is no longer known; "" if there is none."""
        moved = self.written() - self._values.keys()
        return min((name for _, name in moved), default="")

    def note_parameters(self) -> None:
        """Notes which tensors the parameters are, and how often they have been written to."""
        self._parameters = {name: (each, internals.version(each)) for name, each in self._named()}

    def changed_parameter(self) -> str:
        """Returns the name of a parameter that was written to or exchanged since; "" if there is none."""
        now = dict(self._named())
        for name, (then, version) in self._parameters.items():
            each = now.get(name)
            # What is divided among workers is another tensor, of another type, while it is gathered.
            if each is None or (each is not then and type(each) is type(then)):
                return name
            if each is then and internals.version(each) != version:
                return name
        return ""

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        return self._parts[0].named_parameters(remove_duplicate=False)

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Lets modules be what they were, and then what they are."""
        tables = [vars(part) for part in self._parts]
        now = [{key: value for key, value in table.items() if key not in _OF_MODULES} for table in tables]
        held = [dict(internals.buffers(part)) for part in self._parts]
        buffers = [dict(each) for each in self._buffers]
        for (place, name), value in self._values.items():
            # A copy, because backward may ask once more.
            buffers[place][name] = value.clone()
        self._set(self._attributes, buffers)
        try:
            with same_generators():
                random.setstate(self._python)
                np.random.set_state(self._numpy)
                yield
        finally:
            self._set(now, held)

    def _set(self, attributes: Sequence[Mapping[str, Any]], buffers: Sequence[Mapping[str, Any]]) -> None:
        for part, own, held in zip(self._parts, attributes, buffers, strict=True):
            table = vars(part)
            for key in [key for key in table if key not in _OF_MODULES and key not in own]:
                del table[key]
            table.update(own)
            internals.buffers(part).clear()
            internals.buffers(part).update(held)

    def _buffer(self, key: tuple[int, str]) -> Tensor:
        buffer: Tensor = self._buffers[key[0]][key[1]]
        return buffer


class _Hook:
    """A hook of a user's inside of a block; when that is run again, it is called where it does something to it."""

    __slots__ = ("_block", "_hook", "_needed")

    def __init__(self, hook: Any, block: RecomputedForward) -> None:
        self._hook = hook
        self._block = block
        self._needed = True

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        if self._block.again:
            return self._hook(module, *given) if self._needed else None
        before = dict(vars(module))
        watched = [*tensors_of(given), *tensors_of(internals.buffers(module))]
        versions = list(map(internals.version, watched))
        made = self._hook(module, *given)
        after = vars(module)
        changed = before.keys() != after.keys() or any(after[key] is not before[key] for key in before)
        self._needed = made is not None or changed or versions != list(map(internals.version, watched))
        return made
