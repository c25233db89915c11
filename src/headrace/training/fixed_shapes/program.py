"""One program for every step: short batches are padded, and what is padded weighs nothing."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from headrace import internals
from headrace.batches import call, examples_of, select_target
from headrace.errors import DataError, JobError, UsageError
from headrace.internals import tree_flatten, tree_unflatten
from headrace.metrics import Mean
from headrace.spec.job import Share
from headrace.training.fixed_shapes.graph_mode import GraphMode, compiler_errors, one_compiling_process
from headrace.training.shared_buffers.batch_norm import PaddedBatchNorm, replace_batch_norm
from headrace.training.user_code.objective import Objective
from headrace.trees import map_leaves, map_tensors


class FixedShapes(GraphMode):
    """The model and the loss as one program for `examples` examples, which is compiled once.

    A batch with fewer examples is filled up by copies of its last one on the host, before it goes to the device. The
    loss is taken of each example by itself, and those of the copies have the weight 0: so the sum is exactly that over
    the others. BatchNorm's statistics are weighed likewise.

    Attributes:
        compilations: how many programs were compiled.
    """

    pads = True

    def __init__(
        self, module: nn.Module, objective: Objective, examples: int, device: torch.device, compiler: str
    ) -> None:
        one_compiling_process()
        self.compilations = 0
        self._module = module
        self._objective = objective
        self._examples = examples
        self._device = device
        self._compiler = compiler
        self._form: list[tuple[str, object]] = []
        self._weights = torch.ones(examples, device=device)
        replace_batch_norm(module, lambda layer: PaddedBatchNorm(layer, self._weights))
        self._program = torch.compile(self._own_step(), backend=self._compile, fullgraph=True, dynamic=False)

    def loss(self, objective: Objective, batch: Any, share: Share) -> Tensor | Mean:
        examples = examples_of(batch)
        batch = self._padded(batch, examples, self._examples)
        self._require_form(batch)
        # From the host, because a slice on the device would be a program of its own for every length.
        self._weights.copy_((torch.arange(self._examples) < examples).float())
        total, weight = self._program(self._placed(batch))
        return Mean(total, weight) if objective.weighed else total / examples

    def predict(self, module: nn.Module, batch: Any, inputs: Any) -> Any:
        examples = examples_of(batch)
        count = -(-max(1, examples) // self._examples) * self._examples
        if not examples:
            return call(module, self._placed(batch), inputs)
        output = call(module, self._placed(self._padded(batch, examples, count)), inputs)
        return map_tensors(lambda each: each[:examples] if each.dim() and len(each) == count else each, output)

    def errors(self) -> AbstractContextManager[None]:
        return compiler_errors(
            "the model and its loss must be one program, without control flow that depends on values; use mirrored"
        )

    def _own_step(self) -> Callable[[Any], tuple[Tensor, Tensor]]:
        """Returns the step as a function with code of its own, because the compiler keeps its programs by code."""
        module, objective, weights, examples = self._module, self._objective, self._weights, self._examples

        def step(batch: Any) -> tuple[Tensor, Tensor]:
            output = call(module, batch, objective.inputs)
            totals, counts = _losses(objective, output, select_target(batch, objective.target), examples)
            mask = weights.to(totals.dtype)
            return (totals * mask).sum(), (counts.to(totals.dtype) * mask).sum()

        return types.FunctionType(
            step.__code__.replace(), step.__globals__, step.__name__, step.__defaults__, step.__closure__
        )

    def _compile(self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        self.compilations += 1
        if self.compilations > 1:
            raise UsageError("a second program: something that is no tensor has changed since the first step")
        made: Callable[..., Any] = internals.compiler_backend(self._compiler)(graph, list(inputs))
        return made

    def _padded(self, batch: Any, examples: int, count: int) -> Any:
        """Returns a batch filled up to `count` examples by copies of the last one."""
        if examples == count:
            return batch
        if examples > count:
            raise UsageError(f"a step has {count} examples on each worker, and this batch {examples}")
        rows = torch.arange(count).clamp(max=examples - 1)
        return map_tensors(
            lambda each: each[rows.to(each.device)] if each.dim() and len(each) == examples else each, batch
        )

    def _placed(self, batch: Any) -> Any:
        return map_tensors(lambda each: each.to(self._device, non_blocking=True), batch)

    def _require_form(self, batch: Any) -> None:
        """Raises a DataError if a batch has another form than the first one."""
        form: list[tuple[str, object]] = []

        def note(name: str, leaf: Any) -> Any:
            form.append((name, f"{tuple(leaf.shape)} {leaf.dtype}" if isinstance(leaf, Tensor) else repr(leaf)))
            return leaf

        map_leaves(note, batch)
        self._form = self._form or form
        if form != self._form:
            first, now = next(
                (pair for pair in zip(self._form, form, strict=False) if pair[0] != pair[1]), (self._form, form)
            )
            raise DataError(
                f"a program is compiled for one form of a batch, whose {first[0]} is {first[1]}, and here {now[0]} is "
                f"{now[1]}; give all batches one form, for example texts padded to one length, or use mirrored"
            )


def _losses(objective: Objective, output: Any, target: Any, examples: int) -> tuple[Tensor, Tensor]:
    """Returns each example's loss, `(examples,)`, and its weight."""
    leaves, form = tree_flatten((output, target))
    for leaf in leaves:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or len(leaf) != examples:
            found = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
            raise JobError(
                f"the loss is taken of each of {examples} examples by itself, and in the model's output or the target "
                f"is {found}, without one entry for each; return outputs of examples, or use mirrored"
            )

    def of_one(*rows: Tensor) -> tuple[Tensor, Tensor]:
        alone, wanted = tree_unflatten([row.unsqueeze(0) for row in rows], form)
        loss = objective.loss(alone, wanted)
        if not isinstance(loss, Mean):
            return loss, torch.ones_like(loss)
        weight = loss.weight if isinstance(loss.weight, Tensor) else torch.full_like(loss.total, loss.weight)
        return loss.total, weight

    totals, counts = torch.vmap(of_one)(*leaves)
    return totals, counts
