"""Whether a model computes on divided sequences what it computes on whole ones, tried before the start.

It is run on a few examples, whole and as two workers have it, in threads: outputs and gradients of both are compared,
on two lengths, of which one does not divide. The first module whose outputs differ, in the order in which modules
return, is what looks at other tokens than its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from headrace import internals
from headrace.batches import call
from headrace.collectives.threads import ThreadCollective
from headrace.context_parallel.division import counted, dim_of, dims_of, form_of, join
from headrace.context_parallel.installed import Substitutes, substituted, torch_arange
from headrace.context_parallel.placement import Zigzag
from headrace.context_parallel.replica import DividedForward
from headrace.context_parallel.ring import SharedRing
from headrace.errors import HeadraceError, PeerLost, UsageError, in_one_line
from headrace.hooks import silenced
from headrace.modules import set_train_modes
from headrace.spec.compute import TokenUse
from headrace.training.user_code.divided import SMALL, WORLD, distance, run_in_threads, weighed
from headrace.training.user_code.trial import WithoutDropout, largest_element, unchanged, without_compilers
from headrace.trees import map_leaves, tensors_of

_LENGTHS = (6, 10, 14, 18, 22, 26, 34, 38, 46)
"""How many tokens a worker may have in a trial: those that no parameter has as a length."""
_INSTEAD = "use mirrored, or tensor_parallel, whose workers have whole sequences"


@dataclass(frozen=True)
class _Return:
    """What a module has returned, and its name."""

    name: str
    kind: str
    tensors: Sequence[Tensor]


@dataclass
class _Run:
    """A run of a model: what its modules have returned, and the gradients of its parameters."""

    returns: list[_Return] = field(default_factory=list)
    outputs: Sequence[Tensor] = ()
    gradients: Sequence[Tensor | None] = ()
    open: list[tuple[str, nn.Module]] = field(default_factory=list)
    error: Exception | None = None
    buffers: dict[str, Tensor] = field(default_factory=dict)
    counted: Sequence[tuple[str, bool]] = ()
    dims: tuple[int, ...] = ()

    def where(self) -> str:
        """Names the module that was running when an error came."""
        name, part = self.open[-1] if self.open else ("", None)
        return _named(name, type(part).__name__) if part is not None else "the model"


def verify(module: nn.Module, batch: Any, inputs: Any) -> TokenUse:
    """Tries whether a model can be trained on divided sequences; the module stays as it is.

    Returns what its forward does with tokens.

    Raises:
        UsageError: it cannot; it names the module that looks at other tokens than its own, or what it is given.
    """
    for name, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule) or getattr(part, internals.COMPILED_CALL, None) is not None:
            raise UsageError(
                f"{_named(name, type(part).__name__)} is compiled, and context_parallel replaces attention in it; "
                "leave it as it is, or use mirrored"
            )
    given: tuple[Any, Any] = call(lambda *args, **kwargs: (args, kwargs), batch, inputs)
    with unchanged(module), without_compilers():
        use = _tried(module, given, TokenUse(), training=True)
        try:
            evaluated = _tried(module, given, use, training=False)
        except UsageError:
            # Then evaluation runs whole sequences, which the run says.
            return use
    return replace(evaluated, dims=use.dims, evaluated=evaluated.dims)


def _tried(module: nn.Module, given: Any, known: TokenUse, training: bool) -> TokenUse:
    """Returns what forward does with tokens, beside what is known of another mode."""
    trials = _trials(module, given, training)
    wholes = [whole for _, whole in trials]
    counts = tuple(sorted({*_counting(wholes), *known.counts}))
    if both := set(counts) & set(known.others):
        raise UsageError(f"torch.arange at {min(both)} counts tokens in eval mode, and other things in train mode")
    others = tuple(sorted({*known.others, *(place for run in wholes for place, _ in run.counted)} - set(counts)))
    for trial, whole in trials:
        parts = _run_divided(module, trial, TokenUse(counts, others), whole.outputs, training)
        _compare(module, whole, parts, *form_of(trial))
        dims = parts[0].dims
    return TokenUse(counts, others, dims)


def _trials(module: nn.Module, given: Any, training: bool) -> list[tuple[Any, _Run]]:
    """Returns what the model is tried with, and what it does with that as a whole: two lengths, one of them odd."""
    examples, tokens = form_of(given)
    if tokens < 4:
        raise UsageError(f"sequences have {tokens} tokens, and context_parallel divides them; use mirrored")
    taken = {size for each in module.parameters() for size in each.shape} | {examples}
    free = [WORLD * each for each in _LENGTHS if each not in taken and WORLD * each <= tokens]
    lengths = (free[0], free[1] - 1) if len(free) > 1 else (tokens, tokens - 1)
    found = []
    for number, length in enumerate(lengths):
        # The others of the same examples, where there are some.
        trial = _shortened(given, examples, tokens, (tokens - length) * number, length)
        whole = _run_whole(module, trial, length, training)
        if whole.error is not None and length < tokens:
            # A model may be for one length alone.
            trial = given
            whole = _run_whole(module, trial, tokens, training)
        if whole.error is not None:
            mode = "train" if training else "eval"
            raise UsageError(
                f"context_parallel tries the model in {mode} mode before the start, and {whole.where()} fails: "
                f"{in_one_line(whole.error)}"
            ) from whole.error
        found.append((trial, whole))
    return found


def _counting(runs: Sequence[_Run]) -> tuple[str, ...]:
    """Returns where all runs of a whole model count its tokens.

    Raises:
        UsageError: something else is counted there, too.
    """
    where = [{place for place, follows in run.counted if follows} for run in runs]
    every = set.intersection(*where)
    for run in runs:
        if other := next((place for place, follows in run.counted if not follows and place in every), None):
            raise UsageError(
                f"torch.arange at {other} counts tokens, and other things, too, and context_parallel numbers the "
                "tokens that a worker has; give the model positions as an input, or count other things elsewhere"
            )
    return tuple(sorted(every))


def _shortened(given: Any, examples: int, tokens: int, start: int, length: int) -> Any:
    def part(name: str, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or (dim := dim_of(name, leaf, examples, tokens)) is None:
            return leaf
        cut = leaf.narrow(dim, start, length)
        # Of a mask of pairs the columns, too. Vectors may be as long as a sequence, and stay.
        pairs = dim == leaf.dim() - 2 and leaf.shape[-1] == tokens and (dim != 1 or not leaf.is_floating_point())
        return cut.narrow(-1, start, length) if pairs else cut

    return map_leaves(part, given, "the model's input")


def _own(module: nn.Module, training: bool) -> nn.Module:
    """Returns a copy that has the same parameters, and buffers of its own."""
    memo: dict[int, Any] = {id(each): each for each in module.parameters()}
    copied = copy.deepcopy(module, memo)
    if training:
        set_train_modes(copied)
    else:
        copied.eval()
    return copied


def _run_whole(module: nn.Module, given: Any, tokens: int, training: bool) -> _Run:
    places: list[tuple[str, bool]] = []

    def count(where: str, *args: Any, **kwargs: Any) -> Tensor:
        places.append((where, counted(args, kwargs) == tokens))
        return torch_arange(*args, **kwargs)

    with substituted(Substitutes(arange=count)):
        run = _run(_own(module, training), given, lambda output: output)
    run.counted = places
    return run


def _run_divided(module: nn.Module, given: Any, use: TokenUse, whole: Sequence[Tensor], training: bool) -> list[_Run]:
    runs: dict[int, _Run] = {}

    def rank(collective: ThreadCollective) -> Exception | None:
        number = collective.rank
        divided = DividedForward(copies[number], SharedRing(collective), collective, use)
        dims: tuple[int, ...] = ()

        def joined(output: Any) -> Any:
            nonlocal dims
            dims = dims_of(output, whole, divided.place)
            return join(output, divided.place, collective, dims)

        with divided.dividing():
            runs[number] = _run(copies[number], given, joined)
        runs[number].dims = dims
        return runs[number].error

    copies = [_own(module, training) for _ in range(WORLD)]
    run_in_threads(rank)
    return [runs[number] for number in range(WORLD)]


def _run(module: nn.Module, given: Any, joined: Callable[[Any], Any]) -> _Run:
    """Runs a model forward, and in training backward: from a sum with a weight an element."""
    run = _Run()
    args, kwargs = given
    with ExitStack() as stack:
        for name, part in module.named_modules():
            _follow(run, name, part, stack)
        try:
            with torch.set_grad_enabled(module.training), WithoutDropout():
                output = joined(module(*args, **kwargs))
                run.outputs = tensors_of(output)
                if not module.training:
                    return run
                trained = [each for each in module.parameters() if each.requires_grad]
                total = sum(weighed(each) for each in run.outputs if each.requires_grad)
                with silenced(trained):
                    run.gradients = torch.autograd.grad(total, trained, allow_unused=True)  # type: ignore[arg-type]
        except Exception as error:  # whatever a user's forward raises
            run.error = error
        finally:
            run.buffers = dict(module.named_buffers())
    return run


def _follow(run: _Run, name: str, part: nn.Module, stack: ExitStack) -> None:
    def before(*_: Any) -> None:
        run.open.append((name, part))

    def after(_: nn.Module, args: Any, output: Any) -> None:
        run.open.pop()
        tensors = [each.detach().clone() for each in tensors_of(output)]
        run.returns.append(_Return(name, type(part).__name__, tensors))

    for handle in (part.register_forward_pre_hook(before, prepend=True), part.register_forward_hook(after)):
        stack.callback(handle.remove)


def _compare(module: nn.Module, whole: _Run, parts: Sequence[_Run], examples: int, tokens: int) -> None:
    """Raises a UsageError, which names what is to blame, where a divided run is not the whole one."""
    errors = [run for run in parts if run.error is not None and not isinstance(run.error, PeerLost)]
    places = [Zigzag(tokens, rank, WORLD) for rank in range(WORLD)]
    culprit = _first_other(whole, parts, places, examples)
    if errors and isinstance(errors[0].error, HeadraceError):
        raise UsageError(f"{errors[0].where()}: {errors[0].error}") from errors[0].error
    if culprit:
        raise UsageError(
            f"{culprit} does not compute each token alone: on {places[0].local} of {tokens} tokens it returns other "
            "values than on all of them (a convolution or a recurrence over time, a mean over the sequence, statistics "
            "of a batch, places counted from the first token that is there, attention that is not "
            f"torch.nn.functional.scaled_dot_product_attention), which context_parallel cannot divide; {_INSTEAD}"
        )
    if errors:
        raise UsageError(
            f"{errors[0].where()} fails on {places[0].local} of {tokens} tokens, as each worker of context_parallel "
            f"has some: {in_one_line(errors[0].error or ValueError())}; {_INSTEAD}"
        ) from errors[0].error
    for found, right in zip(parts[0].outputs, whole.outputs, strict=True):
        if distance(found, right) > 1.0:
            raise UsageError(
                f"the forward of {type(module).__name__} does not compute each token alone: its output changes where "
                f"sequences are divided, which context_parallel does; {_INSTEAD}"
            )
    named = [name for name, each in module.named_parameters() if each.requires_grad]
    largest = max((largest_element(each) for each in whole.gradients if each is not None), default=0.0)
    for index, (name, gradient) in enumerate(zip(named, whole.gradients, strict=False)):
        every = [run.gradients[index] for run in parts]
        own = [each for each in every if each is not None]
        total = torch.stack(own).sum(0) if own else None
        same = (
            total is gradient
            if total is None or gradient is None
            else (distance(total, gradient, largest * SMALL) <= 1.0)
        )
        if not same:
            raise UsageError(
                f"the gradient of {name!r} changes where sequences are divided, which context_parallel does; {_INSTEAD}"
            )
    for name, buffer in whole.buffers.items():
        if any(distance(run.buffers[name], buffer) > 1.0 for run in parts):
            raise UsageError(
                f"forward writes to the buffer {name!r}, and writes other values where sequences are divided, which "
                f"context_parallel does; {_INSTEAD}"
            )


def _first_other(whole: _Run, parts: Sequence[_Run], places: Sequence[Zigzag], examples: int) -> str:
    """Names the first module that has returned something else; "" where none has."""
    for calls in zip(whole.returns, *(run.returns for run in parts), strict=False):
        right, *found = calls
        if {each.name for each in found} != {right.name}:
            return ""
        for tensors in zip(right.tensors, *(each.tensors for each in found), strict=False):
            joined = _joined(tensors[0], tensors[1:], places, examples)
            if joined is not None and distance(joined, tensors[0]) > 1.0:
                return _named(right.name, right.kind)
    return ""


def _joined(right: Tensor, parts: Sequence[Tensor], places: Sequence[Zigzag], examples: int) -> Tensor | None:
    """Returns what the parts are together, in the form of the whole; None where that is not known."""
    length, local = places[0].length, places[0].local
    if right.dim() and len(right) == examples * length and len(parts[0]) == examples * local:
        # Examples and tokens in one dim.
        folded = [each.unflatten(0, (examples, local)) for each in parts]
        joined = _joined(right.unflatten(0, (examples, length)), folded, places, examples)
        return None if joined is None else joined.flatten(0, 1)
    for dim in range(right.dim()):
        form = list(right.shape)
        if form[dim] == length:
            form[dim] = local
            if all(list(each.shape) == form for each in parts):
                return places[0].join(parts, dim)
    # What has no tokens must be the same everywhere.
    if all(each.shape == right.shape for each in parts):
        return next((each for each in parts if not torch.equal(each, right)), right)
    return None


def _named(name: str, kind: str) -> str:
    return f"{name!r} ({kind})" if name else f"the forward of {kind}"
