"""Compute with the whole model on one device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from headrace import internals
from headrace.batches import call
from headrace.collectives.base import Collective, ProcessGroup
from headrace.errors import DataError, UsageError
from headrace.hooks import called, silenced
from headrace.metrics import Mean, weigh
from headrace.modules import is_dense
from headrace.policies.roles import bounds
from headrace.spec.job import Share
from headrace.spec.model import ModelSpec
from headrace.spec.options import Options, require_plain_forward
from headrace.training.clipping import LossScale
from headrace.training.compute import Compute, Computed
from headrace.training.embeddings.layer import sparse_layers
from headrace.training.gradients import (
    DirectGradients,
    EarlySink,
    GradientPlaces,
    GradientSink,
    assign,
    divide,
    times,
)
from headrace.training.on_device.totals import Total, all_weight, mean_of, over, own_weight
from headrace.training.optimizer import StateSlices
from headrace.training.user_code.differentiable import has_reentrant_checkpoint, require_graph
from headrace.training.user_code.objective import Objective
from headrace.training.user_code.trained import TrainedParameters
from headrace.trees import map_leaves, map_tensors, widened

if TYPE_CHECKING:
    from headrace.training.fixed_shapes.graph_mode import GraphMode

HALF: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
Connects = Callable[[], Collective | None]
"""Connects devices at its first call; returns what carries their tensors."""

_PLAIN = Options()
# In every step of every model, which is why these are no calls of `internals`.
_gradient_hooks = attrgetter(internals.gradient_hooks.name)
_accumulation_hooks = attrgetter(internals.accumulation_hooks.name)


class WholeModel(Compute):
    """Runs forward and backward on a worker's share, or on its micro-batches one after the other.

    Gradients come from `torch.autograd.grad` in one call and go to `sink` as they are, those of micro-batches when
    they have added up in `.grad`; so do those of a model with reentrant checkpoints, which the first loss tells.
    Without a sink they stay in `.grad`. What is frozen in a share's epoch (`frozen(..., until_epoch=)`) has none.

    Args:
        total: sums numbers over workers.
        always: run forward also on an empty share (its layers communicate with the other workers).
        scale: of the loss, None for none.
        graph: the module in graph mode, None to run it as it is.
    """

    def __init__(
        self,
        module: nn.Module,
        objective: Objective,
        sink: GradientSink | None = None,
        total: Total = list,
        always: bool = False,
        options: Options = _PLAIN,
        scale: LossScale | None = None,
        graph: GraphMode | None = None,
    ) -> None:
        self.module = objective.model or module
        self._objective = objective
        self._sink = sink
        self._total = total
        self._always = always
        self._options = options
        self._scale = scale
        self._half = HALF.get(options.precision)
        self._graph = graph
        self._reentrant: bool | None = None
        self._trained = TrainedParameters(module)
        self._sparse = tuple(sparse_layers(module))
        self._direct: DirectGradients | None = None
        # Compiled kernels make the gradients of all layers themselves.
        self._early = sink if isinstance(sink, EarlySink) and sink.early else None
        if isinstance(sink, GradientPlaces) and graph is None:
            self._direct = DirectGradients(module, self._trained.every, sink)
        self.device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))

    def run(self, share: Share) -> Computed:
        if share.examples == 0 and not self._always:
            if self._objective.weighed:
                self._total([0.0])
            return self._leave_nothing()
        with self._graph.errors() if self._graph else nullcontext():
            batch = self.place(share.batch)
            pieces = min(self._options.accumulate, share.examples)
            if pieces > 1:
                return self._accumulate(batch, share, pieces)
            with self._direct.installed() if self._direct else nullcontext():
                return self._contribute(self._loss(batch, share), share)

    def backward(self, loss: Tensor | Mean, share: Share, adds: bool = False) -> Computed:
        """See `Compute`.

        Raises:
            UsageError: the options say how forward is run.
        """
        if self._graph is not None and self._graph.pads:
            return super().backward(loss, share, adds)
        require_plain_forward(self._options)
        if not adds:
            assign(self._trained.every, [None] * len(self._trained.every))
        part, computed = self._part(loss, share)
        if not share.examples:
            self._take_part(part, share)
            # As of other shares, there is one to read.
            assign(self._trained.every, [torch.zeros_like(each) for each in self._trained.every])
            return Computed(None, 0.0)
        require_graph(part)
        if share.examples == share.of:
            self._add(part, share.epoch)
            return computed
        # Of the part, as in a step, since hooks of modules may look at sizes.
        before = [parameter.grad for parameter in self._trained.every]
        assign(self._trained.every, [None] * len(before))
        with silenced(self._trained.every):
            self._add(part, share.epoch)
        called(self._trained.every, share.examples / share.of, before)
        return computed

    def send(self, share: Share) -> None:
        if share.examples == 0:
            assign(self._trained.every, [None] * len(self._trained.every))
            self._leave_nothing()
            return
        gradients = [each.grad for each in self._trained.every]
        if share.examples != share.of:
            gradients = times(gradients, share.examples / share.of)
        if self._sink is not None:
            self._sink.store(gradients)
            gradients = [None] * len(gradients)
        assign(self._trained.every, gradients)

    @torch.no_grad()
    def predict(self, batch: Any) -> Any:
        inputs, placed = self._objective.inputs, self.place(batch)
        predict = self._graph.predict if self._graph else call
        with self._autocast():
            output = predict(self.module, placed, inputs)
        return widened(output, self._half)

    def place(self, batch: Any) -> Any:
        return batch if self._graph is not None and self._graph.pads else super().place(batch)

    def _loss(self, batch: Any, share: Share) -> Tensor | Mean:
        with self._autocast():
            if self._graph:
                return self._graph.loss(self._objective, batch, share)
            return self._objective.of(self.module, batch)

    def _autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._half is None else torch.autocast(self.device.type, self._half)

    def _contribute(self, loss: Tensor | Mean, share: Share) -> Computed:
        """Differentiates this share's part of the global mean, from `loss`, the mean over the share."""
        part, computed = self._part(loss, share)
        if share.examples == 0:
            self._take_part(part, share)
            return self._leave_nothing()
        require_graph(part)
        if self._sink is None:
            self._add(self._scaled(part), share.epoch)
        else:
            self._sink.store(self._gradients(self._scaled(part), share))
        return computed

    def _part(self, loss: Tensor | Mean, share: Share) -> tuple[Tensor, Computed]:
        """Returns this share's part of the global mean, and what is known of its loss."""
        if not isinstance(loss, Mean):
            part = loss if share.examples == share.of else loss * (share.examples / share.of)
            return part, Computed(loss.detach(), float(share.examples))
        own = own_weight(self._total, [loss.weight])
        return over(loss.total, all_weight(self._total, own)), Computed(mean_of([loss.total.detach()], own), own)

    def _take_part(self, loss: Tensor, share: Share) -> None:
        """Does what other workers do, whose layers exchange something in backward, too; this share is empty."""
        if self._always:
            torch.autograd.grad(loss, self._trained.in_epoch(share.epoch), allow_unused=True)

    def _gradients(self, loss: Tensor, share: Share) -> Sequence[Tensor | None]:
        hooked = self._is_hooked()
        apart = hooked and share.examples != share.of
        if self._is_plain(loss) and not apart and not any(map(_accumulation_hooks, self._trained.every)):
            leaves, live = self._leaves(), self._trained.in_epoch(share.epoch)
            if self._early and live and not hooked:
                return self._send_early(self._early, loss, [*live, *leaves])
            with self._direct.writing() if self._direct else nullcontext():
                found = torch.autograd.grad(loss, [*live, *leaves], allow_unused=True)
            assign(leaves, found[len(live) :])
            return self._trained.all_of(live, found[: len(live)])
        held = [parameter.grad for parameter in self._trained.every]
        assign(self._trained.every, [None] * len(held))
        with silenced(self._trained.every) if apart else nullcontext():
            self._add(loss, share.epoch)
        if apart:
            called(self._trained.every, share.examples / share.of)
        gradients = [parameter.grad for parameter in self._trained.every]
        assign(self._trained.every, held)
        return gradients

    def _send_early(self, sink: EarlySink, loss: Tensor, inputs: Sequence[Tensor]) -> list[Tensor | None]:
        every = self._trained.every
        held = [parameter.grad for parameter in every]
        assign(every, [None] * len(held))
        with sink.sending():
            loss.backward(inputs=inputs)
        gradients = [parameter.grad for parameter in every]
        assign(every, held)
        return gradients

    def _add(self, loss: Tensor, epoch: int) -> None:
        """Adds the gradients of what is trained in an epoch to `.grad`."""
        if epoch >= self._trained.last_begin and self._objective.model is None:
            self._trained.require_frozen()
            loss.backward()
        elif self._is_plain(loss):
            loss.backward(inputs=[*self._trained.in_epoch(epoch), *self._leaves()])
        else:
            raise UsageError(
                "hr.frozen(..., until_epoch=...) and several optimizers leave out gradients, and "
                "torch.utils.checkpoint(use_reentrant=True) in forward makes all of them; use use_reentrant=False"
            )

    def _is_hooked(self) -> bool:
        """Tells whether hooks of the user's see gradients of parameters.

        They are called with that of the share's own mean, so that one which adds something adds it once for all shares.
        """
        return any(map(_gradient_hooks, self._trained.every)) or any(map(_accumulation_hooks, self._trained.every))

    def _is_plain(self, loss: Tensor) -> bool:
        """Tells whether autograd may be asked for the gradients of some tensors alone."""
        if self._reentrant is None:
            self._reentrant = has_reentrant_checkpoint(loss)
        return not self._reentrant

    def _accumulate(self, batch: Any, share: Share, pieces: int) -> Computed:
        """Does so for micro-batches, whose gradients torch adds up in `.grad`."""
        held = [parameter.grad for parameter in self._trained.every]
        if self._sink is not None:
            assign(self._trained.every, [None] * len(held))
        means, hooked = False, self._is_hooked()
        totals, weights = [], []
        # Hooks see what they would on one device, the whole gradient.
        with silenced(self._trained.every) if hooked else nullcontext():
            for start, stop in bounds(share.examples, (1,) * pieces):
                loss = self._loss(cut(batch, start, stop, share.examples), share)
                means = isinstance(loss, Mean)
                total, weight = weigh(loss, stop - start)
                # The weight of a part of a `Mean` is known when all have been weighed.
                # Gradients that are changed after the last backward cannot leave early.
                early = self._early if not (hooked or means) and self._is_plain(total) else None
                with early.sending(first=False) if early and stop == share.examples else nullcontext():
                    self._add(self._scaled(total if means else total / share.of), share.epoch)
                if early and start == 0:
                    early.gather()
                totals.append(total.detach())
                weights.append(weight)
        own = own_weight(self._total, weights) if means else float(sum(weights))
        if means:
            divide([each.grad for each in (*self._trained.every, *self._leaves())], all_weight(self._total, own))
        if hooked:
            called(self._trained.every, share.examples / share.of)
        gradients = [parameter.grad for parameter in self._trained.every]
        if self._sink is not None:
            self._sink.store(gradients)
            assign(self._trained.every, held)
        return Computed(mean_of(totals, own), own)

    def _leaves(self) -> list[Tensor]:
        """Returns the rows of tables that forward has used; their gradients stay in `.grad`."""
        return [leaf for layer in self._sparse for leaf in layer.leaves]

    def _scaled(self, loss: Tensor) -> Tensor:
        return loss if self._scale is None else loss * self._scale.value

    def _leave_nothing(self) -> Computed:
        if self._sink is not None:
            self._sink.store_nothing()
        return Computed(None, 0.0)


def cut(batch: Any, start: int, stop: int, examples: int, option: str = "accumulate") -> Any:
    """Returns the examples `[start, stop)` of a batch, any tree, of so many `examples`; `option` asks for it.

    Raises a `DataError` if the batch holds something without one entry for each example.
    """

    def piece(name: str, leaf: Any) -> Any:
        if leaf is None:
            return None
        if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == examples:
            return leaf[start:stop]
        form = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
        raise DataError(
            f"{name} is {form}, and {option} cuts batches into micro-batches along the first dim, which must have one "
            f"entry for each of the {examples} examples; leave it out of the batch, or use {option}=1"
        )

    return map_leaves(piece, batch)


class ModelParallelGroup(ABC):
    """How the ranks that hold one replica together compute: this rank's part of it.

    Attributes:
        group: the ranks of this replica.
        everyone: the ranks of all replicas.
        repeated: names of the parameters that all of `times` ranks hold, which have slices of the same stage.
        stages: how many ranks of a replica have stages of their own.
        model: what this rank holds.
        connects: what connects the devices of this replica's ranks, and what those of all.
        piecewise: whether a parameter's gradient is added up from micro-batch to micro-batch.
        slices: where this rank holds slices of parameters; else None.
    """

    connects: tuple[Connects, Connects]
    piecewise: ClassVar[bool] = False
    slices: StateSlices | None = None
    group: ProcessGroup
    everyone: ProcessGroup
    repeated: frozenset[str]
    times: int = 1
    stages: int = 1
    model: ModelSpec

    @abstractmethod
    def compute(self, whole: Callable[[], Compute], sink: GradientSink | None, scale: LossScale | None) -> Compute:
        """Returns what computes this rank's part; `whole` returns how one rank would compute all, `scale` included."""

    @abstractmethod
    def spread(self) -> None:
        """Gives each rank of the replica the values of what it holds and another one owns; all ranks call it."""


def use_channels_last(module: nn.Module) -> None:
    """Puts 4-d parameters and buffers in channels-last order, and from now on the 4-d inputs of each forward."""
    module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    module.register_forward_pre_hook(_in_channels_last, with_kwargs=True)


def _in_channels_last(module: nn.Module, values: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, Any]:
    def converted(tensor: Tensor) -> Tensor:
        images = tensor.dim() == 4 and is_dense(tensor)
        return tensor.contiguous(memory_format=torch.channels_last) if images else tensor

    return map_tensors(converted, values), map_tensors(converted, named)
