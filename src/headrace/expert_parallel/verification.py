"""Whether a model computes the same where its experts are divided, tried before the start.

It is run on a few examples, whole, and as two workers have it, in threads, each with some of the examples: outputs and
gradients of both are compared. It is tried once more with a router that sends all tokens to the same experts, so that
what leaves out the tokens that are too many (a capacity) does so.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headrace.batches import call
from headrace.collectives.threads import ThreadCollective
from headrace.errors import HeadraceError, PeerLost, UsageError, in_one_line
from headrace.expert_parallel.balance import cuts_router_loss
from headrace.expert_parallel.divided import DividedExperts
from headrace.expert_parallel.finding import ExpertSet, bounds_of, find_experts
from headrace.expert_parallel.rows import RowLink
from headrace.modules import set_train_modes
from headrace.training.deferred.lending import lending, lending_here, lent
from headrace.training.user_code.divided import SMALL, TOLERANCE, WORLD, distance, run_in_threads, weighed
from headrace.training.user_code.sketches import along
from headrace.training.user_code.trial import WithoutDropout, largest_element, unchanged, without_compilers
from headrace.training.whole_model import cut
from headrace.trees import tensors_of

_INSTEAD = "use mirrored, or fully_sharded"


@dataclass
class _Run:
    """A run of a model: what the modules that call experts have returned, what it has, and its gradients by name."""

    blocks: list[tuple[str, Sequence[Tensor]]] = field(default_factory=list)
    outputs: Sequence[Tensor] = ()
    gradients: dict[str, Tensor] = field(default_factory=dict)
    error: Exception | None = None
    balances: bool = False


def verify(module: nn.Module, patterns: str | Sequence[str], batch: Any, inputs: Any, accumulate: int) -> None:
    """Tries whether the experts of a model can be divided; the module stays as it is.

    Raises:
        UsageError: they cannot; it names the module that computes something else, or what it does.
    """
    examples = next((len(each) for each in tensors_of(batch) if each.dim()), 0)
    if examples < WORLD:
        return
    with lending(module), unchanged(module), without_compilers():
        for skewed in (False, True):
            copied = _copy(module, patterns, skewed)
            whole = _run(copied, batch, inputs, find_experts(copied, patterns), lent(module))
            if whole.error is not None:
                alike = ", with a router that sends all tokens to the same experts," if skewed else ""
                raise UsageError(
                    f"expert_parallel tries the model before the start{alike} and it fails: "
                    f"{in_one_line(whole.error)}; {_INSTEAD}"
                ) from whole.error
            parts = _run_divided(module, patterns, skewed, (batch, inputs, examples), whole)
            if accumulate > 1 and any(part.balances for part in parts):
                raise cuts_router_loss()
            _compare(module, whole, parts, skewed)


def _copy(module: nn.Module, patterns: str | Sequence[str], skewed: bool) -> nn.Module:
    """Returns a copy over the same memory; where it is `skewed`, the parameters beside the experts are 0."""
    memo: dict[int, Any] = {id(each): nn.Parameter(each.detach(), each.requires_grad) for each in module.parameters()}
    copied = copy.deepcopy(module, memo)
    set_train_modes(copied)
    for found in find_experts(copied, patterns) if skewed else ():
        inside = {id(each) for each in found.module.parameters()}
        for each in copied.get_submodule(_block_of(found)).parameters():
            if id(each) not in inside:
                each.data = torch.zeros_like(each)
    return copied


def _block_of(found: ExpertSet) -> str:
    """Names the module that has the router."""
    return found.name.rpartition(".")[0] if found.stacked or found.caller == found.name else found.caller


def _run(
    module: nn.Module,
    batch: Any,
    inputs: Any,
    found: Sequence[ExpertSet],
    large: Collection[str],
    whole: _Run | None = None,
    rank: int = 0,
) -> _Run:
    """Runs a model forward, and backward from a sum with a weight an element; a part's are those it has in `whole`.

    Of gradients that are `large` a number for each row is kept.
    """
    run = _Run()
    with ExitStack() as stack:
        for name in dict.fromkeys(map(_block_of, found)):
            note = partial(_note, run, name)
            stack.callback(module.get_submodule(name).register_forward_hook(note).remove)
        for name, parameter in module.named_parameters():
            if name in large and parameter.requires_grad and not parameter.is_meta:
                keep = partial(_keep_rows, run, name)
                stack.callback(parameter.register_post_accumulate_grad_hook(keep).remove)
        try:
            with WithoutDropout():
                run.outputs = tensors_of(call(module, batch, inputs))
                total = torch.zeros((), requires_grad=True)
                for place, output in enumerate(run.outputs):
                    if output.requires_grad and output.dim():
                        rows = len(whole.outputs[place]) if whole else len(output)
                        total = total + weighed(output, rows - len(output) if rank else 0)
                total.backward()
            run.gradients |= {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
        except Exception as error:  # whatever a user's forward raises
            run.error = error
    return run


def _note(run: _Run, name: str, module: nn.Module, args: Any, output: Any) -> None:
    run.blocks.append((name, [each.detach().clone() for each in tensors_of(output)]))


def _keep_rows(run: _Run, name: str, parameter: Tensor) -> None:
    assert parameter.grad is not None
    run.gradients[name] = along(parameter.grad)[0]
    parameter.grad = None


def _run_divided(
    module: nn.Module, patterns: str | Sequence[str], skewed: bool, given: tuple[Any, Any, int], whole: _Run
) -> list[_Run]:
    runs = dict[int, _Run]()
    batch, inputs, examples = given

    def rank(collective: ThreadCollective) -> Exception | None:
        number = collective.rank
        found = find_experts(copies[number], patterns)
        link = RowLink(collective, collective)
        divided = DividedExperts(copies[number], found, link, link, copies=False)
        start, stop = bounds_of(examples, WORLD)[number]
        part = cut(batch, start, stop, examples)
        with lending_here(module):
            runs[number] = _run(copies[number], part, inputs, found, lent(module), whole, number)
        runs[number].balances = divided.balance.used
        return runs[number].error

    copies = [_copy(module, patterns, skewed) for _ in range(WORLD)]
    run_in_threads(rank)
    return [runs[number] for number in range(WORLD)]


def _compare(module: nn.Module, whole: _Run, parts: Sequence[_Run], skewed: bool) -> None:
    """Raises a UsageError, which names what is to blame, where the parts are not the whole run."""
    when = " where all tokens go to the same experts" if skewed else ""
    for each in parts:
        if each.error is not None and not isinstance(each.error, PeerLost):
            if isinstance(each.error, HeadraceError):
                raise each.error
            raise UsageError(
                f"{type(module).__name__} fails where its experts are divided{when}: {in_one_line(each.error)}; "
                f"{_INSTEAD}"
            ) from each.error
    for (name, right), *found in zip(whole.blocks, *(each.blocks for each in parts), strict=False):
        for place, tensor in enumerate(right):
            if not _same(tensor, [each[1][place] for each in found]):
                raise UsageError(
                    f"{name!r} ({type(module.get_submodule(name)).__name__}) computes other values for the same tokens"
                    f"{when} when each of {WORLD} workers has a part of the batch, as under expert_parallel: what it "
                    "makes of a token must not depend on the others (a capacity of experts, a choice of tokens by "
                    f"experts); {_INSTEAD}"
                )
    for place, tensor in enumerate(whole.outputs):
        if tensor.dim() and not _same(tensor, [each.outputs[place] for each in parts]):
            raise UsageError(
                f"the output of {type(module).__name__} changes{when} when each of {WORLD} workers has a part of the "
                f"batch, as under expert_parallel; {_INSTEAD}"
            )
    _compare_gradients(module, whole, parts)


def _compare_gradients(module: nn.Module, whole: _Run, parts: Sequence[_Run]) -> None:
    largest = max(map(largest_element, whole.gradients.values()), default=0.0)
    for name, gradient in whole.gradients.items():
        own = [each.gradients.get(name) for each in parts]
        if any(each is not None and each.shape != gradient.shape for each in own):
            # A rank whose experts have no tokens may have none.
            rows = [
                gradient.new_zeros(stop - start, *gradient.shape[1:]) for start, stop in bounds_of(len(gradient), WORLD)
            ]
            total = torch.cat([zero if each is None else each for each, zero in zip(own, rows, strict=True)])
        else:
            total = sum((each for each in own if each is not None), torch.zeros_like(gradient))
        if not _close(gradient, total, largest * SMALL):
            raise UsageError(
                f"the gradient of {name!r} of {type(module).__name__} changes where experts are divided, as under "
                f"expert_parallel; {_INSTEAD}"
            )


def _same(right: Tensor, parts: Sequence[Tensor]) -> bool:
    """Tells whether rows of parts are those of the whole; what has other rows is not compared."""
    if not right.dim() or sum(len(each) for each in parts) != len(right):
        return True
    return _close(right, torch.cat(list(parts)))


def _close(right: Tensor, found: Tensor, least: float = 0.0) -> bool:
    # Other types are so coarse that a token may get other experts: then numbers say nothing.
    return (right.is_floating_point() and right.dtype not in TOLERANCE) or distance(found, right, least) <= 1.0
