"""Compute with the whole model on one device."""

from __future__ import annotations

import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headrace import internals
from headrace.batches import call, select_target
from headrace.collectives.base import ProcessGroup
from headrace.errors import DataError, JobError, UnfitMachine, UsageError
from headrace.machine.versions import minor_of
from headrace.metrics import Mean, weigh
from headrace.modules import TrainedParameters, has_reentrant_checkpoint, is_dense
from headrace.policies.roles import bounds
from headrace.spec.job import Share
from headrace.spec.model import ModelSpec
from headrace.spec.options import Options, require_plain_forward
from headrace.training.clipping import LossScale
from headrace.training.compute import Compute, Computed
from headrace.training.embeddings.layer import sparse_layers
from headrace.training.gradients import DirectGradients, GradientPlaces, GradientSink, assign, divide, require_graph
from headrace.training.optimizer import StateSlices
from headrace.trees import map_leaves, map_tensors, widened


class GraphMode(ABC):
    """How a model runs as compiled programs.

    Attributes:
        pads: whether it makes all batches one length, and so takes them from the host.
    """

    pads: ClassVar[bool] = False

    @abstractmethod
    def loss(self, objective: Objective, batch: Any, share: Share) -> Tensor | Mean:
        """Runs forward and loss."""

    def predict(self, module: nn.Module, batch: Any, inputs: Any) -> Any:
        """Runs forward for other batches than those of training: eager, since each would be compiled for few."""
        return call(module, batch, inputs)

    @abstractmethod
    def errors(self) -> AbstractContextManager[None]:
        """Makes a `JobError` with the remedy of what the compiler raises, in forward or in backward."""


def one_compiling_process() -> None:
    """Keeps inductor from starting a pool of processes, which would outlive a worker that is killed.

    Raises:
        UnfitMachine: in a thread of its own where torch cannot compile there.
    """
    if threading.current_thread() is not threading.main_thread() and minor_of(torch.__version__) < (2, 12):
        raise UnfitMachine(
            f"torch {torch.__version__} ends the process when a thread compiles, and ThreadEngine has threads: "
            "leave out engine=, or pip install 'torch>=2.12'"
        )
    with warnings.catch_warnings():
        # torch imports modules here that it has deprecated itself.
        warnings.simplefilter("ignore", DeprecationWarning)
        inductor = internals.inductor()
    inductor.compile_threads = 1


@contextmanager
def compiler_errors(remedy: str) -> Iterator[None]:
    """Makes a `JobError` of what the compiler raises."""
    cannot, of_the_model = internals.compiler_errors()
    try:
        yield
    except cannot as error:
        # Of an exception that the model itself raises, the compiler's words hide what it says.
        own = isinstance(error.__cause__, of_the_model)
        said = " ".join(str(error.__cause__ if own else error).partition("\n\n")[0].split())
        raise JobError(f"the model cannot be compiled: {type(error).__name__}: {said:.400}; {remedy}") from error


class CompiledModule(GraphMode):
    """A module and its compiled form, which runs batches of at least `full` examples.

    Compiled kernels differ by a last bit from eager ones, so which form runs depends on the round alone. The parameters
    must lie where they will stay.
    """

    def __init__(self, module: nn.Module, full: int) -> None:
        one_compiling_process()
        self._module = module
        self._compiled: Callable[..., Any] = torch.compile(module)
        self._full = full

    def forward(self, examples: int) -> Callable[..., Any]:
        """Returns the form that runs so many examples."""
        # The last batch of an epoch is short: compiling for its shapes takes longer than running it.
        return self._compiled if examples >= self._full else self._module

    def loss(self, objective: Objective, batch: Any, share: Share) -> Tensor | Mean:
        return objective.of(self.forward(share.of), batch)

    def errors(self) -> AbstractContextManager[None]:
        return compiler_errors("use compile=False")


HALF: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
_PLAIN = Options()


@dataclass(frozen=True)
class Objective:
    """The loss, `loss(output, target)`, and how `inputs` and `target` are selected from a batch, as in `Job`.

    `weighed` tells whether the loss is a `Mean`, whose total weight is a sum over workers. Where a part of a model is
    trained, `model` is the whole one, and the loss is `loss(model, batch)`.
    """

    loss: Callable[..., Any]
    inputs: Any = None
    target: Any = None
    weighed: bool = False
    model: nn.Module | None = None

    def of(self, forward: Callable[..., Any], batch: Any) -> Tensor | Mean:
        """Returns the loss of a batch, whose output `forward` makes."""
        if self.model is not None:
            taken = self.model, batch
        else:
            taken = call(forward, batch, self.inputs), select_target(batch, self.target)
        loss: Tensor | Mean = self.loss(*taken)
        return loss


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
        total: Callable[[Sequence[float]], list[float]] = list,
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

    def backward(self, loss: Tensor | Mean, share: Share) -> Computed:
        """Differentiates the loss of the caller's own forward.

        Raises:
            UsageError: the options say how forward is run.
        """
        if self._graph is not None and self._graph.pads:
            return super().backward(loss, share)
        require_plain_forward(self._options)
        return self._contribute(loss, share)

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
        """Differentiates this share's part of the global mean, from `loss`, the mean over the share.

        An empty share's loss is needed only because its layers and its weight take part in collectives.
        """
        if isinstance(loss, Mean):
            weight = float(loss.weight)
            (all_weight,) = self._total([weight])
            part = loss.total / all_weight if all_weight else loss.total * 0
            mean = loss.total.detach() / weight if weight else None
        else:
            weight = float(share.examples)
            part = loss if share.examples == share.of else loss * (share.examples / share.of)
            mean = loss.detach()
        if share.examples == 0:
            if self._always:
                # As the others do, whose layers exchange something in backward, too.
                torch.autograd.grad(part, self._trained.in_epoch(share.epoch), allow_unused=True)
            return self._leave_nothing()
        require_graph(part)
        if self._sink is None:
            self._add(self._scaled(part), share.epoch)
        else:
            self._sink.store(self._gradients(self._scaled(part), share.epoch))
        return Computed(mean, weight)

    def _gradients(self, loss: Tensor, epoch: int) -> Sequence[Tensor | None]:
        if self._is_plain(loss):
            leaves, live = self._leaves(), self._trained.in_epoch(epoch)
            with self._direct.writing() if self._direct else nullcontext():
                found = torch.autograd.grad(loss, [*live, *leaves], allow_unused=True)
            assign(leaves, found[len(live) :])
            return self._trained.all_of(found[: len(live)], epoch)
        held = [parameter.grad for parameter in self._trained.every]
        assign(self._trained.every, [None] * len(held))
        self._add(loss, epoch)
        gradients = [parameter.grad for parameter in self._trained.every]
        assign(self._trained.every, held)
        return gradients

    def _add(self, loss: Tensor, epoch: int) -> None:
        """Adds the gradients of what is trained in an epoch to `.grad`."""
        if epoch >= self._trained.last_begin and self._objective.model is None:
            loss.backward()
        elif self._is_plain(loss):
            loss.backward(inputs=[*self._trained.in_epoch(epoch), *self._leaves()])
        else:
            raise UsageError(
                "hr.frozen(..., until_epoch=...) and several optimizers leave out gradients, and "
                "torch.utils.checkpoint(use_reentrant=True) in forward makes all of them; use use_reentrant=False"
            )

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
        means = False
        totals, weights = [], []
        for start, stop in bounds(share.examples, (1,) * pieces):
            loss = self._loss(cut(batch, start, stop, share.examples), share)
            means = isinstance(loss, Mean)
            total, weight = weigh(loss, stop - start)
            # The weight of a part of a `Mean` is known when all have been weighed.
            self._add(self._scaled(total if means else total / share.of), share.epoch)
            totals.append(total.detach())
            weights.append(weight)
        own = float(sum(weights))
        gradients = [parameter.grad for parameter in self._trained.every]
        if means:
            (all_weight,) = self._total([own])
            divide([*gradients, *(leaf.grad for leaf in self._leaves())], all_weight)
        if self._sink is not None:
            self._sink.store(gradients)
            assign(self._trained.every, held)
        return Computed(torch.stack(totals).sum() / own if own else None, own)

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
        repeated: names of the parameters that every rank of a replica holds.
        model: what this rank holds.
        piecewise: whether a parameter's gradient is added up from micro-batch to micro-batch.
        slices: where this rank holds slices of parameters; else None.
    """

    piecewise: ClassVar[bool] = False
    slices: StateSlices | None = None
    group: ProcessGroup
    everyone: ProcessGroup
    repeated: frozenset[str]
    model: ModelSpec

    @abstractmethod
    def compute(self, whole: Callable[[], WholeModel], sink: GradientSink | None) -> Compute:
        """Returns what computes this rank's part; `whole` returns how one rank would compute all."""

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
