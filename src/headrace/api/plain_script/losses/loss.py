"""Is a script's loss a sum over examples? Then the shares' gradients add up, where those of a mean are averaged.

The answer is in the graph of the loss, so that a forward that draws random numbers makes no difference:

    mse_loss(reduction="sum") / 8     DivBackward0 (by 8) ─► MseLossBackward0 (reduction 2, of shape (4, 1))
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from headrace import internals
from headrace.api.plain_script.deliveries import OwnHook
from headrace.api.plain_script.losses.coupling import LastOutput, findings_of
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
    "SumBackward0",
    "LinalgVectorNormBackward0",
}
"""What a penalty on weights is made of."""
_JOINED = ("StackBackward0", "CatBackward0")
"""What makes one tensor of single losses."""
_COUNTED = (
    "divide the sum by hr.processes().sum(number), the number of all processes, and say hr.setup(..., reduction='sum')"
)
_SCALED = ("MulBackward0", "DivBackward0")
_MEAN, _SUM = 1, 2
"""The saved reductions that stand for "mean" and "sum"."""
_ADDED, _AVERAGED, _WEIGHTED, _OF_WEIGHTS = range(4)
"""Kinds of terms of a loss."""
_REENTRANT = "CheckpointFunctionBackward"
_REMEDY = (
    "say hr.setup(..., reduction='sum') if it is a sum over the batch, whose shares' gradients are added as in one "
    "process, or reduction='mean' if each share's loss is a mean over its examples all the same"
)


class _Term(NamedTuple):
    """A term of a loss: a sum or a mean of numbers, times `factors`. `every` is False for a mean of some alone."""

    kind: int
    name: str = ""
    sizes: Sequence[int] = ()
    factors: tuple[float, ...] = ()
    every: bool = True


class LossWatch:
    """Looks at the losses of the first backward passes; one that is not what it is taken for raises a UsageError."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._left = 0
        self._plain: Callable[..., None] | None = None
        self._plain_grad: Callable[..., Any] = torch.autograd.grad
        self._models: list[tuple[LastOutput, RemovableHandle]] = []
        self._adds = set[bool]()
        self._parameters = set[int]()

    def begin(self, model: nn.Module, adds: bool) -> None:
        """Looks at the losses from now on, for a model that comes to those that are there."""
        self._parameters.update(map(id, model.parameters()))
        self._left += _PASSES
        self._adds.add(adds)
        last = LastOutput()
        self._models.append((last, model.register_forward_hook(OwnHook(last.keep))))
        if self._plain is None:
            self._plain = torch.autograd.backward
            # `Tensor.backward` calls it by this name.
            setattr(torch.autograd, "backward", self._backward)  # noqa: B010
            self._plain_grad = torch.autograd.grad
            setattr(torch.autograd, "grad", self._grad)  # noqa: B010

    def _grad(self, outputs: Any, inputs: Any, *arguments: Any, **named: Any) -> Any:
        every = (inputs,) if isinstance(inputs, Tensor) else inputs
        if any(id(each) in self._parameters for each in every):
            self._meeting.say(
                "torch.autograd.grad gives gradients of the parameters that are of each process's share alone, as "
                "where a model is adapted to a batch before its loss is taken"
            )
        return self._plain_grad(outputs, inputs, *arguments, **named)

    def _backward(self, tensors: Any, *arguments: Any, **named: Any) -> None:
        plain, last = self._plain, self._meeting.deliveries.last
        assert plain is not None
        if internals.current_backward() != -1:
            # One inside another, of recomputed layers.
            plain(tensors, *arguments, **named)
            return
        self._left -= 1
        if self._left == 0:
            setattr(torch.autograd, "backward", plain)  # noqa: B010
            setattr(torch.autograd, "grad", self._plain_grad)  # noqa: B010
            self._plain = None
        # Of several models, whose losses are of both kinds, it is not known which this one is.
        if last is not None and last.examples and len(self._adds) == 1:
            gradients = arguments[0] if arguments else named.get("grad_tensors")
            single = isinstance(tensors, Tensor)
            every = (gradients,) if single else gradients or [None] * len(tensors)
            for loss, gradient in zip((tensors,) if single else tensors, every, strict=False):
                if loss.grad_fn is not None:
                    self._require(loss, gradient, last.examples, last.of)
        if self._left == 0:
            for _, handle in self._models:
                handle.remove()
            self._models.clear()
        plain(tensors, *arguments, **named)

    def _require(self, loss: Tensor, gradient: Tensor | None, examples: int, of: int) -> None:
        if self._adds == {True}:
            require_sum(loss, examples)
            return
        require_mean(self._meeting, loss, examples, of, gradient)
        if loss.numel() == 1:
            self._look(loss, examples)

    def _look(self, loss: Tensor, examples: int) -> None:
        for last, _ in self._models:
            outputs = last.take(examples)
            for line in () if outputs is None else findings_of(loss, outputs):
                self._meeting.say(line)


def require_mean(meeting: Meeting, loss: Tensor, examples: int, of: int, gradient: Tensor | None = None) -> None:
    """Raises a UsageError for a loss that is a sum over a share of so many examples, of a batch of so many.

    Where it is a tensor of several, backward adds them, times a `gradient`.
    """
    if loss.numel() > 1:
        terms = [_Term(_ADDED, "backward() of a tensor", loss.shape, (float(each),)) for each in _factor(gradient)]
    else:
        terms = [*_terms(loss.grad_fn, ())]
    for term in terms:
        _require_mean(meeting, term, examples, of)


def _require_mean(meeting: Meeting, term: _Term, examples: int, of: int) -> None:
    sizes = term.sizes
    if term.kind == _WEIGHTED:
        meeting.say(
            "cross_entropy with class weights divides by the weights of a process's own targets, so the result is "
            "not that of one process; use reduction='none' and divide the sum by len(batch)"
        )
    elif term.kind == _AVERAGED and (not term.every or math.prod(sizes) % examples):
        meeting.say(
            f"the loss is a mean over some numbers of a share alone ({term.name}; a mask, padding, ignore_index), "
            f"which each process divides by its own number, so the result is not that of one process; {_COUNTED}"
        )
    if term.kind != _ADDED or not sizes or (examples not in sizes and sizes[0] % examples):
        return
    factor = math.prod(term.factors)
    divisor = 1 / abs(factor) if factor else math.inf
    # Of one example, a mean that is written out divides by 1.
    # A mean may be weighted, as in distillation: batchmean times the square of a temperature.
    divisors = [divisor, *(1 / abs(each) for each in term.factors if each)]
    if not any(_is_one(each, _counts(sizes, examples)) for each in divisors) or (examples == 1 and not term.factors):
        divided = "" if divisor == 1 else f" divided by {divisor:g}"
        said = (
            f"the loss is a sum ({term.name} over {list(sizes)}){divided}, where this process has {examples} of a "
            f"batch of {of} examples, and gradients are averaged by examples: {_REMEDY}; where it is divided by "
            f"the number of what was chosen, {_COUNTED}"
        )
        if divisor < max(2, examples) or _is_one(divisor, _counts((of, *sizes[1:]), of)):
            raise UsageError(said)
        meeting.say(said)


def require_sum(loss: Tensor, examples: int) -> None:
    """Raises a UsageError for a loss that is not a sum over the examples of a share."""
    for term in _terms(loss.grad_fn, ()) if loss.numel() == 1 else ():
        factor = abs(math.prod(term.factors))
        if term.kind == _OF_WEIGHTS:
            raise UsageError(
                f"a term of the loss is made of parameters alone ({term.name}), and with reduction='sum' it counts "
                "once in each process: divide it by hr.processes().world, or use the optimizer's weight_decay"
            )
        if (
            term.kind != _ADDED
            and examples > 1
            and (factor < examples or not _is_one(factor % examples, (0, examples)))
        ):
            raise UsageError(
                f"the loss is a mean ({term.name} over {math.prod(term.sizes)} numbers) over the {examples} examples "
                "of a share, and with reduction='sum' the gradients of the shares are added: leave reduction out"
            )
    if any(node.name() == _REENTRANT for node in _nodes(loss.grad_fn)):
        raise UsageError(
            "torch.utils.checkpoint with use_reentrant=True runs backward passes inside of others, whose sums "
            "reduction='sum' cannot tell apart; use use_reentrant=False"
        )


def _factor(gradient: Tensor | None) -> Sequence[float]:
    """Returns the number that all elements of a gradient are, if they are one."""
    if gradient is None or not gradient.numel() or not bool((gradient == gradient.flatten()[0]).all()):
        return ()
    return (gradient.flatten()[0].item(),)


def _terms(node: Any, factors: tuple[float, ...]) -> Iterator[_Term]:
    name = node.name()
    following = [after for after, _ in node.next_functions if after is not None]
    if name in _SCALED and len(following) == 1:
        other = _saved(node, "other")
        if other is None:
            other = _saved(node, "self")
        if other is not None and other.numel() == 1:
            value = float(other)
            factor = value if name.startswith("Mul") else 1 / value if value else math.inf
            yield from _terms(following[0], (*factors, factor))
    elif name == "MulBackward1":
        # A part of a loss with label smoothing, whose sums are a mean together.
        yield from (term for term in _terms(following[0], factors) if term.kind != _ADDED)
    elif name in _SAME or name.startswith(("AddBackward", "SubBackward")):
        for after in following:
            yield from _terms(after, factors)
    elif _is_of_parameters(node):
        yield _Term(_OF_WEIGHTS, name, (), factors)
    elif name in ("SumBackward0", "SumBackward1", "MeanBackward0", "MeanBackward1"):
        if following and following[0].name() not in _JOINED and not _is_of_parameters(following[0]):
            yield _Term(_ADDED if name.startswith("Sum") else _AVERAGED, name, _saved(node, "self_sym_sizes"), factors)
    elif _saved(node, "reduction") == _MEAN:
        weight, total = _saved(node, "total_weight"), _saved(node, "target")
        if weight is None or total is None:
            values = _saved(node, "self")
            if values is not None:
                yield _Term(_AVERAGED, name, tuple(values.shape), factors)
        elif _saved(node, "weight") is not None:
            yield _Term(_WEIGHTED, name, tuple(total.shape), factors)
        else:
            yield _Term(_AVERAGED, name, (int(weight),), factors, int(weight) == total.numel())
    elif _saved(node, "reduction") == _SUM:
        yield _Term(_ADDED, f"{name} with reduction='sum'", tuple(_saved(node, "self").shape), factors)


def _nodes(first: Any) -> Iterator[Any]:
    """Yields all nodes of a graph."""
    seen, rest = set(), [first]
    while rest:
        node = rest.pop()
        if node not in seen:
            seen.add(node)
            yield node
            rest += [after for after, _ in node.next_functions if after is not None]


def _saved(node: Any, name: str) -> Any:
    return getattr(node, internals.SAVED + name, None)


def _is_of_parameters(node: Any) -> bool:
    """Tells whether a value is made of parameters alone, as a penalty on their norms is."""
    return all(each.name() in _OF_PARAMETERS for each in _nodes(node))


def _counts(sizes: Sequence[int], examples: int) -> list[int]:
    """Returns the numbers by which a sum of such a shape is divided to be a mean over examples."""
    inner = [math.prod(chosen) for count in range(len(sizes)) for chosen in itertools.combinations(sizes[1:], count)]
    return [first * each for first in (examples, sizes[0]) for each in inner]


def _is_one(value: float, counts: Sequence[int]) -> bool:
    return any(math.isclose(value, count, rel_tol=1e-6) for count in counts)
