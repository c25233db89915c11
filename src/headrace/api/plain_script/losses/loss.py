"""Is a script's loss a sum over examples? Then the shares' gradients add up, where those of a mean are averaged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from headrace import internals
from headrace.api.plain_script.meeting import Meeting
from headrace.hooks import OwnHook
from headrace.training.user_code.loss_graph import (
    LastOutput,
    MeanCheck,
    ShareFactors,
    findings_of,
    made_of,
    require_mean,
    require_sum,
)

_PASSES = 6
"""Backward passes whose losses are looked at: turns of several models may each have one of their own."""
_COUNTED = (
    "divide the sum by hr.processes().sum(number), the number of all processes, and say hr.setup(..., reduction='sum')"
)
_REMEDY = (
    "say hr.setup(..., reduction='sum') if it is a sum over the batch, whose shares' gradients are added as in one "
    "process, or reduction='mean' if each share's loss is a mean over its examples all the same"
)


class LossWatch:
    """Looks at the losses of the first backward passes; one that is not what it is taken for raises a UsageError.

    What losses are made of is noted in every pass, for the meeting, which compares it.
    """

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._left = 0
        self._plain: Callable[..., None] | None = None
        self._plain_grad: Callable[..., Any] = torch.autograd.grad
        self._models: list[tuple[LastOutput, RemovableHandle]] = []
        self._adds = set[bool]()
        self._parameters = set[int]()
        self._factors = ShareFactors()

    def begin(self, model: nn.Module, adds: bool) -> None:
        """Looks at the losses from now on, for a model that comes to those that are there."""
        self._parameters.update(map(id, model.parameters()))
        if not self._left:
            self._plain_grad = torch.autograd.grad
            setattr(torch.autograd, "grad", self._grad)  # noqa: B010
        self._left += _PASSES
        self._adds.add(adds)
        last = LastOutput()
        self._models.append((last, model.register_forward_hook(OwnHook(last.keep))))
        if self._plain is None:
            self._plain = torch.autograd.backward
            # `Tensor.backward` calls it by this name.
            setattr(torch.autograd, "backward", self._backward)  # noqa: B010

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
        looks = self._left > 0
        self._left -= looks
        single = isinstance(tensors, Tensor)
        losses = (tensors,) if single else tuple(tensors)
        self._meeting.made += [made_of(loss) for loss in losses if loss.grad_fn is not None]
        if last is not None and self._adds == {False}:
            for line in (self._factors.look(loss, last.examples) for loss in losses if loss.grad_fn is not None):
                if line:
                    self._meeting.say(line)
        # Of several models, whose losses are of both kinds, it is not known which this one is.
        if looks and last is not None and last.examples and len(self._adds) == 1:
            gradients = arguments[0] if arguments else named.get("grad_tensors")
            every = (gradients,) if single else gradients or [None] * len(losses)
            for loss, gradient in zip(losses, every, strict=False):
                if loss.grad_fn is not None:
                    self._require(loss, gradient, last.examples, last.of)
        if looks and not self._left:
            setattr(torch.autograd, "grad", self._plain_grad)  # noqa: B010
            for _, handle in self._models:
                handle.remove()
            self._models.clear()
        plain(tensors, *arguments, **named)

    def _require(self, loss: Tensor, gradient: Tensor | None, examples: int, of: int) -> None:
        if self._adds == {True}:
            require_sum(loss, examples)
            return
        require_mean(mean_check(self._meeting), loss, examples, of, gradient)
        for last, _ in self._models if loss.numel() == 1 else ():
            outputs = last.take(examples)
            for line in () if outputs is None else findings_of(loss, outputs, examples):
                self._meeting.say(line)


def mean_check(meeting: Meeting) -> MeanCheck:
    """Returns what a script is told."""
    return MeanCheck(meeting.say, _REMEDY, _COUNTED)
