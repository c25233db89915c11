"""Is a script's loss a sum over examples? Then the shares' gradients add up, where those of a mean are averaged.

The answer is in the graph of the loss, so that a forward that draws random numbers makes no difference:

    mse_loss(reduction="sum") / 8     DivBackward0 (by 8) ─► MseLossBackward0 (reduction 2, of shape (4, 1))
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from headrace import internals
from headrace.api.plain_script.coupling import LastOutput, findings_of
from headrace.api.plain_script.meeting import Meeting
from headrace.errors import UsageError

_PASSES = 6
"""Backward passes whose losses are looked at: turns of several models may each have one of their own."""
_SAME = {
    *("NegBackward0", "CloneBackward0", "AliasBackward0", "ToCopyBackward0", "ViewBackward0", "UnsafeViewBackward0"),
    *("ReshapeAliasBackward0", "SqueezeBackward0", "SqueezeBackward1", "UnsqueezeBackward0", "SelectBackward0"),
}
"""What gives one number for one number, up to its sign."""
_OF_PARAMETERS = {
    "torch::autograd::AccumulateGrad",
    "PowBackward0",
    "MulBackward0",
    "AbsBackward0",
    "ViewBackward0",
    "TBackward0",
}
"""What a penalty on weights is made of."""
_MEAN, _SUM = 1, 2
"""The saved reductions that stand for "mean" and "sum"."""
_WEIGHTED = "class weights"
_REMEDY = (
    "say hr.setup(..., reduction='sum') if it is a sum over the batch, whose shares' gradients are added as in one "
    "process, or reduction='mean' if each share's loss is a mean over its examples all the same"
)


class LossWatch:
    """Looks at the losses of the first backward passes; a sum over examples raises a UsageError there."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._left = 0
        self._plain: Callable[..., None] | None = None
        self._models: list[tuple[LastOutput, RemovableHandle]] = []

    def begin(self, model: nn.Module) -> None:
        """Looks at the losses from now on, for a model that comes to those that are there."""
        self._left += _PASSES
        last = LastOutput()
        self._models.append((last, model.register_forward_hook(last.keep)))
        if self._plain is None:
            self._plain = torch.autograd.backward
            # `Tensor.backward` calls it by this name.
            setattr(torch.autograd, "backward", self._backward)  # noqa: B010

    def _backward(self, tensors: Any, *arguments: Any, **named: Any) -> None:
        plain, last = self._plain, self._meeting.deliveries.last
        assert plain is not None
        self._left -= 1
        if self._left == 0:
            setattr(torch.autograd, "backward", plain)  # noqa: B010
            self._plain = None
        if last is not None and last.examples:
            for loss in (tensors,) if isinstance(tensors, Tensor) else tensors:
                if loss.numel() == 1 and loss.grad_fn is not None:
                    require_mean(self._meeting, loss, last.examples, last.of)
                    self._look(loss, last.examples)
        if self._left == 0:
            for _, handle in self._models:
                handle.remove()
            self._models.clear()
        plain(tensors, *arguments, **named)

    def _look(self, loss: Tensor, examples: int) -> None:
        for last, _ in self._models:
            outputs = last.take(examples)
            for line in () if outputs is None else findings_of(loss, outputs):
                self._meeting.say(line)


def require_mean(meeting: Meeting, loss: Tensor, examples: int, of: int) -> None:
    """Raises a UsageError for a loss that is a sum over a share of so many examples, of a batch of so many."""
    for name, sizes, factors in _reductions(loss.grad_fn, ()):
        if name == _WEIGHTED:
            meeting.say(
                "cross_entropy with class weights divides by the weights of a process's own targets, so the result is "
                "not that of one process; use reduction='none' and divide the sum by len(batch)"
            )
            continue
        if not sizes or (examples not in sizes and sizes[0] % examples):
            continue
        factor = math.prod(factors)
        divisor = 1 / abs(factor) if factor else math.inf
        # Of one example, a mean that is written out divides by 1.
        if not _is_one(divisor, _counts(sizes, examples)) or (examples == 1 and not factors):
            divided = "" if divisor == 1 else f" divided by {divisor:g}"
            said = (
                f"the loss is a sum ({name} over {list(sizes)}){divided}, where this process has {examples} of a batch "
                f"of {of} examples, and gradients are averaged by examples: {_REMEDY}"
            )
            if divisor < max(2, examples) or _is_one(divisor, _counts((of, *sizes[1:]), of)):
                raise UsageError(said)
            meeting.say(said)


def _reductions(node: Any, factors: tuple[float, ...]) -> Iterator[tuple[str, Sequence[int], tuple[float, ...]]]:
    """Yields the sums over many numbers that a loss is made of, with their shapes and factors."""
    name = node.name()
    following = [after for after, _ in node.next_functions if after is not None]
    if name in ("MulBackward0", "DivBackward0") and len(following) == 1:
        other = _saved(node, "other")
        if other is None:
            other = _saved(node, "self")
        if other is not None and other.numel() == 1:
            value = float(other)
            factor = value if name == "MulBackward0" else 1 / value if value else math.inf
            yield from _reductions(following[0], (*factors, factor))
    elif name in _SAME or name.startswith(("AddBackward", "SubBackward")):
        for after in following:
            yield from _reductions(after, factors)
    elif name in ("SumBackward0", "SumBackward1"):
        if following and not _is_of_parameters(following[0]):
            yield name, _saved(node, "self_sym_sizes"), factors
    elif _saved(node, "reduction") == _MEAN and _saved(node, "total_weight") is not None:
        if _saved(node, "weight") is not None:
            yield _WEIGHTED, (), factors
    elif _saved(node, "reduction") == _SUM:
        yield f"{name} with reduction='sum'", tuple(_saved(node, "self").shape), factors


def _saved(node: Any, name: str) -> Any:
    return getattr(node, internals.SAVED + name, None)


def _is_of_parameters(node: Any) -> bool:
    """Tells whether a value is made of parameters alone, as a penalty on their norms is, or of single losses."""
    if node.name() in ("StackBackward0", "CatBackward0"):
        return True
    seen, rest = set(), [node]
    while rest:
        current = rest.pop()
        if current in seen:
            continue
        seen.add(current)
        if current.name() not in _OF_PARAMETERS:
            return False
        rest += [after for after, _ in current.next_functions if after is not None]
    return True


def _counts(sizes: Sequence[int], examples: int) -> list[int]:
    """Returns the numbers by which a sum of such a shape is divided to be a mean over examples."""
    inner = [math.prod(chosen) for count in range(len(sizes)) for chosen in itertools.combinations(sizes[1:], count)]
    return [first * each for first in (examples, sizes[0]) for each in inner]


def _is_one(value: float, counts: Sequence[int]) -> bool:
    return any(math.isclose(value, count, rel_tol=1e-6) for count in counts)
