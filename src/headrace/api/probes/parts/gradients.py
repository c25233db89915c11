"""Are the gradients of a batch the sums of those of its parts?

A loss may be the mean of its parts' losses, and its gradients not theirs: a hook or an autograd function that clamps or
normalises gradients sees those of a share. And a forward may look at the whole batch in train mode alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headrace import internals
from headrace.api.probes.finding import Finding, Scope, names_of
from headrace.api.probes.parts.sample import Sample
from headrace.api.probes.parts.split_loss import probe_split_loss, use_running_statistics
from headrace.hooks import emptied, owners_of, silenced
from headrace.internals import BatchNorm
from headrace.metrics import weigh
from headrace.training.user_code.trial import drawn, trial
from headrace.training.user_code.untouched import untouched

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-4}
_HALF_TOLERANCE = 0.05
_MOST_ELEMENTS = 250_000
"""Of the parameters whose gradients are compared, the small ones first."""


@dataclass(frozen=True)
class _Sums:
    """The sum of the losses of some examples, its gradients, and whether random numbers were drawn."""

    loss: Tensor
    gradients: Sequence[Tensor | None]
    random: bool


def probe_gradients(sample: Sample) -> Sequence[Finding]:
    """Compares loss and gradients of a batch with the sums of those of its halves, each times another factor."""
    module, objective, count = sample.module, sample.objective, sample.count
    if objective.model is not None:
        return ()
    trained = _some(parameter for parameter in module.parameters() if parameter.requires_grad)
    hooks = [table for part in module.modules() for table in _tables(part)]
    touched = [objective.loss, *owners_of(hook for table in hooks for hook in table.values())]

    def sums(low: int, high: int, factor: float = 1.0) -> _Sums:
        with trial(module), torch.enable_grad(), untouched(*touched):
            use_running_statistics(module)
            before = drawn()
            total, _ = weigh(objective.of(module, sample.part(low, high)), high - low)
            found = torch.autograd.grad(total * factor, trained, allow_unused=True) if total.requires_grad else ()
            gradients = [None if each is None else each / factor for each in found]
            return _Sums(total.detach(), gradients, drawn() != before)

    def three(one: float = 1.0, other: float = 1.0, whole: _Sums | None = None) -> tuple[_Sums, _Sums, _Sums]:
        return whole or sums(0, count), sums(0, count // 2, one), sums(count // 2, count, other)

    with silenced(list(module.parameters())):
        for training in (True, False):
            with _modes(module, training):
                whole = sums(0, count)
                if whole.random:
                    continue
                found = _finding(module, three, hooks, whole)
            if training and found and not found.refused:
                with _modes(module, False):
                    found = found if _differ(*three(1e3, 1e-3)) else _OTHER_LOSS
            # What is another loss in eval mode, too, is said of the loss.
            said = found is None or (not found.refused and probe_split_loss(sample))
            return () if found is None or said else [found]
    return ()


_OTHER_LOSS = Finding(
    "in train mode that of a batch, or its gradient, is not the weighted mean of its parts', in eval mode it is: "
    "forward or backward looks at the whole batch there, of which each share has a part",
    "the loss",
    "use one_device, or layers that look at each example alone",
    Scope.SHARES,
)


def _finding(
    module: nn.Module, three: Callable[..., Sequence[_Sums]], hooks: Sequence[Any], whole: _Sums
) -> Finding | None:
    found = three(1e3, 1e-3, whole)
    if not _added(*found):
        return _OTHER_LOSS
    if not _differ(*found):
        return None
    combines = _differ(*three())
    what = (
        "combines the examples of a batch, of which each share has a part"
        if combines
        else "looks at the size of gradients, which are those of a share's own mean"
    )
    remedy = "use one_device" if combines else "use mirrored or central_storage"
    scope = Scope.SHARES if combines else Scope.OWN_MEANS
    with emptied(hooks):
        of_hooks = bool(hooks) and not _differ(*three(1e3, 1e-3))
    if of_hooks:
        hooked = [name for name, part in module.named_modules() if _tables(part)]
        names = names_of(hooked) if hooked != [""] else "the model"
        return Finding(f"a backward hook of this module {what}", names, remedy, scope, refused=True)
    where = "the backward pass of the loss or the model (a hook of a tensor, an autograd function)"
    return Finding(what, where, remedy, scope)


def _added(whole: _Sums, *parts: _Sums) -> bool:
    loss, others = float(whole.loss), [float(part.loss) for part in parts]
    size = max(abs(loss), *map(abs, others))
    return not abs(loss - sum(others)) > 10 * _TOLERANCE.get(whole.loss.dtype, _HALF_TOLERANCE) * size


def _differ(whole: _Sums, *parts: _Sums) -> bool:
    """Tells whether gradients are no sums, by the largest of all: one that should be 0 is all rounding."""
    pairs = []
    for one, *others in zip(whole.gradients, *(part.gradients for part in parts), strict=True):
        present = [other for other in others if other is not None]
        if one is not None and present and one.numel():
            pairs.append((one, torch.stack(present).sum(0)))
    size = max((float(one.abs().max()) for one, _ in pairs), default=0.0)
    # A loss in a narrower type rounds gradients as that does: transformers' is float32 for a double model.
    types = [whole.loss.dtype, *(one.dtype for one, _ in pairs)]
    tolerance = max(_TOLERANCE.get(each, _HALF_TOLERANCE) for each in types)
    return any(float((one - other).abs().max()) > tolerance * size for one, other in pairs)


def _some(parameters: Iterable[Tensor]) -> list[Tensor]:
    chosen: list[Tensor] = []
    left = _MOST_ELEMENTS
    for parameter in sorted(parameters, key=Tensor.numel):
        left -= parameter.numel()
        if left < 0 and chosen:
            break
        chosen.append(parameter)
    return chosen


@contextmanager
def _modes(module: nn.Module, training: bool) -> Iterator[None]:
    """Puts a model into eval mode, but for its parts that are of the user's own classes, if `training`."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        for part, mode in modes if training else ():
            part.training = mode and not (type(part).__module__.startswith("torch.nn.") or isinstance(part, BatchNorm))
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def _tables(part: nn.Module) -> list[Any]:
    return [table for table in (internals.backward_hooks(part), internals.backward_pre_hooks(part)) if table]
