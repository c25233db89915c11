"""Does Python read numbers of the batch in forward or in the loss, as `if x.mean() > 0` does?

What they decide, shares of a batch and micro-batches decide each for itself. A few examples may all take one branch, so
that the losses of parts tell nothing. Two modes of torch see it: of operations, which tell what is made of the batch,
and of functions, which tell what Python gets.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headrace.modules import memory_of
from headrace.training.user_code.untouched import LIBRARIES
from headrace.training.user_code.watching import Operations
from headrace.trees import map_tensors, tensors_of

_WITHOUT_OPERATION = {Tensor.numpy, Tensor.tolist, Tensor.__array__}
"""What reads values without an operation of torch."""
_SIZES = {Tensor.__len__, Tensor.numel, Tensor.nelement, Tensor.size, Tensor.shape.__get__}  # type: ignore[attr-defined]
_CHECKING = ("torch.nn.modules.", "torch.nn.utils.", "torch.distributions.")
_ROWS = "headrace.training.embeddings."
"""Layers that look up the rows of each example."""
_SEEING = (__name__, Operations.__module__)
"""Where this is noted."""
_SCRIPTED = "torch.nn.modules.module"
"""Calls code that is not Python's."""


@contextmanager
def reads_of(batch: Any) -> Iterator[list[str]]:
    """Yields the lines of code that have read numbers of a batch so far, "model.py:12", while its body runs."""
    reads = _Reads(batch)
    with Operations(reads.operation), _Functions(reads):
        yield reads.lines


class _Reads:
    """Follows what is made of a batch, and notes where a number of it becomes one of Python."""

    def __init__(self, batch: Any) -> None:
        self.lines: list[str] = []
        self.read, self.told = False, False
        self._older: int | None = None
        # The tensors are kept, so that no other one gets their memory.
        self._made: dict[int, tuple[int, Tensor]] = {}
        self._sized: set[int] = set()
        map_tensors(self._note, batch)

    def operation(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Notes an operation."""
        given = [each for each in tensors_of((args, kwargs)) if self.has(each)]
        if not given:
            return
        made = tensors_of(result)
        for each in made:
            self._note(each)
        if torch.Tag.dynamic_output_shape in func.tags and _by_values(func, args):
            self._sized |= set(map(memory_of, made))
        if not made and torch.Tag.data_dependent_output in func.tags:
            self.read = True
            # What a function of torch makes and reads itself, to check its arguments, is not told.
            self.told |= any(self._made[memory_of(each)][0] < (self._older or 0) for each in given)
            if self._older is None:
                self.note_line()

    def has(self, tensor: Tensor) -> bool:
        """Tells whether a tensor is made of the batch."""
        return memory_of(tensor) in self._made

    def sized(self, tensor: Tensor) -> bool:
        """Tells whether the values of the batch decide its shape."""
        return memory_of(tensor) in self._sized

    def begin(self) -> None:
        """Notes that a function of torch begins."""
        self.read, self.told, self._older = False, False, len(self._made)

    def end(self) -> None:
        """Notes that it has ended."""
        self._older = None

    def note_line(self) -> None:
        """Notes the line that called torch, but not those of libraries, which check arguments and choose kernels."""
        frame: FrameType | None = inspect.currentframe()
        while frame is not None and (frame.f_globals["__name__"] in _SEEING or _library(frame) == "torch"):
            name = frame.f_globals["__name__"]
            if name.startswith(_CHECKING) and name != _SCRIPTED:
                return
            frame = frame.f_back
        if frame is None or _library(frame) in LIBRARIES or frame.f_globals["__name__"].startswith(_ROWS):
            return
        line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
        if _library(frame) == "headrace":
            line = "a scripted model"
        if line not in self.lines:
            self.lines.append(line)

    def _note(self, tensor: Tensor) -> None:
        self._made.setdefault(memory_of(tensor), (len(self._made), tensor))


class _Functions(TorchFunctionMode):
    """Notes which functions give Python a number."""

    def __init__(self, reads: _Reads) -> None:
        super().__init__()
        self._reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = self._reads
        reads.begin()
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            reads.end()
        # Texts are printed.
        told = not isinstance(result, str) if reads.told else reads.read and isinstance(result, int | float | complex)
        if func in _WITHOUT_OPERATION:
            told = reads.has(args[0])
        elif func in _SIZES:
            told = reads.sized(args[0])
        if told:
            reads.note_line()
        return result


def _by_values(func: Any, args: Any) -> bool:
    """Tells whether an operation that may do so has made a shape by values: an index is one by the shape of places."""
    if func is not torch.ops.aten.index.Tensor:
        return True
    return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])


def _library(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
