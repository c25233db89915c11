"""Whether a split model computes what the whole one does: both run on one small batch, forward and backward.

Any kind of layer may be in a model, and what is known of it is what it did on one batch; so what was chosen is tried
before it is kept, and what changes the output or a gradient is left whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from headrace.collectives.base import Collective
from headrace.errors import PeerLost, in_one_line
from headrace.hooks import silenced
from headrace.tensor_parallel.layout import Layout
from headrace.tensor_parallel.recording import Trial, tried
from headrace.tensor_parallel.replica import ShardDim
from headrace.tensor_parallel.rewriter import Rewriter
from headrace.tensor_parallel.sequence.chains import Chain
from headrace.training.deferred.lending import lending, lent
from headrace.training.deferred.parts import Parts, parts_of
from headrace.training.user_code.divided import SMALL, distance, weighed
from headrace.training.user_code.sketches import Sketch, gradients_of
from headrace.trees import tensors_of

ALL = "the model"
"""What a reason is for that is one for every layer."""


class Abandoned(Exception):
    """Another rank has failed."""


class GuardedCollective(Collective):
    """A collective whose ranks end together: one that fails tells the others when they next communicate."""

    def __init__(self, inner: Collective) -> None:
        self.rank, self.world = inner.rank, inner.world
        self._inner = inner

    def attempt(self, act: Callable[[], str]) -> str:
        """Returns what is wrong, on every rank: what `act` returns or raises on this one, or that another failed."""
        try:
            wrong = act()
        except PeerLost:
            raise
        except Abandoned:
            return "it fails on another device"
        except Exception as error:  # whatever a user's forward raises
            wrong = f"it fails: {in_one_line(error)}"
        failed, ended = self._inner.sum([float(bool(wrong)), 1.0])
        if ended != self.world:
            return wrong or "devices communicate differently often"
        return wrong or ("it fails on another device" if failed else "")

    def barrier(self) -> None:
        self._ask()
        self._inner.barrier()

    def all_reduce(self, tensor: Tensor) -> None:
        self._ask()
        self._inner.all_reduce(tensor)

    def broadcast(self, tensor: Tensor) -> None:
        self._ask()
        self._inner.broadcast(tensor)

    def gather(self, tensor: Tensor) -> Tensor:
        self._ask()
        return self._inner.gather(tensor)

    def all_to_all(self, pieces: Tensor) -> Tensor:
        self._ask()
        return self._inner.all_to_all(pieces)

    def sum(self, values: Sequence[float]) -> list[float]:
        self._ask()
        return self._inner.sum(values)

    def close(self) -> None:
        """Closes nothing: the collective is another's."""

    def _ask(self) -> None:
        failed, ended = self._inner.sum([0.0, 0.0])
        if failed or ended:
            raise Abandoned


@dataclass(frozen=True)
class Expected:
    """What a model computes on a small batch: outputs, and gradients by parameter; None if it has no gradients."""

    outputs: tuple[Tensor, ...]
    gradients: Mapping[str, Sketch | None] | None

    def difference(self, found: Expected, cuts: Mapping[str, ShardDim], rank: int, world: int) -> str:
        """Says how what the split model computes differs, "" if it does not."""
        if [each.shape for each in self.outputs] != [each.shape for each in found.outputs]:
            return "its output gets another shape"
        off = max(map(distance, found.outputs, self.outputs), default=0.0)
        if off > 1.0:
            return f"its output changes, by {off:.1e} of what is allowed"
        if self.gradients is None or found.gradients is None:
            return ""
        every = [part for each in self.gradients.values() for part in each or ()]
        largest = max((float(each.abs().max()) for each in every), default=0.0)
        for name, gradient in self.gradients.items():
            own = found.gradients[name]
            if gradient is None or own is None:
                if (gradient is None) != (own is None):
                    return f"{name!r} gets a gradient, or gets none any more"
                continue
            for part, mine in _pairs(gradient, own, cuts.get(name), rank, world):
                if part.shape != mine.shape or distance(mine, part, largest * SMALL) > 1.0:
                    return f"the gradient of {name!r} changes"
        return ""


def _pairs(
    right: Sketch, found: Sketch, cut: ShardDim | None, rank: int, world: int
) -> Iterable[tuple[Tensor, Tensor]]:
    """Returns what must be the same of a gradient and that of a rank's part of the parameter."""
    if cut is None:
        return zip(right, found, strict=True)
    if len(right) == 1:
        return [(cut.take(right[0], rank, world), found[0])]
    # Along other dims, the part's vectors are sums over less.
    return [(replace(cut, dim=0).take(right[cut.dim], rank, world), found[cut.dim])]


def compute(module: nn.Module, trial: Trial, gradients: bool = True) -> Expected:
    """Runs a model in evaluation, forward and backward; the gradients are those of a sum with a weight an element."""
    module.eval()
    with torch.set_grad_enabled(gradients):
        outputs = [each for each in tensors_of(trial.run(module)) if each.is_floating_point() or each.is_complex()]
    if not gradients:
        return Expected(tuple(outputs), None)
    named = {name: each for name, each in module.named_parameters() if each.requires_grad}
    total = sum(weighed(each) for each in outputs if each.requires_grad)
    # A hook may count its calls; the layers that have some stay whole.
    with silenced(list(named.values())):
        found = gradients_of(total, named, lent(module)) if isinstance(total, Tensor) else None
    return Expected(tuple(each.detach() for each in outputs), found)


def expected(module: nn.Module, trial: Trial) -> Expected | str:
    """Returns what the whole model computes, or why that is not known."""
    wrong = ""
    for gradients in (True, False):
        try:
            with lending(module), tried(module, seed=True):
                first = compute(module, trial, gradients)
            with lending(module), tried(module, seed=True):
                again = compute(module, trial, gradients)
        except Exception as error:  # whatever a user's forward raises
            wrong = f"it cannot be run in evaluation: {in_one_line(error)}"
            continue
        return first if not first.difference(again, {}, 0, 1) else "it computes something else each time"
    return wrong


def wrong_with(
    module: nn.Module,
    layout: Layout,
    chains: Sequence[Chain],
    group: Collective,
    trial: Trial,
    right: Expected,
    seed: bool,
) -> str:
    """Says what is wrong with a layout, on all ranks alike; "" where it computes what the whole model does."""
    guard = GuardedCollective(group)

    def attempt() -> str:
        with tried(module, seed):
            cuts = Rewriter(module, guard, layout, chains).cut()
            with lending(module, sliced(module, cuts, guard)):
                found = compute(module, trial, right.gradients is not None)
            return right.difference(found, cuts, group.rank, group.world)

    return guard.attempt(attempt)


def sliced(module: nn.Module, cuts: Mapping[str, ShardDim], group: Collective) -> Parts | None:
    """Returns what the parameters are of a rank's part of a model that is made in parts; None for another."""
    parts = parts_of(module)
    takes = {name: partial(cut.take, rank=group.rank, world=group.world) for name, cut in cuts.items()}
    return parts.sliced(takes) if parts else None


def verified(
    module: nn.Module, layout: Layout, group: Collective, trial: Trial, right: Expected | str, seed: bool
) -> tuple[Layout, dict[str, str]]:
    """Returns what of a layout can be split so that nothing changes, and why the rest cannot be, by group of layers.

    All ranks call it, and decide alike. `right` is what the whole model computes. A reason for `ALL` is one why the
    layout, then returned as it was given, cannot be tried.
    """
    if not layout.kinds and not layout.batches:
        return layout, {}
    unknown = isinstance(right, str)
    (others,) = group.sum([float(unknown)])
    if isinstance(right, str) or others:
        reason = right if isinstance(right, str) else "it fails on another device"
        return layout, {ALL: reason}
    sure: Expected = right

    def wrong(candidate: Layout) -> str:
        return wrong_with(module, candidate, (), group, trial, sure, seed)

    reasons: dict[str, str] = {}

    def right_ones(keys: tuple[str, ...]) -> tuple[str, ...]:
        reason = wrong(layout.only(keys))
        if not reason:
            return keys
        if len(keys) == 1:
            reasons[keys[0]] = reason
            return ()
        middle = len(keys) // 2
        return (*right_ones(keys[:middle]), *right_ones(keys[middle:]))

    if layout.batches and (reason := wrong(layout.only(()))):
        return layout, {", ".join(layout.batches.values()): reason}
    kept = right_ones(layout.keys) if layout.keys else ()
    if reasons and kept and (reason := wrong(layout.only(kept))):
        return layout.only(()), {**reasons, **dict.fromkeys(kept, reason)}
    return layout.only(kept), reasons
