"""The router's loss of transformers' mixtures: of the tokens of all workers.

It is a sum over experts of products: the part of all tokens that go to an expert, times the mean of its probability. So
the loss of a batch is no mean of losses of its parts. Each worker computes it of the router's outputs of all, which
are gathered: one number an expert, where a token has thousands.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any, Protocol

from torch import Tensor, nn

from headrace.errors import UsageError
from headrace.expert_parallel.rows import RowLink, gather_rows

_LOSS = "load_balancing_loss_func"
_lock = threading.Lock()
_balances: dict[int, RouterLoss] = {}
"""By thread: those of the forward passes that run now."""


class RouterLoss(Protocol):
    """What is called in the place of a router's loss; `original` is that."""

    def loss(self, original: Any, logits: Any, *args: Any, **kwargs: Any) -> Any: ...


class LeftOut:
    """Makes a router's loss 0."""

    def loss(self, original: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns 0, as a number of the graph."""
        return original(logits, *args, **kwargs) * 0


def without_router_loss(module: nn.Module) -> AbstractContextManager[None]:
    """Leaves the router's loss of transformers out of what a model computes in this thread."""
    return with_router_loss(module, LeftOut())


@contextmanager
def with_router_loss(module: nn.Module, loss: RouterLoss) -> Iterator[None]:
    """Calls another loss in the place of the router's loss of transformers, in this thread."""
    for place in _places(module):
        _replace(place)
    before = _enter(loss)
    try:
        yield
    finally:
        _enter(before)


class Balance:
    """Lets a model's router loss see the tokens of all ranks.

    `parts` is whether a rank's batch is cut into micro-batches, of which the loss would be another one.

    Attributes:
        used: whether the model has computed one.
    """

    def __init__(self, module: nn.Module, link: RowLink, parts: bool = False) -> None:
        self.used = False
        self._link, self._parts = link, parts
        self._before: list[RouterLoss | None] = []
        for place in _places(module):
            _replace(place)
        module.register_forward_pre_hook(self._begin, prepend=True)
        module.register_forward_hook(self._end, always_call=True)

    def loss(self, original: Any, logits: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the loss over all ranks' tokens."""
        if not isinstance(logits, tuple):
            return original(logits, *args, **kwargs)
        if self._parts:
            raise cuts_router_loss()
        self.used = True
        every = tuple(gather_rows(self._link, layer) for layer in logits)
        # The mask is the last that it takes: one number a token.
        positional = [_mask_of_all(self._link, each) for each in args]
        return original(every, *positional, **{key: _mask_of_all(self._link, each) for key, each in kwargs.items()})

    def _begin(self, *_: Any) -> None:
        self._before.append(_enter(self))

    def _end(self, *_: Any) -> None:
        _enter(self._before.pop())


def _enter(balance: RouterLoss | None) -> RouterLoss | None:
    """Lets it be called in this thread; returns what was before."""
    thread = threading.get_ident()
    with _lock:
        before = _balances.pop(thread, None)
        if balance is not None:
            _balances[thread] = balance
    return before


def cuts_router_loss() -> UsageError:
    """Returns the refusal of micro-batches."""
    return UsageError(
        "the router's loss is of all tokens of a batch, and Options(accumulate=...) cuts the batch of each worker into "
        "micro-batches of other tokens than one device's; use accumulate=1, or output_router_logits=False"
    )


def _mask_of_all(link: RowLink, value: Any) -> Any:
    return gather_rows(link, value.reshape(-1))[None] if isinstance(value, Tensor) and value.dim() == 2 else value


def _places(module: nn.Module) -> Iterator[ModuleType]:
    """Yields the files of the model's classes in which transformers' loss is."""
    names = dict.fromkeys(base.__module__ for part in module.modules() for base in type(part).__mro__)
    for name in names:
        place = sys.modules.get(name)
        loss = vars(place).get(_LOSS) if place else None
        if place and loss is not None and getattr(loss, "__module__", "").startswith("transformers."):
            yield place


def _replace(place: ModuleType) -> None:
    with _lock:
        original = vars(place)[_LOSS]
        if getattr(original, "headrace", False):
            return

        @functools.wraps(original)
        def loss(logits: Any, *args: Any, **kwargs: Any) -> Any:
            with _lock:
                balance = _balances.get(threading.get_ident())
            if balance is None:
                return original(logits, *args, **kwargs)
            return balance.loss(original, logits, *args, **kwargs)

        marked: Any = loss
        marked.headrace = True
        setattr(place, _LOSS, loss)
