"""What a forward does between the calls of tracked modules, seen while it runs on a few examples.

Two modes of torch watch the code between the calls, and are off within them. One sees operations on tensors, and so
which outputs of earlier calls each later call gets a part of; the other sees which of these outputs are looked at at
all, be it for their shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from headrace import internals
from headrace.modules import memory_of
from headrace.pipeline.replay.interception import intercepted
from headrace.pipeline.replay.structure import leaves_of, map_parts, template
from headrace.pipeline.trace.frames import frames_cleared, functions_with_backward, running, running_checkpoints
from headrace.training.user_code.trial import drawn_without_torch
from headrace.training.user_code.watching import Functions, Operations
from headrace.trees import tensors_of

Leaf = tuple[int, int]
"""A tensor that a call has returned: the call's index, and the tensor's among those of the call."""

_READ = {Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.data_ptr}
"""What reads a tensor's values without an operation of torch."""

DEVICE = Tensor.device.__get__


@dataclass(frozen=True)
class RandomDraw:
    """A draw of random numbers between the calls."""

    index: int


Source = Leaf | RandomDraw


@dataclass
class ModuleCall:
    """A call of a tracked module.

    Attributes:
        name: the module's path, with ":2" where it is called for the second time.
        needs: what of earlier calls its arguments were made of, or decided that it is called.
        template: what it returns, with leaves in the places of tensors.
        inside: tracked modules that it has called itself.
        written: tensors of its output that are written to later.
    """

    path: str
    name: str
    needs: frozenset[Source]
    template: Any = None
    tensors: int = 0
    inside: list[str] = field(default_factory=list)
    written: set[int] = field(default_factory=set)


@dataclass
class Calls:
    """A recorded forward.

    Attributes:
        needs: what of the calls the output is made of.
        touched: by tensor of a call: behind how many calls it is looked at first, outside of calls.
        held: names of parameters and buffers that are read outside of calls: behind how many calls first.
        owned: paths of modules, of those that were unsure, whose output is not made of inputs alone.
    """

    calls: list[ModuleCall] = field(default_factory=list)
    needs: frozenset[Source] = frozenset()
    template: Any = None
    touched: dict[Leaf, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    owned: set[str] = field(default_factory=set)
    places_asked: bool = False

    def merge(self, other: Calls) -> None:
        """Takes over what another recording of the same calls has seen."""
        for mine, theirs in zip(self.calls, other.calls, strict=True):
            mine.needs |= theirs.needs
            mine.written |= theirs.written
        self.needs |= other.needs
        self.touched = {leaf: _least(self.touched, other.touched, leaf) for leaf in {**self.touched, **other.touched}}
        self.held = {name: _least(self.held, other.held, name) for name in {**self.held, **other.held}}
        self.places_asked |= other.places_asked

    def differs_from(self, other: Calls) -> str:
        """Returns what another recording does otherwise; "" where it is the same."""
        for mine, theirs in zip(self.calls, other.calls, strict=False):
            if mine.path != theirs.path:
                return f"it calls {theirs.path} where it called {mine.path}"
            if leaves_of(mine.template) != leaves_of(theirs.template):
                now, before = leaves_of(theirs.template), leaves_of(mine.template)
                return f"{mine.name} returns {now!r:.100} instead of {before!r:.100}"
        if len(self.calls) != len(other.calls):
            return f"it makes {len(other.calls)} calls of its modules instead of {len(self.calls)}"
        return ""


class Irreplayable(Exception):
    """A model cannot be cut between calls of its modules."""


class CallRecorder:
    """Records one forward; `tracked` are modules by path, `unsure` those of them that may turn out to be free."""

    def __init__(self, module: nn.Module, tracked: Mapping[str, nn.Module], unsure: set[str]) -> None:
        self.found = Calls()
        self._tracked = tracked
        self._unsure = unsure
        self._names = {id(each): name for name, each in (*module.named_parameters(), *module.named_buffers())}
        self._buffers = {memory_of(each) for each in module.buffers()}
        self._sources: dict[int, frozenset[Source]] = {}
        self._leaves: dict[int, Leaf] = {}
        self._versions: list[tuple[Leaf, Tensor, int]] = []
        self._alive: list[Any] = []
        self._checkpoints: dict[FrameType, set[str]] = {}
        self._control: frozenset[Source] = frozenset()
        self._counts: dict[str, int] = {}
        self._inside: list[str] = []
        self._draws = 0
        self._python = drawn_without_torch()
        self._silent = False
        self._modes = Operations(self._operation), Functions(self._look)

    def run(self, forward: Callable[[], Any]) -> Any:
        """Runs forward once; returns what it returns, and notes what it did in `found`."""
        self._python = drawn_without_torch()
        with frames_cleared(), intercepted(self._tracked, self), self._modes[0], self._modes[1]:
            output = forward()
        self._check_python()
        self._silent = True
        self.found.template, tensors = template(output)
        self.found.needs = self._of(tensors) | self._control
        for leaf, tensor, version in self._versions:
            if internals.version(tensor) != version:
                self.found.calls[leaf[0]].written.add(leaf[1])
        return output

    def __call__(self, path: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Stands for the call of a tracked module."""
        if self._silent:
            # A module that is called by another tracked one is a part of it.
            self._inside.append(path)
            return original(*args, **kwargs)
        if path in self._unsure:
            return self._call_unsure(path, original, args, kwargs)
        self._check_python()
        if running(functions_with_backward()):
            raise Irreplayable(
                f"it calls {path} within a function that has its own backward, as torch.utils.checkpoint does with "
                "use_reentrant=True; use_reentrant=False, or Pipeline(recompute='always') in its place, can be cut"
            )
        if internals.functorch_active():
            raise Irreplayable(
                f"it calls {path} within a transform of torch.func (vmap, grad), which stages would have in parts; "
                "batched operations in its place can be cut, or the transform in the forward of a module"
            )
        count = self._counts[path] = self._counts.get(path, 0) + 1
        name = path if count == 1 else f"{path}:{count}"
        self._note_checkpoint(name)
        with self._silenced():
            needs = self._of(template((args, kwargs))[1]) | self._control
            self._inside = []
            output = original(*args, **kwargs)
            # A tensor of its own tells each output apart from what it was made of.
            output = map_parts(lambda _, each: each.clone() if isinstance(each, Tensor) else each, output)
            made, tensors = template(output, (args, kwargs))
            for index, tensor in enumerate(tensors):
                leaf = (len(self.found.calls), index)
                self._leaves[id(tensor)] = leaf
                self._sources[memory_of(tensor)] = frozenset({leaf})
                self._versions.append((leaf, tensor, internals.version(tensor)))
            self._alive += tensors
            self.found.calls.append(ModuleCall(path, name, needs, made, len(tensors), self._inside))
            self._python = drawn_without_torch()
        return output

    def _operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Notes an operation between calls."""
        if self._silent:
            return
        self._note_checkpoint("")
        given, made = tensors_of((args, kwargs)), tensors_of(result)
        sources = self._of(given)
        for tensor in given:
            if id(tensor) in self._names:
                self.found.held.setdefault(self._names[id(tensor)], len(self.found.calls))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._draws += 1
            sources |= {RandomDraw(self._draws)}
        if func is torch.ops.aten.lt.Scalar and args[1] <= 0:
            # Random numbers are compared with a rate of 0 (LayerDrop), which none is below.
            sources = frozenset(each for each in sources if not isinstance(each, RandomDraw))
        if not made:
            self._control |= sources
        for tensor in made:
            self._sources[memory_of(tensor)] = sources | self._sources.get(memory_of(tensor), frozenset())
        self._alive += made
        if internals.schema(func).is_mutable:
            for tensor in given:
                if memory_of(tensor) in self._buffers and any(memory_of(each) == memory_of(tensor) for each in made):
                    self._control |= sources

    def _look(self, func: Any, args: Any, kwargs: Any, _: object) -> None:
        """Notes that something is asked of tensors between calls."""
        if self._silent:
            return
        given = tensors_of((args, kwargs))
        for tensor in given:
            if id(tensor) in self._leaves:
                self.found.touched.setdefault(self._leaves[id(tensor)], len(self.found.calls))
        if func in _READ:
            self._control |= self._of(given)
        if func == DEVICE and given and id(given[0]) in self._names:
            self.found.places_asked = True

    def _note_checkpoint(self, name: str) -> None:
        """Notes a call, or an operation (""), within `torch.utils.checkpoint`; refuses one that has several.

        A stage that has one of them runs all of them again in backward, and would call what another stage has.
        """
        for frame in running_checkpoints():
            within = self._checkpoints.setdefault(frame, set())
            within.add(name)
            if len(within) > 1:
                raise Irreplayable(
                    f"torch.utils.checkpoint runs {max(within)} and more in one function, which stages cannot "
                    "recompute in parts; Pipeline(recompute='always') in its place can be cut, or a checkpoint of the "
                    "module alone"
                )

    def _call_unsure(self, path: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        module = self._tracked[path]
        with self._silenced():
            saved = [each.clone() for each in module.buffers()]
        output = original(*args, **kwargs)
        with self._silenced():
            same = all(torch.equal(one, other) for one, other in zip(module.buffers(), saved, strict=True))
            if not same or self._of(template(output)[1]):
                self.found.owned.add(path)
        return output

    def _check_python(self) -> None:
        # Those of torch are followed.
        if drawn_without_torch() != self._python:
            raise Irreplayable("it draws random numbers of Python or numpy, which decide what it does")

    def _of(self, tensors: Sequence[Tensor]) -> frozenset[Source]:
        none: frozenset[Source] = frozenset()
        return none.union(*(self._sources.get(memory_of(each), none) for each in tensors))

    @contextmanager
    def _silenced(self) -> Iterator[None]:
        """Ends the modes for as long as a tracked module runs; those below a mode of forward's own stay, and see it."""
        operations, functions = self._modes
        self._silent = True
        ended: list[Any] = []
        above = internals.function_modes() - 1
        if above >= 0 and internals.function_mode_at(above) is functions:
            ended.append(functions)
        above = internals.dispatch_modes() - 1
        if above >= 0 and internals.dispatch_mode_at(above) is operations:
            ended.append(operations)
        for mode in ended:
            mode.__exit__(None, None, None)
        try:
            yield
        finally:
            for mode in reversed(ended):
                mode.__enter__()
            self._silent = False


def _least(one: Mapping[Any, int], other: Mapping[Any, int], key: Any) -> int:
    return min(each[key] for each in (one, other) if key in each)
