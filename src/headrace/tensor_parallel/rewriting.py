"""From a whole model to one of which each device holds a part, in place."""

from __future__ import annotations

import gc
from collections.abc import Mapping

import torch
from torch import nn

from headrace.collectives.base import Collective
from headrace.collectives.threads import ThreadCollective
from headrace.devices import HOST
from headrace.errors import UsageError
from headrace.tensor_parallel.layout import RULES, Layout, Rules, lay_out
from headrace.tensor_parallel.recording import Trial
from headrace.tensor_parallel.replica import RewrittenModel
from headrace.tensor_parallel.rewriter import Rewriter
from headrace.tensor_parallel.rules import any_number
from headrace.tensor_parallel.sequence.chains import Chain, find_chains
from headrace.tensor_parallel.sequence.tokens import INSTEAD
from headrace.tensor_parallel.verification import ALL, Expected, expected, sliced, verified, wrong_with
from headrace.training.deferred.lending import lending
from headrace.training.deferred.parts import keep_parts

__all__ = ["RULES", "split"]

_SHOWN = 4
"""Names of layers in a notice."""


def split(module: nn.Module, rules: Rules, group: Collective, trial: Trial, sequence: bool = False) -> RewrittenModel:
    """Splits a model's layers in place; all ranks call it with the same model.

    `rules` are "auto", or names and patterns of layers with a rule each; the first that fits is taken. The model is run
    on a small batch before and after: what would change its output or a gradient is left whole, and said. `sequence`
    divides what is between split blocks, too.

    Raises:
        UsageError: a rule fits no layer, cannot be followed with so many devices, or changes what the model computes;
            or so does dividing sequences.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    layout, reasons, right = _tried(module, rules, group, trial)
    untried = reasons.get(ALL)
    if untried and not isinstance(rules, str):
        said = [f"rules are followed without having been tried: {untried}"]
    elif reasons and not isinstance(rules, str):
        name, reason = next(iter(reasons.items()))
        raise UsageError(
            f"rules split {name!r}, and then {reason}; give it 'replicate' before the patterns that fit it, or use "
            "rules='auto'"
        )
    else:
        layout, said = layout.only(layout.keys if not untried else ()), _notices(layout.obstacles, reasons)
    chains = _chains(module, layout, group, trial, right) if sequence else ()
    place = next((each.device for each in module.parameters() if not each.is_meta), torch.device(HOST))
    cuts = Rewriter(module, group, layout, chains).cut()
    if parts := sliced(module, cuts, group):
        keep_parts(module, parts)
    kinds = {**layout.kinds, **dict.fromkeys(layout.batches.values(), "batch")}
    if chains:
        divided = dict.fromkeys(any_number(name) for chain in chains for name in chain.layers)
        said = [f"values between blocks are divided along the sequence: {', '.join(divided)}", *said]
    del right
    # What was tried is in cycles, with gradients of the whole model.
    gc.collect()
    return RewrittenModel(module, group, cuts, shapes, kinds, place, tuple(said))


def _chains(
    module: nn.Module, layout: Layout, group: Collective, trial: Trial, right: Expected | str
) -> tuple[Chain, ...]:
    if isinstance(right, str):
        raise UsageError(f"sequence=True is tried before the start, and that cannot be: {right}; {INSTEAD}")
    threads = isinstance(group, ThreadCollective) and group.world > 1
    for turn in range(group.world if threads else 1):
        group.barrier()
        if turn == group.rank or not threads:
            with lending(module):
                chains = find_chains(module, layout, trial)
    group.barrier()
    if reason := wrong_with(module, layout, chains, group, trial, right, seed=not threads):
        raise UsageError(
            f"sequence=True divides values between the blocks of {chains[0].layers[0]!r}, and then {reason}; {INSTEAD}"
        )
    return chains


def _tried(
    module: nn.Module, rules: Rules, group: Collective, trial: Trial
) -> tuple[Layout, dict[str, str], Expected | str]:
    # Threads share generators, and their turns leave these to one at a time.
    threads = isinstance(group, ThreadCollective) and group.world > 1
    layout: Layout | None = None
    right: Expected | str = ""
    for turn in range(group.world if threads else 1):
        group.barrier()
        if turn == group.rank or not threads:
            with lending(module):
                layout = lay_out(module, rules, group.world, trial)
            right = expected(module, trial)
    group.barrier()
    assert layout is not None
    # A double holds both numbers exactly.
    digests = group.gather_numbers([float(layout.digest ^ trial.digest)])
    if digests.count(digests[0]) < group.world:
        reason = "devices have other examples, or see it do other things"
        return layout, {ALL: reason}, reason
    return *verified(module, layout, group, trial, right, seed=not threads), right


def _notices(obstacles: Mapping[str, str], reasons: Mapping[str, str]) -> list[str]:
    """Says what is left whole, one line a reason; layers that repeat are one."""
    lines: dict[str, list[str]] = {}
    for name, reason in obstacles.items():
        lines.setdefault(any_number(f"it {reason}"), []).append(any_number(name) or "the model")
    for name, reason in reasons.items():
        lines.setdefault(reason if name == ALL else f"split, {reason}", []).append(name)
    found = []
    for reason, names in lines.items():
        shown = list(dict.fromkeys(names))
        more = " ..." * (len(shown) > _SHOWN)
        found.append(f"left whole on every device: {', '.join(shown[:_SHOWN])}{more}: {reason}")
    return found
