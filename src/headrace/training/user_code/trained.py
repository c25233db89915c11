"""Which parameters are trained, where user code may change that; and their gradients, where it may read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter

import torch
from torch import Tensor, nn

from headrace.errors import UsageError
from headrace.modules import frozen_until, held_part
from headrace.trees import as_bytes


class TrainedParameters:
    """The parameters of a module that are trained, of which some are frozen in the first epochs (`hr.frozen`).

    Attributes:
        every: all of them, in the module's order.
        last_begin: the epoch from which on all are trained.
    """

    def __init__(self, module: nn.Module) -> None:
        named = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        until = frozen_until(module)
        self.every = list(named.values())
        self._begins = [until.get(name, 0) for name in named]
        self._frozen = {name: each for name, each in module.named_parameters() if name not in named}
        self.last_begin = max(self._begins, default=0)

    def in_epoch(self, epoch: int) -> list[nn.Parameter]:
        """Returns those that are trained in an epoch, without those that user code has frozen since.

        Raises:
            UsageError: user code trains one that was frozen when the run began.
        """
        self.require_frozen()
        if epoch >= self.last_begin and all(map(_REQUIRES_GRAD, self.every)):
            return self.every
        pairs = zip(self.every, self._begins, strict=True)
        return [parameter for parameter, begin in pairs if begin <= epoch and parameter.requires_grad]

    def require_frozen(self) -> None:
        """Raises UsageError if user code trains one that was frozen when the run began."""
        if any(map(_REQUIRES_GRAD, self._frozen.values())):
            names = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
            raise UsageError(
                f"{', '.join(map(repr, names)):.200}: requires_grad was False when the run began and is True now; "
                "neither the exchange nor checkpoints know of it; use hr.frozen(model, pattern, until_epoch=...), or "
                "build the model with all trained that ever is, and freeze it in the loop before the first step"
            )

    def all_of(self, live: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Returns one gradient for each, from those of `live`; None for those that are frozen."""
        if live is self.every:
            return gradients
        known = dict(zip(map(id, live), gradients, strict=True))
        return [known.get(id(parameter)) for parameter in self.every]


_REQUIRES_GRAD = attrgetter("requires_grad")


class FixedParameters:
    """Refuses a change of `requires_grad` where it cannot be followed; `why` says why not."""

    def __init__(self, named: Mapping[str, Tensor], why: str) -> None:
        self._named, self._why = dict(named), why
        self._flags = [parameter.requires_grad for parameter in self._named.values()]

    def require(self) -> None:
        """Raises UsageError if one is not as it was."""
        if [*map(_REQUIRES_GRAD, self._named.values())] == self._flags:
            return
        pairs = zip(self._named.items(), self._flags, strict=True)
        changed = [name for (name, parameter), flag in pairs if parameter.requires_grad != flag]
        raise UsageError(
            f"requires_grad of {', '.join(map(repr, changed)):.200} has changed since the run began, and {self._why}; "
            "use hr.frozen(model, pattern, until_epoch=...)"
        )


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
            if gradient is None or seen is None:
                same = gradient is None and seen is None
            else:
                same = gradient is seen[0] and torch.equal(_bytes(gradient), seen[1])
            if same:
                continue
            raise UsageError(
                f".grad of {name!r} was changed between worker.backward(loss) and worker.update(), where {self._why}, "
                "so that what is changed there is not sent; use Options(clip_norm=...) or clip_value, change the loss, "
                "or use mirrored, whose workers have whole gradients"
            )
        self._seen.clear()


def _bytes(gradient: Tensor) -> Tensor:
    """Returns the elements that this process has of a gradient."""
    return as_bytes(held_part(gradient).detach().contiguous())
