"""Runs a model that was made in parts, forward and backward: an operation has its parameters, and leaves none.

Meanwhile a parameter is a tensor of its device whose storage is empty. Autograd sees it as any other: it is saved, and
its gradient has memory. Before an operation reads it, its storage gets the value, and is emptied again behind it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headrace import internals
from headrace.errors import JobError
from headrace.modules import is_dense, memory_of
from headrace.training.deferred.parts import Parts, parts_of, swap
from headrace.training.deferred.recorder import written_to
from headrace.trees import tensors_of

_ESCAPES = frozenset(("numpy", "__array__", "tolist"))
"""Methods that read memory where no operation is seen."""


@contextmanager
def lending(module: nn.Module, parts: Parts | None = None) -> Iterator[None]:
    """Lets a model run, which is then as it was; does nothing for one that has memory for all parameters.

    `parts` are others than those that it was made of.
    """
    parts = parts or parts_of(module)
    named = dict(module.named_parameters())
    empty = {name: named[name] for name in (parts.views if parts else ()) if name in named and named[name].is_meta}
    if parts is None or not empty:
        yield
        return
    device = next((each.device for each in named.values() if not each.is_meta), torch.device("cpu"))
    lender = _Lender(parts, {}, threading.Lock())
    loans = {name: lender.lend(name, each, device) for name, each in empty.items()}
    for name, each in loans.items():
        swap(module, empty[name], each)
    _lenders[id(module)] = lender
    try:
        with _Guard(lender), lender:
            yield
    finally:
        del _lenders[id(module)]
        for name, each in loans.items():
            swap(module, each, empty[name])


@contextmanager
def holding(module: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Leaves named parameters of a model that is lent their values for longer than an operation."""
    lender = _lenders.get(id(module))
    keys = lender.keys_of(names) if lender else ()
    if lender is None or not keys:
        yield
        return
    with lender.filled(keys):
        yield


def lent(module: nn.Module) -> frozenset[str]:
    """Returns the names of the parameters that are lent now."""
    lender = _lenders.get(id(module))
    return frozenset(loan.name for loan in lender.loans.values()) if lender else frozenset()


@contextmanager
def lending_here(module: nn.Module) -> Iterator[None]:
    """Lets another thread run a model, or copies over the same memory, while one lends it."""
    lender = _lenders.get(id(module))
    with nullcontext() if lender is None else _Lender(lender.parts, lender.loans, lender.lock):
        yield


@dataclass
class _Loan:
    name: str
    form: Tensor
    storage: torch.UntypedStorage
    nbytes: int
    users: int = 0
    written: bool = False


@internals.without_compiler
class _Lender(internals.TorchDispatchMode):
    def __init__(self, parts: Parts, loans: dict[int, _Loan], lock: threading.Lock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parts, self.loans, self.lock = parts, loans, lock
        self._making = False

    def lend(self, name: str, empty: nn.Parameter, device: torch.device) -> nn.Parameter:
        """Returns a parameter that is given its value when an operation needs it."""
        tensor = torch.empty_strided(empty.shape, empty.stride(), dtype=empty.dtype, device=device)
        storage = tensor.untyped_storage()
        self.loans[memory_of(tensor)] = _Loan(name, empty, storage, storage.nbytes())
        storage.resize_(0)
        parameter = nn.Parameter(tensor, empty.requires_grad)
        vars(parameter).update(vars(empty))
        return parameter

    def keys_of(self, names: Iterable[str]) -> list[int]:
        wanted = {*names}
        return [key for key, loan in self.loans.items() if loan.name in wanted]

    def has(self, tensor: Tensor) -> bool:
        """Tells whether a tensor has the memory of a parameter that is lent."""
        return is_dense(tensor) and not tensor.is_meta and memory_of(tensor) in self.loans

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read = [] if self._making else [each for each in tensors_of((args, kwargs)) if self.has(each)]
        if not read:
            return func(*args, **kwargs)
        if any(map(self.has, written_to(func, args, kwargs))):
            name = self.loans[memory_of(read[0])].name
            raise JobError(
                f"forward writes to the parameter {name!r}, which has no memory yet: leave out deferred=True"
            )
        # A view needs memory of that size, and reads none of it.
        with self.filled([*dict.fromkeys(map(memory_of, read))], not func.is_view):
            return func(*args, **kwargs)

    @contextmanager
    def filled(self, keys: Iterable[int], values: bool = True) -> Iterator[None]:
        """Has memory, with values or without, in the storages of some parameters."""
        loans = [self.loans[key] for key in keys]
        for loan in loans:
            with self.lock:
                if not loan.users:
                    loan.storage.resize_(loan.nbytes)
                if values and not loan.written:
                    self._write(loan)
                loan.users += 1
        try:
            yield
        finally:
            for loan in loans:
                with self.lock:
                    loan.users -= 1
                    if not loan.users:
                        loan.written = False
                        loan.storage.resize_(0)

    def _write(self, loan: _Loan) -> None:
        # What makes the value is seen by this mode, where no operation asked for it.
        self._making = True
        try:
            self.parts.write(loan.name, _within(loan))
            loan.written = True
        finally:
            self._making = False


class _Guard(TorchFunctionMode):
    """Refuses to show the memory of a parameter that is lent."""

    def __init__(self, lender: _Lender) -> None:
        super().__init__()
        self._lender = lender

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        asked = getattr(func, "__name__", "") in _ESCAPES and args and isinstance(args[0], Tensor)
        if asked and self._lender.has(args[0]):
            raise JobError(f"it calls {func.__name__}() of a parameter that has no memory yet: leave out deferred=True")
        return func(*args, **(kwargs or {}))


def _within(loan: _Loan) -> Tensor:
    """Returns the memory of a parameter as a tensor of its own, so that autograd does not see that it is written to."""
    empty = torch.empty(0, dtype=loan.form.dtype, device=loan.storage.device)
    return empty.set_(loan.storage, 0, loan.form.shape, loan.form.stride())


_lenders: dict[int, _Lender] = {}
"""By the `id` of the model."""
