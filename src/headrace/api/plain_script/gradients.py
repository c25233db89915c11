"""Gradients of a script's model, made one on all processes at the end of each backward pass."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from headrace import internals
from headrace.api.plain_script.buffers import ChangedBuffers
from headrace.api.plain_script.given.deliveries import ForwardCounts
from headrace.api.plain_script.meeting import BACKWARD, Meeting
from headrace.collectives.base import Collective
from headrace.collectives.digest import digests, ranks_apart
from headrace.devices import HOST
from headrace.errors import UsageError
from headrace.hooks import hooks_of
from headrace.spec.model import ParameterSpec
from headrace.training.reduction import CollectiveReduction, Reduction, SharedMemoryReduction

_FIRST, _EVERY = 4, 200
"""Backward passes that compare parameters: so many in the beginning, then two in so many."""


class Synchronizer:
    """Makes every process's gradients those of the global batch, at the end of each backward pass.

    Not at the step, because a script may clip them before. Several backward passes before one step add up, because the
    weights of the processes sum to 1.

    Parameters may be frozen, unfrozen and added while the script runs, on all ranks alike.

    Args:
        reduction: of the loss, over examples. "sum": the gradients of the shares are added. None for a mean, of which
            it is checked that it is over whole shares.
        wires: what carries the model's tensors, and where they lie; None for the group, and for host memory.

    Attributes:
        optimizers: those that step over the parameters, as far as they are known.
        check_values: what else is checked when parameters are compared.
    """

    def __init__(
        self,
        model: nn.Module,
        meeting: Meeting,
        number: int,
        reduction: str | None = None,
        wires: tuple[Collective, torch.device] | None = None,
    ) -> None:
        self.model = model
        self.number = number
        self.check_values: Callable[[], None] = lambda: None
        self.optimizers: list[torch.optim.Optimizer] = []
        self._meeting = meeting
        self._collective, self._device = wires or (meeting.group, torch.device(HOST))
        self._adds = reduction == "sum"
        self._names: dict[int, str] = {}
        self._hooks: dict[int, int] = {}
        self._watched: list[nn.Parameter] = []
        self._facts: list[tuple[bool, torch.dtype]] = []
        self._state = self._listed = 0
        self._trained: list[nn.Parameter] = []
        self._reduction: Reduction | None = None
        self._views: tuple[Tensor, ...] = ()
        self._given: dict[int, weakref.ref[Tensor]] = {}
        self._before: dict[int, Tensor | None] = {}
        self._backward_pass = self._noted = -1
        self._passes = 0
        self._watch()
        self._buffers = ChangedBuffers(model, meeting)
        self._forwards = ForwardCounts(model, meeting.deliveries) if reduction is None else None
        meeting.comparisons.append(self._compare_without_pass)

    @property
    def checks(self) -> bool:
        """Whether the next backward pass compares the parameters of all ranks."""
        # Two, because a script may change parameters between the passes of one step.
        return self._passes < _FIRST or self._passes % _EVERY < 2

    def foreign(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """Returns those parameters whose gradient is not the one that a backward pass has left."""
        given = self._given
        return [
            parameter
            for parameter in parameters
            if (gradient := parameter.grad) is not None
            and ((left := given.get(id(parameter))) is None or left() is not gradient)
        ]

    def knows(self, parameter: Tensor) -> bool:
        """Tells whether the gradients of a parameter are made one."""
        return id(parameter) in self._names

    def name(self, parameter: Tensor) -> str:
        """Returns a parameter's name in the model."""
        return self._names.get(id(parameter), "a parameter that is not the model's")

    def _watch(self) -> None:
        """Finds the parameters of the model and of its optimizers, and notices the end of passes that reach them."""
        named = {id(parameter): name for name, parameter in self.model.named_parameters()}
        self._require_known_hooks()
        self._listed = self._count()
        of_optimizers = (
            parameter
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
        for parameter in (*self.model.parameters(), *of_optimizers):
            if id(parameter) in self._names or not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            self._names[id(parameter)] = named.get(id(parameter), f"added parameter {len(self._names)}")
            self._watched.append(parameter)
            trained = parameter.requires_grad
            # torch takes no hook of a frozen one, and calls it when it is trained.
            parameter.requires_grad_(True)
            parameter.register_post_accumulate_grad_hook(self._await_end)
            if self._adds:
                parameter.register_hook(lambda _, parameter=parameter: self._note(parameter))
            parameter.requires_grad_(trained)
            self._hooks[id(parameter)] = _count_hooks(parameter)

    def _require_known_hooks(self) -> None:
        added = next((each for each in self._watched if _count_hooks(each) > self._hooks[id(each)]), None)
        if added is not None:
            raise UsageError(
                f"a hook was registered on {self.name(added)} after hr.setup, and sees the gradient of this process's "
                "share: register it before, where it is tried, or change .grad after loss.backward()"
            )

    def _count(self) -> int:
        return sum(len(group["params"]) for optimizer in self.optimizers for group in optimizer.param_groups)

    def _await_end(self, _: Tensor) -> None:
        # Not a flag: what is queued in a pass that ends with an error is dropped.
        current = internals.current_backward()
        # Outside of a pass, another setup of the model tries its hooks.
        if current not in (-1, self._backward_pass):
            self._backward_pass = current
            internals.at_end_of_backward(self._synchronize)

    def _note(self, parameter: Tensor) -> None:
        """Notes a gradient before a pass adds to it."""
        if (current := internals.current_backward()) != self._noted:
            # What torch.autograd.grad has left here is of no backward pass.
            self._before.clear()
            self._noted = current
        gradient = parameter.grad
        self._before[id(parameter)] = None if gradient is None else gradient.detach().clone()

    @torch.no_grad()
    def _synchronize(self) -> None:
        meeting = self._meeting
        changed = self._follow()
        share = meeting.deliveries.current()
        own = 1 if share is None else share.examples
        chosen = self._forwards.take() if self._forwards else 0
        examples = meeting.meet(BACKWARD, self.number, self._state, self._states, own, chosen)
        if changed:
            self._reduction = self._reduce_by()
            self._views = self._reduction.layout.views(self._reduction.result)
        if changed or self.checks:
            self._compare()
        total = sum(examples)
        meeting.weight = own / total if total else 0.0
        assert self._reduction is not None
        self._exchange(self._reduction, bool(own), 1.0 if self._adds else meeting.weight)
        if total:
            self._buffers.synchronize(meeting.weight)
        meeting.passes += 1
        self._passes += 1

    def _exchange(self, reduction: Reduction, has_examples: bool, weight: float) -> None:
        local = [self._local(parameter) if parameter.requires_grad else None for parameter in self._trained]
        if has_examples:
            reduction.sink.store([None if gradient is None else gradient * weight for gradient in local])
        else:
            reduction.sink.store_nothing()
        missing = set(reduction.used.settle())
        reduction.reduce()
        self._meeting.group.barrier()
        for index, (parameter, view) in enumerate(zip(self._trained, self._views, strict=True)):
            if not parameter.requires_grad:
                continue
            before = self._before.pop(id(parameter), parameter.grad) if self._adds else None
            if index in missing:
                parameter.grad = before
                continue
            # A copy, because the script may change it, in the parameter's order, as fused optimizers need it.
            gradient = torch.empty_like(parameter, requires_grad=False).copy_(view)
            parameter.grad = gradient if before is None else gradient.add_(before)
            self._given[id(parameter)] = weakref.ref(parameter.grad)

    def _local(self, parameter: Tensor) -> Tensor | None:
        """Returns what this rank adds to a parameter's gradient."""
        gradient = parameter.grad
        if gradient is None or (self._adds and id(parameter) not in self._before):
            return None
        dense = gradient if gradient.layout is torch.strided else gradient.to_dense()
        before = self._before.get(id(parameter)) if self._adds else None
        return dense if before is None else dense - before

    def _follow(self) -> bool:
        """Looks for parameters that are new, trained for the first time or of another type; returns whether any is."""
        shares = self._meeting.deliveries
        begins = shares.batches > 0 and shares.index == 0
        if self.checks or begins or self._count() != self._listed:
            self._watch()
        facts = [(parameter.requires_grad, parameter.dtype) for parameter in self._watched]
        if facts == self._facts:
            return False
        self._facts = facts
        self._state = zlib.crc32(repr(self._states()).encode())
        known = set(map(id, self._trained))
        self._trained += [
            parameter for parameter in self._watched if parameter.requires_grad and id(parameter) not in known
        ]
        laid_out = self._reduction.layout.names if self._reduction else ()
        types = [str(view.dtype) for view in self._views]
        return len(laid_out) != len(self._trained) or types != [str(parameter.dtype) for parameter in self._trained]

    def _states(self) -> Mapping[str, str]:
        return {
            self.name(parameter): f"{'trained' if parameter.requires_grad else 'frozen'}, "
            f"{str(parameter.dtype).removeprefix('torch.')} {list(parameter.shape)}"
            for parameter in self._watched
        }

    def _reduce_by(self) -> Reduction:
        group = self._meeting.group
        specs = [
            ParameterSpec(f"{place}", tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."))
            for place, parameter in enumerate(self._trained)
        ]
        if group.one_memory and self._collective is group:
            return SharedMemoryReduction(specs, group)
        return CollectiveReduction(specs, group, self._collective, self._device)

    def _compare_without_pass(self) -> None:
        self._compare()
        # Forward may have changed some, as where BatchNorm's statistics are made anew.
        self._buffers.synchronize(1.0 / self._meeting.world)

    def _compare(self) -> None:
        """Compares the parameters of all ranks."""
        self.check_values()
        apart = ranks_apart(digests(self._watched), self._meeting.group)
        if apart is not None:
            place, rank = apart
            raise UsageError(
                f"{self.name(self._watched[place])} has other values on rank {rank} than on rank 0, after "
                f"{self._meeting.passes} backward passes and {self._meeting.steps} steps: something has changed it "
                "beside the steps that setup knows, with values that this process alone has (random numbers, gradients "
                "of torch.autograd.grad, its own metric). Draw weights before hr.setup, and train by loss.backward() "
                "and optimizer.step()"
            )


def _count_hooks(parameter: Tensor) -> int:
    return sum(map(len, hooks_of(parameter)))
