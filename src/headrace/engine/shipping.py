"""Sends user code and data from a launcher to its own workers.

Code goes as cloudpickle through a pipe that the worker inherits, so that lambdas, classes of a notebook and scripts
without a `__main__` guard arrive. Large tensors and arrays are once in anonymous memory, which every worker maps
copy-on-write, so that no worker sees what another writes.
"""

from __future__ import annotations

import builtins
import importlib
import io
import linecache
import mmap
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn

from headrace.engine.library_objects import reduced
from headrace.errors import JobError
from headrace.hooks import hang, hooks_of
from headrace.registry import FILES, PLACED
from headrace.shared_memory.layout import on_lines
from headrace.shared_memory.segment import memory_file, set_length

_LARGE_BYTES = 64 * 1024


def ship_by_value(module: ModuleType) -> None:
    """Sends a module's definitions instead of their names: a worker need not find the module."""
    cloudpickle.register_pickle_by_value(module)


def pack(value: Any) -> tuple[bytes, int, int]:
    """Returns the pickle of `value`, a descriptor of the memory with its large tensors (-1 if none), its length.

    Raises JobError where something in it cannot be sent.
    """
    for module in FILES.values():
        ship_by_value(module)
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    try:
        pickler.dump((PLACED, value))
    except Exception as error:  # cloudpickle passes on whatever a user's __reduce__ raises
        raise JobError(
            f"the job cannot be sent to a worker: {type(error).__name__}: {error}; what it refers to must be "
            "picklable: open files, locks and connections inside the function that needs them"
        ) from error
    return buffer.getvalue(), pickler.memory(), pickler.length


def unpack(code: bytes, descriptor: int, length: int) -> Any:
    """Returns the value that `pack` was given. The descriptor is closed."""
    memory = None
    if descriptor >= 0:
        memory = mmap.mmap(descriptor, length, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        os.close(descriptor)
    placed, value = _Unpickler(io.BytesIO(code), memory).load()
    PLACED.update(placed)
    return value


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.length = 0
        self._places: dict[int, tuple[str, str, int, tuple[int, ...]]] = {}
        self._tensors: list[tuple[int, Tensor]] = []
        self._sources: dict[str, _Source] = {}

    def persistent_id(self, value: Any) -> Any:
        if value is vars(builtins):
            # Of code that was run by exec; some libraries keep values there that cannot be sent.
            return "builtins", "", 0, ()
        if isinstance(value, np.ndarray) and type(value) is np.ndarray and value.dtype.kind in "biuf":
            if value.nbytes < _LARGE_BYTES or value.dtype.byteorder == ">" or value.dtype.itemsize > 8:
                return None
            with warnings.catch_warnings():
                # It warns of memory that must not be written; here it is only read.
                warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
                return self._place("array", value, torch.from_numpy(np.ascontiguousarray(value)))
        if type(value) is Tensor and value.device.type == "cpu" and value.layout is torch.strided:
            if value.requires_grad or value.numel() * value.element_size() < _LARGE_BYTES:
                return None
            return self._place("tensor", value, value)
        return None

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor and not value.requires_grad and _is_part(value):
            # torch would send the whole storage with each tensor: all examples with each example of a list.
            return value.clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if isinstance(value, ModuleType) and type(value) is not ModuleType and value is sys.modules.get(value.__name__):
            # torch.backends.mkldnn, say: cloudpickle takes an object of a module's subclass apart.
            return importlib.import_module, (value.__name__,)
        if isinstance(value, nn.Parameter) and any(hooks := hooks_of(value)):
            # torch sends none. As state, because they may refer to the parameter.
            make, parts = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return make, parts, hooks, None, None, hang
        if type(value) is CodeType:
            # cloudpickle 3.1 sends code without its file, and tracebacks would show neither file nor line.
            make, parts = self.dispatch_table[CodeType](value)
            return _code_of_file, (self._source(value.co_filename), make, parts)
        return reduced(value) or super().reducer_override(value)

    def _source(self, path: str) -> _Source:
        """Returns the same object for each code of a file, so that the pickle has its lines once."""
        if path not in self._sources:
            # A notebook's cell, or a line typed at a prompt, is known to this process only.
            lines = () if os.path.exists(path) else tuple(linecache.getlines(path))
            self._sources[path] = _Source(path, lines)
        return self._sources[path]

    def _place(self, kind: str, value: Any, tensor: Tensor) -> tuple[str, str, int, tuple[int, ...]]:
        if id(value) not in self._places:
            dtype = str(tensor.dtype).removeprefix("torch.")
            self._places[id(value)] = (kind, dtype, self.length, tuple(tensor.shape))
            self._tensors.append((self.length, tensor))
            self.length += on_lines(tensor.numel() * tensor.element_size())
        return self._places[id(value)]

    def memory(self) -> int:
        """Returns a descriptor of the memory with all placed tensors, or -1."""
        if not self._tensors:
            return -1
        descriptor = memory_file("data")
        try:
            set_length(descriptor, self.length, "data")
        except BaseException:
            os.close(descriptor)
            raise
        with mmap.mmap(descriptor, self.length) as memory:
            whole = torch.frombuffer(memory, dtype=torch.uint8)
            for start, tensor in self._tensors:
                nbytes = tensor.numel() * tensor.element_size()
                whole[start : start + nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            del whole
        return descriptor


@dataclass(frozen=True)
class _Source:
    """The file of code that is sent by value, with its lines where there is no such file to read them from."""

    path: str
    lines: tuple[str, ...]

    def __reduce__(self) -> tuple[Callable[..., _Source], tuple[str, tuple[str, ...]]]:
        return _source_that_came, (self.path, self.lines)


def _source_that_came(path: str, lines: tuple[str, ...]) -> _Source:
    if lines:
        # An entry without a time of change is not compared with a file.
        linecache.cache[path] = (sum(map(len, lines)), None, list(lines), path)
    return _Source(path, lines)


def _code_of_file(source: _Source, make: Callable[..., CodeType], parts: tuple[Any, ...]) -> CodeType:
    return make(*parts).replace(co_filename=source.path)


def _is_part(tensor: Tensor) -> bool:
    """Tells whether a tensor in host memory is a view of less than the storage it lies in."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return False
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory: mmap.mmap | None) -> None:
        super().__init__(file)
        self._memory = memory

    def persistent_load(self, place: Any) -> Any:
        kind, dtype, start, shape = place
        if kind == "builtins":
            return vars(builtins)
        if self._memory is None:
            raise pickle.UnpicklingError("the data's memory did not arrive")
        count = int(np.prod(shape))
        tensor = torch.frombuffer(self._memory, dtype=getattr(torch, dtype), offset=start, count=count).view(shape)
        return tensor.numpy() if kind == "array" else tensor
