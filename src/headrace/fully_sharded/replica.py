"""What a worker of fully sharded training runs: compute, in step with the others, and the update of its part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headrace.batches import call, select_target
from headrace.collectives.base import Collective
from headrace.errors import UsageError
from headrace.fully_sharded.units import refuse_hooks
from headrace.metrics import Mean, weigh
from headrace.modules import frozen_until, restore
from headrace.policies.roles import bounds
from headrace.spec.job import Share
from headrace.spec.options import Options, require_plain_forward
from headrace.training.clipping import GradientClipper, LossScale, StepDecision
from headrace.training.compute import Compute, Computed
from headrace.training.exchange import UpdatingExchange
from headrace.training.gradients import UsedParameters
from headrace.training.on_device.totals import Total, all_weight, mean_of, over, own_weight
from headrace.training.optimizer import StatePiece
from headrace.training.update import Updater
from headrace.training.user_code.differentiable import require_graph
from headrace.training.user_code.objective import Objective
from headrace.training.user_code.trained import FixedParameters, ReadGradients
from headrace.training.whole_model import HALF, cut
from headrace.trees import widened

_PARTS = {
    "No backend type": (
        "a parameter and its .grad are divided among the workers under fully_sharded, so that no norm or sum of them "
        "can be taken in a loop; use Options(clip_norm=...), or mirrored or central_storage, which have whole ones"
    ),
    "for storage of size 0": (
        "fully_sharded releases a unit's parameters after its backward, and a derivative of a derivative "
        "(torch.autograd.grad(..., create_graph=True), a penalty on gradients, forces) needs them again; use mirrored "
        "or central_storage, whose workers have whole ones"
    ),
    "FSDP does not support deepcopy": (
        "a model that is divided among the workers cannot be copied under fully_sharded (deepcopy, AveragedModel); use "
        "Options(ema_decay=...) for an average, build a second model by the job's function, or use mirrored or "
        "central_storage"
    ),
}
"""What errors of torch mean, by words of them."""


class DividedModule(Protocol):
    """A module that ranks have divided and compute together: see `ShardedModule`, whose members these are."""

    module: nn.Module
    device: torch.device
    half: torch.dtype | None
    pieces: dict[str, nn.Parameter]
    whole: frozenset[str]
    seen: set[str]

    def begin(self) -> None: ...
    def hooked(self) -> list[str]: ...
    def silent(self) -> AbstractContextManager[None]: ...
    def divide(self, weight: float | Tensor) -> None: ...
    def sum_gradients(self, missing: Callable[[str], bool], mates: Collective | None) -> list[tuple[str, Tensor]]: ...
    def reshard(self) -> None: ...
    def whole_tensors(self, leads: bool) -> Iterator[tuple[str, Tensor]]: ...
    def held_bytes(self) -> int: ...


class ShardedModel(Compute):
    """Computes a worker's share with units that all workers gather and release together.

    So all run forward and backward as often as the one with the most micro-batches. One that has nothing left runs them
    on a sample, and its gradients count as zeros.

    Args:
        used: takes of which parameters this worker has gradients.
        sample: returns a batch of a few examples.
        total: sums the weights of losses over workers.
        communicates: whether layers exchange statistics of their examples; then an empty share has none, and no sample.
        scale: of the loss; None for none.
    """

    divided = True

    def __init__(
        self,
        sharded: DividedModule,
        objective: Objective,
        options: Options,
        used: UsedParameters,
        sample: Callable[[], Any],
        total: Total,
        communicates: bool,
        scale: LossScale | None,
    ) -> None:
        self.module = sharded.module
        self.device = sharded.device
        self._sharded = sharded
        self._objective = objective
        self._options = options
        # Without autocast where units are of that type themselves.
        self._half = None if sharded.half else HALF.get(options.precision)
        self._used = used
        self._load_sample = sample
        self._total = total
        self._communicates = communicates
        self._scale = scale
        self._until = frozen_until(sharded.module)
        self._mark = torch.zeros(())
        named = dict(sharded.module.named_parameters())
        self._flags = FixedParameters(named, "the gradients of a unit are summed as one")
        trained = {name: each for name, each in named.items() if each.requires_grad}
        self._gradients = ReadGradients(trained, "a worker has a part of each parameter")

    def run(self, share: Share) -> Computed:
        self._begin()
        largest = -(-share.of // self._used.shares)
        turns = max(1, min(self._options.accumulate, largest))
        pieces = min(turns, share.examples)
        held = self.place(share.batch)
        for _ in range(turns - pieces):
            self._take_part(held)
        losses = []
        for start, stop in bounds(share.examples, (1,) * pieces) if pieces else ():
            # What is not cut may hold what cannot be.
            batch = held if pieces == 1 else cut(held, start, stop, share.examples)
            losses.append((self._differentiate(self._loss(batch), stop - start, share), stop - start))
        return self._finish(losses, share.epoch)

    def backward(self, loss: Tensor | Mean, share: Share, adds: bool = False) -> Computed:
        require_plain_forward(self._options)
        if adds:
            self._gradients.require_unchanged()
        else:
            self._begin()
        part, computed = self._part(loss, share)
        if share.examples == 0:
            with self._sharded.silent():
                part.backward(torch.zeros_like(part))
            return Computed(None, 0.0)
        self._scaled(require_graph(part)).backward()
        self._gradients.look()
        return computed

    def _part(self, loss: Tensor | Mean, share: Share) -> tuple[Tensor, Computed]:
        """Returns this share's part of the global mean, and what is known of its loss."""
        if not isinstance(loss, Mean):
            return loss * (share.examples / share.of), Computed(loss.detach(), float(share.examples))
        own = own_weight(self._total, [loss.weight])
        return over(loss.total, all_weight(self._total, own)), Computed(mean_of([loss.total.detach()], own), own)

    def send(self, share: Share) -> None:
        self._gradients.require_unchanged()
        self._tell_seen(share.epoch)

    def _begin(self) -> None:
        self._flags.require()
        refuse_hooks(self._sharded.hooked())
        self._sharded.begin()
        self._gradients.forget()

    @torch.no_grad()
    def predict(self, batch: Any) -> Any:
        with self._autocast():
            output = call(self.module, self.place(batch), self._objective.inputs)
        # The rest of the model stays for a backward, and none follows.
        self._sharded.reshard()
        return widened(output, self._half)

    def attend(self) -> None:
        with self._sharded.silent():
            self.predict(self._sample)

    def explained(self, error: Exception) -> UsageError | None:
        cause = next((cause for words, cause in _PARTS.items() if words in str(error)), None)
        return UsageError(f"{cause} ({type(error).__name__}: {error!s:.100})") if cause else super().explained(error)

    def equal_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, self._sharded.pieces[name]) for name in self._sharded.pieces if name in self._sharded.whole)

    def whole_tensors(self, leads: bool) -> Iterator[tuple[str, Tensor]]:
        return self._sharded.whole_tensors(leads)

    @cached_property
    def _sample(self) -> Any:
        return self.place(self._load_sample())

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._half is None else torch.autocast(self.device.type, self._half)

    def _loss(self, batch: Any) -> Tensor | Mean:
        with self._autocast():
            output = call(self.module, batch, self._objective.inputs)
            loss: Tensor | Mean = self._objective.loss(output, select_target(batch, self._objective.target))
        return loss

    def _differentiate(self, loss: Tensor | Mean, examples: int, share: Share) -> Tensor | Mean:
        """Adds the gradients of a part of the global mean; returns the loss without its graph.

        Those of a `Mean` are divided by the weight of all, which is known when all have been weighed.
        """
        if isinstance(loss, Mean):
            self._scaled(require_graph(loss.total)).backward()
            return Mean(loss.total.detach(), loss.weight)
        require_graph(loss)
        self._scaled(loss if examples == share.of else loss * (examples / share.of)).backward()
        return loss.detach()

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self._scale is None else loss * self._scale.value

    def _take_part(self, batch: Any) -> None:
        if self._communicates:
            with self._sharded.silent():
                _without_effect(self._loss(batch))
            return
        kept = [(buffer, buffer.detach().clone()) for buffer in self.module.buffers()]
        with self._sharded.silent():
            _without_effect(self._loss(self._sample))
        with torch.no_grad():
            for buffer, value in kept:
                restore(buffer, value)

    def _finish(self, losses: Sequence[tuple[Tensor | Mean, int]], epoch: int) -> Computed:
        weighed = [weigh(loss, examples) for loss, examples in losses]
        if not (self._objective.weighed or any(isinstance(loss, Mean) for loss, _ in losses)):
            self._tell_seen(epoch)
            own = float(sum(examples for _, examples in losses))
            one = losses[0][0] if len(losses) == 1 else None
            return Computed(
                one if isinstance(one, Tensor) and own else mean_of([each for each, _ in weighed], own), own
            )
        weight = own_weight(self._total, [each for _, each in weighed])
        self._sharded.divide(all_weight(self._total, weight))
        self._tell_seen(epoch)
        return Computed(mean_of([total for total, _ in weighed], weight), weight)

    def _tell_seen(self, epoch: int) -> None:
        # The gradients of a unit are summed as one, also of what is frozen in this epoch, whose sum is left out.
        seen = {name for name in self._sharded.seen if self._until.get(name, 0) <= epoch}
        self._used.publish([self._mark if name in seen else None for name in self._sharded.pieces])


class ShardedExchange(UpdatingExchange):
    """Updates this worker's part of every parameter, of whose gradients backward has left the sum.

    Where several replicas are sharded, it is the sum over one replica, and `mates` are the ranks that hold this part.
    `measured` are the names of the parameters that no other rank measures.
    """

    def __init__(
        self,
        sharded: DividedModule,
        updater: Updater,
        clipper: GradientClipper,
        used: UsedParameters,
        measured: frozenset[str],
        mates: Collective | None,
    ) -> None:
        self.updater = updater
        self.parameter_bytes = sharded.held_bytes()
        self._sharded = sharded
        self._clipper = clipper
        self.defers = clipper.defers
        self._used = used
        self._mates = mates
        self._names = list(sharded.pieces)
        self._measured = measured

    def synchronize(self, finite: bool | Tensor = True) -> StepDecision:
        missing = {self._names[index] for index in self._used.settle()}
        sums = self._sharded.sum_gradients(missing.__contains__, self._mates)
        measured = [gradient for name, gradient in sums if name in self._measured]
        return self._clipper.clip(measured, [gradient for _, gradient in sums], finite)

    def update(self, round_: int) -> None:
        self._sharded.reshard()
        super().update(round_)

    def swap_weights(self, averaged: bool) -> None:
        self._sharded.reshard()
        super().swap_weights(averaged)

    def load(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None) -> None:
        self._sharded.reshard()
        super().load(pieces, settings)


def _without_effect(loss: Tensor | Mean) -> None:
    """Runs backward with gradients of 0, which others may get, too."""
    total = loss.total if isinstance(loss, Mean) else loss
    total.backward(torch.zeros_like(total))
