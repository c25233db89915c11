"""Hooks on parameters and modules: found, and carried to a copy of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from headrace import internals

Hooks = tuple[tuple[Callable[..., Any], ...], tuple[Callable[..., Any], ...]]
"""Of a parameter: those that see a gradient (`register_hook`), and the sum (`register_post_accumulate_grad_hook`)."""


def hooks_of(parameter: Tensor) -> Hooks:
    """Returns what is called with a parameter's gradients, in order."""
    gradients, sums = (tuple((table or {}).values()) for table in _tables(parameter))
    return gradients, sums


def hooked_parameters(named: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of the parameters whose gradients hooks see."""
    return [name for name, parameter in named.items() if any(hooks_of(parameter))]


def hang(parameter: Tensor, hooks: Hooks) -> None:
    """Registers hooks on a parameter."""
    trained = parameter.requires_grad
    # torch registers none on frozen ones, which keep those that they have.
    parameter.requires_grad_()
    for hook in hooks[0]:
        parameter.register_hook(hook)
    for hook in hooks[1]:
        parameter.register_post_accumulate_grad_hook(hook)
    parameter.requires_grad_(trained)


def silenced(parameters: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Calls no hooks of parameters meanwhile: their gradients are parts of what the hooks are to see, see `called`."""
    return emptied([table for each in parameters for table in _tables(each) if table])


@contextmanager
def emptied(tables: Sequence[dict[Any, Any]]) -> Iterator[None]:
    """Takes the hooks out of tables of hooks meanwhile."""
    held = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, held, strict=True):
            table.update(hooks)


def called(parameters: Sequence[Tensor], factor: float, before: Sequence[Tensor | None] | None = None) -> None:
    """Calls the hooks of parameters with what is in `.grad`, divided by `factor`, and leaves what they make of it.

    It is times `factor` again; or, where other gradients were there `before`, added to those.
    """
    earlier = [None] * len(parameters) if before is None else before
    # In the order of a backward pass.
    for parameter, first in reversed([*zip(parameters, earlier, strict=True)]):
        gradients, sums = hooks_of(parameter)
        if parameter.grad is None:
            parameter.grad = first
            continue
        if before is None and not (gradients or sums):
            continue
        gradient = parameter.grad / factor
        for hook in gradients:
            made = hook(gradient)
            gradient = gradient if made is None else made
        parameter.grad = gradient if first is None else first + gradient
        for hook in sums:
            hook(parameter)
        if before is None and parameter.grad is not None:
            parameter.grad = parameter.grad * factor


def owners_of(hooks: Iterable[Callable[..., Any]]) -> list[Any]:
    """Returns hooks, and the objects whose methods they are, such as a list's `append`."""
    every = list(hooks)
    bound = [getattr(hook, "__self__", None) for hook in every]
    return [*every, *(owner for owner in bound if owner is not None and not isinstance(owner, nn.Module))]


def _tables(parameter: Tensor) -> tuple[Any, Any]:
    return internals.gradient_hooks(parameter), internals.accumulation_hooks(parameter)


def carry_hooks(parameters: Iterable[Tensor], copy: nn.Module, memo: Mapping[int, Any]) -> None:
    """Gives a deep copy of a module what `copy.deepcopy` leaves out; `memo` is that of the copying.

    That are the hooks of its `parameters`. And functions that the module keeps, hooks of modules too, refer to the copy
    where they referred to the module, a part or a tensor of it, in what they enclose or by default.
    """
    rebinder = _Rebinder(memo)
    for parameter in parameters:
        copied = memo.get(id(parameter))
        if copied is not None and any(hooks := hooks_of(parameter)):
            gradients, sums = (tuple(map(rebinder.of, each)) for each in hooks)
            hang(copied, (gradients, sums))
    for part in copy.modules():
        for name, value in vars(part).items():
            if isinstance(value, FunctionType):
                vars(part)[name] = rebinder.of(value)
            elif isinstance(value, dict):
                value.update({key: rebinder.of(each) for key, each in value.items() if isinstance(each, FunctionType)})


class _Rebinder:
    """Makes functions that refer to copies of what the given ones refer to."""

    def __init__(self, memo: Mapping[int, Any]) -> None:
        self._memo = memo
        # By the place that a value is kept in, so that functions share what they shared.
        self._cells: dict[int, CellType] = {}
        self._made: dict[int, Any] = {}
        self._begun: set[int] = set()

    def of(self, value: Any) -> Any:
        """Returns the copy of a value, or a function like it; the value itself where nothing was copied."""
        if not isinstance(value, FunctionType):
            if isinstance(value, MethodType) and id(value.__self__) in self._memo:
                return MethodType(value.__func__, self._memo[id(value.__self__)])
            return self._memo.get(id(value), value)
        if id(value) in self._made or id(value) in self._begun:
            return self._made.get(id(value), value)
        self._begun.add(id(value))
        cells = tuple(map(self._cell, value.__closure__ or ()))
        defaults = tuple(map(self.of, value.__defaults__ or ()))
        named = {name: self.of(each) for name, each in (value.__kwdefaults__ or {}).items()}
        made = value
        before = (*(value.__closure__ or ()), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        if any(one is not other for one, other in zip((*cells, *defaults, *named.values()), before, strict=True)):
            made = FunctionType(value.__code__, value.__globals__, value.__name__, defaults or None, cells or None)
            made.__kwdefaults__ = named or None
            made.__dict__.update(vars(value))
        self._made[id(value)] = made
        return made

    def _cell(self, cell: CellType) -> CellType:
        if id(cell) in self._cells:
            return self._cells[id(cell)]
        try:
            content = cell.cell_contents
        except ValueError:
            # The name is not bound yet.
            return cell
        copied = self.of(content)
        self._cells[id(cell)] = cell if copied is content else CellType(copied)
        return self._cells[id(cell)]


class OwnHook:
    """A hook of a module. Its copies, and files that it is written to, have one that does nothing."""

    def __init__(self, act: Callable[..., None]) -> None:
        self._act = act

    def __call__(self, *given: Any) -> None:
        self._act(*given)

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return nullcontext().__exit__

    def __reduce__(self) -> tuple[Any, ...]:
        # A file must not need this package.
        return getattr, (nullcontext(), "__exit__")
