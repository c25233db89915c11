"""Is a loss a mean over examples? The answer is in its graph, so that a forward that draws numbers makes no difference.

mse_loss(reduction="sum") / 8     DivBackward0 (by 8) ─► MseLossBackward0 (reduction 2, of shape (4, 1))
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace import internals
from headrace.errors import UsageError

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
_SCALED = ("MulBackward0", "DivBackward0")
_MEAN, _SUM = 1, 2
"""The saved reductions that stand for "mean" and "sum"."""
_BENT = {
    *("AbsBackward0", "ClampBackward0", "ClampBackward1", "ClampMaxBackward0", "ClampMinBackward0", "WhereBackward0"),
    *("ReluBackward0", "LeakyReluBackward0", "MaximumBackward0", "MinimumBackward0"),
}
"""What is linear only on a side of a limit."""
_ADDED, _AVERAGED, _WEIGHTED, _OF_WEIGHTS, _LIMITED = range(5)
"""Kinds of terms of a loss."""
_REENTRANT = "CheckpointFunctionBackward"
_NEAREST = 16
"""Operations of a loss that are compared between workers."""
SEARCHES = 16
"""Rounds whose losses differ by something that examples explain; then they are not compared any more."""
_NUMBERS = ("other", "self", "exponent", "min", "max", "beta", "threshold")
"""What operations have saved of the numbers that they take."""
_SMALL = 1e-7
"""Of the largest second derivative: what is below is rounding."""


class _Term(NamedTuple):
    """A term of a loss: a sum or a mean of numbers, times `factors`. `every` is False for a mean of some alone."""

    kind: int
    name: str = ""
    sizes: Sequence[int] = ()
    factors: tuple[float, ...] = ()
    every: bool = True


@dataclass(frozen=True)
class MeanCheck:
    """What is said of a loss that is not a mean over a share, by `say`, with the remedies of who asks: `remedy` for a
    sum, and `counted` for a mean over chosen numbers."""

    say: Callable[[str], object]
    remedy: str
    counted: str


def require_mean(check: MeanCheck, loss: Tensor, examples: int, of: int, gradient: Tensor | None = None) -> None:
    """Raises a UsageError for a loss that is a sum over a share of so many examples, of a batch of so many.

    Where it is a tensor of several, backward adds them, times a `gradient`.
    """
    if loss.numel() > 1:
        terms = []
        if gradient is not None and gradient.numel() and bool((gradient == gradient.flatten()[0]).all()):
            # All elements are multiplied by one number.
            terms = [_Term(_ADDED, "backward() of a tensor", loss.shape, (float(gradient.flatten()[0]),))]
    else:
        terms = [*_terms(loss.grad_fn, ())]
    for term in terms:
        _require_mean(check, term, examples, of)


def _require_mean(check: MeanCheck, term: _Term, examples: int, of: int) -> None:
    sizes = term.sizes
    if term.kind == _WEIGHTED:
        check.say(
            "cross_entropy with class weights divides by the weights of a process's own targets, so the result is "
            "not that of one process; use reduction='none' and divide the sum by len(batch)"
        )
    elif term.kind == _AVERAGED and (not term.every or math.prod(sizes) % examples):
        check.say(
            f"the loss is a mean over some numbers of a share alone ({term.name}; a mask, padding, ignore_index), "
            f"which each process divides by its own number, so the result is not that of one process; {check.counted}"
        )
    if term.kind == _LIMITED and examples > 1:
        check.say(
            f"a limit is put to the loss ({term.name}), which is the mean over a share, so the result is not that of "
            "one process; put it to the losses of single examples, before their mean"
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
            f"batch of {of} examples, and gradients are averaged by examples: {check.remedy}; where it is divided by "
            f"the number of what was chosen, {check.counted}"
        )
        if divisor < max(2, examples) or _is_one(divisor, _counts((of, *sizes[1:]), of)):
            raise UsageError(said)
        check.say(said)


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


class ShareFactors:
    """Finds factors of means that follow the number of a share's examples, when a share has another number of them."""

    def __init__(self) -> None:
        self._factors: dict[int, list[float]] = {}

    def look(self, loss: Tensor, examples: int) -> str:
        """Returns a line where a loss has such a factor, as `len(batch)`; "" else."""
        if examples in self._factors or len(self._factors) > 1 or not examples or loss.numel() > 1:
            return ""
        own = [math.prod(term.factors) for term in _terms(loss.grad_fn, ()) if term.kind == _AVERAGED]
        before = [(number, each) for number, factors in self._factors.items() for each in factors]
        self._factors[examples] = own
        for one, (number, other) in zip(own, before, strict=False):
            products = ((one * examples**by, other * number**by) for by in (1, -1))
            if one != other and any(math.isclose(*pair, rel_tol=1e-6) for pair in products):
                return (
                    f"a mean over the examples of a share has a factor that follows their number ({number}: {other:g}, "
                    f"{examples}: {one:g}), as by len(batch), and gradients are weighted by that number, too: the "
                    "result is not that of one process; leave the factor out"
                )
        return ""


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
    elif name in _BENT:
        yield _Term(_LIMITED, name)
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
    """Yields all nodes of a graph, the nearest first."""
    seen, rest = set(), [first]
    for node in rest:
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


def findings_of(loss: Tensor, outputs: Tensor, examples: int) -> Iterator[str]:
    """Yields lines about a loss that is not a mean over examples, from its derivatives by outputs of a row each.

    In a mean, each example has a part of its own: second derivatives by two examples are 0. It may have several rows
    (views of a picture, words): one after another, or each behind those of all examples.
    """
    gradient = _gradient(loss, outputs, create_graph=True)
    if gradient is None or len(outputs) < 2:
        return
    rows = gradient.detach().reshape(len(outputs), -1)
    without = int((rows == 0).all(1).sum())
    if 0 < without < len(rows) == examples:
        yield (
            "some examples of a share have no gradient: if the loss is a mean over chosen ones (a mask, ignore_index), "
            "each process divides by its own number, and the result is not that of one process; divide their sum by "
            "len(batch)"
        )
    if not gradient.requires_grad:
        return
    # Not their sum, which is 0 where outputs go through a softmax.
    first = gradient[0].reshape(-1)
    second = _gradient(first @ torch.linspace(1, 2, len(first), dtype=first.dtype, device=first.device), outputs)
    if second is None:
        return
    sizes = second.reshape(len(outputs), -1).abs().amax(1)
    others = [row for row in range(len(rows) // examples, len(rows)) if row % examples]
    if others and float(sizes[others].max()) > _SMALL * float(sizes.max()):
        yield (
            "the loss of an example depends on other examples of its share (they are compared, or a root or a ratio is "
            "taken over the batch): each process has that of its share, and the result is not that of one process"
        )


def _gradient(value: Tensor, outputs: Tensor, create_graph: bool = False) -> Tensor | None:
    try:
        (gradient,) = torch.autograd.grad(
            value, outputs, retain_graph=True, create_graph=create_graph, allow_unused=True
        )
    except RuntimeError:
        # Not every operation has a second derivative; what has none here is not looked at.
        return None
    return gradient


Made = list[tuple[str, list[float]]]
"""Operations, each with the single numbers that it takes."""


def made_of(loss: Tensor) -> Made:
    """Returns the operations that are nearest to a loss, each once: a factor of it is among their numbers."""
    found: dict[tuple[str, tuple[float, ...]], None] = {}
    for node in itertools.islice(_nodes(loss.grad_fn), _NEAREST):
        values = (_saved(node, name) for name in _numbers_of(node.__class__))
        found[node.name(), tuple(float(value) for value in values if _is_number(value))] = None
    return [(name, list(numbers)) for name, numbers in found]


@functools.cache
def _numbers_of(operation: type[Any]) -> tuple[str, ...]:
    # Looked up once, as this is done in each step, and an attribute that is missing takes long.
    return tuple(name for name in _NUMBERS if internals.SAVED + name in dir(operation))


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        # Reading one of a device would wait for it, in each step.
        return value.numel() == 1 and value.is_cpu and not value.requires_grad and not value.is_complex()
    return isinstance(value, int | float)


def otherwise_made(done: Sequence[tuple[int, Sequence[Made], int]]) -> str:
    """Returns a line where some ranks have made their losses otherwise; of each rank, its losses and examples.

    By the number of its examples each may divide.
    """
    ranks, made, examples = zip(*done, strict=True)
    if _same_made(made, examples):
        return ""
    ways = [", ".join(f"{name} {taken or ''}".strip() for loss in losses for name, taken in loss) for losses in made]
    other = next((place for place, way in enumerate(ways) if way != ways[0]), 0)
    said = "; ".join(f"on rank {ranks[place]} of {ways[place] or 'nothing':.200}" for place in (0, other))
    return (
        "the losses of a round are not made alike; each worker sees the loss and the data of its share alone, so what "
        f"is decided by them (by loss.item(), a mean of the batch) is not what one process does: {said}"
    )


def _same_made(made: Sequence[Sequence[Made]], examples: Sequence[int]) -> bool:
    shapes, numbers = [], []
    for losses in made:
        shapes.append([[(name, len(taken)) for name, taken in operations] for operations in losses])
        numbers.append([number for operations in losses for _, taken in operations for number in taken])
    return all(shape == shapes[0] for shape in shapes) and all(
        any(
            all(math.isclose(each, values[0], rel_tol=1e-9) for each in values)
            for values in (column, *(_scaled(column, examples, by) for by in (1, -1)))
        )
        for column in zip(*numbers, strict=True)
    )


def _scaled(values: Sequence[float], examples: Sequence[int], by: int) -> list[float]:
    return [value * count**by for value, count in zip(values, examples, strict=True)]


class LastOutput:
    """Keeps the outputs of a model's last forward, as far as there are as many rows for each example."""

    def __init__(self) -> None:
        self.outputs: Tensor | None = None

    def keep(self, model: object, values: object, outputs: Any) -> None:
        """Is called after a forward."""
        tensors = outputs if isinstance(outputs, tuple | list) else (outputs,)
        first = next((each for each in tensors if isinstance(each, Tensor) and each.requires_grad and each.dim()), None)
        self.outputs = first

    def take(self, examples: int) -> Tensor | None:
        """Returns them once; not those with hooks, which a derivative by them would call."""
        outputs, self.outputs = self.outputs, None
        if outputs is None or internals.gradient_hooks(outputs):
            return None
        # Where the batch is another dim, rows are of something else.
        has_rows = len(outputs) % max(1, examples) == 0 and examples not in outputs.shape[1:]
        return outputs if has_rows or len(outputs) == examples else None
