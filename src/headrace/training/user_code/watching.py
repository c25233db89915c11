"""What code does with tensors while it runs: torch's modes, which tell a function of each call.

with Operations(operation), Functions(function): model(x)

An operation (`aten.add.Tensor`) is what a function (`torch.add`, `Tensor.shape`) does with memory. Both see all code of
the thread between entering and leaving, also that of backward passes, and nothing of what is called to tell of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.overrides import TorchFunctionMode

from headrace import internals

Seen = Callable[[Any, Any, Any, Any], object]
"""Gets what was called, its arguments, those by name, and what it has returned."""


@internals.without_compiler
class Operations(internals.TorchDispatchMode):
    """Tells of each operation on tensors, when it is done."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._seen(func, args, kwargs or {}, result)
        return result


class Functions(TorchFunctionMode):
    """Tells of each function of torch, when it is done; also of those that ask for a tensor's shape."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._seen(func, args, kwargs or {}, result)
        return result
