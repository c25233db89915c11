"""Gradients between backward and update."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headrace.errors import UsageError
from headrace.modules import held_part


class ReadGradients:
    """Gradients that user code may read between backward and update, and not change; `why` says why not."""

    def __init__(self, named: Mapping[str, Tensor], why: str) -> None:
        self._named, self._why = named, why
        self._seen: dict[str, tuple[Tensor, Tensor] | None] = {}

    def look(self) -> None:
        """Keeps copies of them."""
        for name, parameter in self._named.items():
            gradient = parameter.grad
            self._seen[name] = None if gradient is None else (gradient, _bytes(gradient).clone())

    def forget(self) -> None:
        """Drops the copies."""
        self._seen.clear()

    def require_unchanged(self) -> None:
        """Raises UsageError if one is not as it was."""
        for name, seen in self._seen.items():
            gradient = self._named[name].grad
            if seen is None if gradient is None else seen and gradient is seen[0] and _same(gradient, seen[1]):
                continue
            raise UsageError(
                f".grad of {name!r} was changed between worker.backward(loss) and worker.update(), where {self._why}, "
                "so that what is changed there is not sent; use Options(clip_norm=...) or clip_value, change the loss, "
                "or use mirrored, whose workers have whole gradients"
            )
        self._seen.clear()


def _bytes(gradient: Tensor) -> Tensor:
    """Returns the elements that this process has of a gradient."""
    return held_part(gradient).detach().contiguous().view(-1).view(torch.uint8)


def _same(gradient: Tensor, copy: Tensor) -> bool:
    return torch.equal(_bytes(gradient), copy)
