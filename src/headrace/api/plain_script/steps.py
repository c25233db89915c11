"""What a script's `optimizer.step()` does in several processes, and parameters of which there is one copy."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from headrace.api.plain_script.gradients import Synchronizer
from headrace.api.plain_script.meeting import ASSIGNED, LOADED, SAVED, STEP, Meeting
from headrace.checkpoint.forms import pack, unpack
from headrace.collectives.base import gather_bytes, gather_texts
from headrace.collectives.digest import digests, ranks_apart
from headrace.errors import UsageError, in_one_line
from headrace.hooks import OwnHook
from headrace.modules import describe
from headrace.policies.sharding import whole
from headrace.training.central_storage.exchange import place_parameters, share_parameters
from headrace.trees import as_json, from_json

_MIRRORED = "use strategy='mirrored', where each process updates all"
_STEPS = 2
"""By which it is tried whether an optimizer updates each parameter by itself; the second has the state of the first."""


class CentralParameters:
    """One copy of a model's parameters for all processes; each updates those it owns, and holds their state."""

    def __init__(self, model: nn.Module, meeting: Meeting) -> None:
        spec = describe(model)
        place_parameters(model, *share_parameters(model, spec, meeting.group))
        self._meeting = meeting
        self._named = dict(model.named_parameters())
        self._places = {name: parameter.data_ptr() for name, parameter in self._named.items()}
        # Frozen ones may be trained later.
        every = [replace(parameter, trainable=True) for parameter in spec.parameters]
        owners = {segment.parameter: segment.owner for segment in whole(every, meeting.world)}
        self._foreign = [parameter for name, parameter in self._named.items() if owners.get(name) != meeting.rank]
        self._ids = set(map(id, self._named.values()))
        self._optimizers: list[torch.optim.Optimizer] = []
        self._after = self._digests()
        model.register_load_state_dict_pre_hook(OwnHook(self._begin_load))
        model.register_load_state_dict_post_hook(OwnHook(self._end_load))
        # A step of an optimizer that is made later would be done by every process.
        register_optimizer_step_pre_hook(self._require_known)

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Lets an optimizer step, on each process, over what that owns."""
        if isinstance(optimizer, torch.optim.LBFGS):
            raise UsageError(
                "LBFGS needs all parameters at once, and under central_storage each process updates those it owns; use "
                "strategy='mirrored'"
            )
        _require_separable(optimizer, self._ids.difference(map(id, self._foreign)))
        self._optimizers.append(optimizer)
        optimizer.register_state_dict_post_hook(self._whole_state)

    def leave_to_owners(self) -> None:
        """Leaves this process's optimizers the gradients of what it owns."""
        for parameter in self._foreign:
            parameter.grad = None

    def end_step(self, checks: bool) -> None:
        """Waits until all processes have stepped; what they have then is compared later if `checks`."""
        self._meeting.meet(STEP)
        self._after = {}
        if checks:
            self._after = self._digests()
            # No script may go on while another process still reads.
            self._meeting.group.barrier()

    def check(self) -> None:
        """Raises a UsageError if the script itself has changed parameters since the last step: each process would."""
        moved = next((name for name, place in self._places.items() if self._named[name].data_ptr() != place), None)
        if moved:
            raise UsageError(
                f"{moved} no longer lies in the memory that all processes share (its .data was replaced, as by "
                "model.to() or model.half()); do that before hr.setup, or use strategy='mirrored'"
            )
        now = self._digests()
        changed = next((name for name in now if now[name] != self._after.get(name, now[name])), None)
        self._after = now
        if changed:
            raise UsageError(
                f"{changed} has changed since hr.setup, or since the last optimizer.step(), and there is one copy of "
                "it, which every process of the script changes; do it before hr.setup, or use strategy='mirrored', "
                "where each process changes its own"
            )

    def _begin_load(self, _: nn.Module, values: dict[str, Any], *__: object) -> None:
        self._meeting.meet(LOADED)
        named = {name: each for name, each in values.items() if isinstance(each, Tensor)}
        apart = ranks_apart(digests(named.values()), self._meeting.group)
        if apart is not None:
            raise UsageError(
                f"{[*named][apart[0]]} that model.load_state_dict() gets is another one on rank {apart[1]} than on "
                "rank 0, and there is one copy of it; let all processes load the same file"
            )

    def _end_load(self, *_: object) -> None:
        # Every process has written the same values.
        self._meeting.group.barrier()
        self._after = self._digests()
        self._meeting.group.barrier()

    def _whole_state(self, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
        """Puts into a state dict what the other processes have of the states; every process calls it."""
        self._meeting.meet(SAVED)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        foreign = set(map(id, self._foreign))
        tensors: list[Tensor] = []
        owned = {place: each for place, each in saved["state"].items() if id(parameters[place]) not in foreign}
        form = json.dumps(as_json(owned, tensors))
        contents = gather_bytes(self._meeting.group, pack({str(number): each for number, each in enumerate(tensors)}))
        states: dict[int, Any] = {}
        for text, content in zip(gather_texts(self._meeting.group, form), contents, strict=True):
            numbered = {int(number): each for number, each in unpack(content).items()}
            states |= from_json(json.loads(text), numbered.__getitem__)
        saved["state"] = dict(sorted(states.items()))

    def _digests(self) -> dict[str, int]:
        return dict(zip(self._named, digests(self._named.values()), strict=True))

    def _require_known(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if optimizer in self._optimizers:
            return
        if any(id(parameter) in self._ids for group in optimizer.param_groups for parameter in group["params"]):
            raise UsageError(
                f"{type(optimizer).__name__} steps over parameters of which there is one copy, and every process would "
                "do its step; give it to hr.setup, too, or use strategy='mirrored'"
            )


def _require_separable(optimizer: torch.optim.Optimizer, owned: Container[int]) -> None:
    """Tries a copy of an optimizer over all parameters, and one over those with the ids `owned`.

    Raises:
        UsageError: they update these in different ways, or cannot be tried.
    """
    # torch's own, but for LBFGS, update each parameter by itself.
    if type(optimizer).__module__.startswith("torch.optim"):
        return
    name = type(optimizer).__name__
    try:
        every, before, _ = _stepped(optimizer, None)
        alone, _, places = _stepped(optimizer, owned)
    except Exception as error:
        raise UsageError(
            f"{name} cannot be tried before the start ({in_one_line(error)}), so whether each process "
            f"may update some of the parameters by itself is not known; {_MIRRORED}"
        ) from error
    if any(not torch.equal(alone[place], (every if place in places else before)[place]) for place in range(len(alone))):
        raise UsageError(
            f"{name} updates a parameter by what it sees of others, or without a gradient, and under central_storage "
            f"each process has the gradients of those that it updates; {_MIRRORED}"
        )


def _stepped(
    optimizer: torch.optim.Optimizer, owned: Container[int] | None
) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Returns copies of the parameters after steps on random gradients and before, and the places of the gradients."""
    memo: dict[int, Any] = {}
    other = object.__new__(type(optimizer))
    # A schedule stands in for `step`, and would step the original.
    vars(other).update({name: copy.deepcopy(value, memo) for name, value in vars(optimizer).items() if name != "step"})
    originals = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    copies = [parameter for group in other.param_groups for parameter in group["params"]]
    places = [place for place, original in enumerate(originals) if owned is None or id(original) in owned]
    drawn = torch.Generator().manual_seed(0)
    for _ in range(_STEPS):
        gradients = [torch.randn(each.shape, generator=drawn, dtype=torch.float64).to(each.dtype) for each in copies]
        for place, parameter in enumerate(copies):
            parameter.grad = gradients[place] if place in places else None
        other.step()
    return [parameter.detach() for parameter in copies], [original.detach() for original in originals], places


class SynchronizedSteps:
    """Stands around every step of an optimizer: what it steps by must be the same on all ranks."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        synchronizer: Synchronizer,
        meeting: Meeting,
        central: CentralParameters | None,
    ) -> None:
        self._synchronizer, self._meeting, self._central = synchronizer, meeting, central
        synchronizer.optimizers.append(optimizer)
        meeting.optimizers.append(optimizer)
        if central:
            central.take(optimizer)
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(
        self, optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        positional = len(arguments) > 1
        closure = arguments[1] if positional else named.get("closure")
        if closure is None:
            self._prepare(optimizer)
            return None
        common = self._common(optimizer, closure)
        if positional:
            return (arguments[0], common, *arguments[2:]), named
        return arguments, {**named, "closure": common}

    def _common(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Returns a closure that gives the loss of all processes, and leaves the gradients that a step needs."""
        calls = 0

        def common() -> Any:
            nonlocal calls
            calls += 1
            if calls > 1 and self._central:
                raise UsageError(
                    f"{type(optimizer).__name__} calls its closure more than once in a step, and under central_storage "
                    "each process sees its own parameters' changes alone; use strategy='mirrored'"
                )
            loss = closure()
            self._prepare(optimizer)
            if loss is None:
                return None
            value = loss.detach() if isinstance(loss, Tensor) else loss
            mean = self._meeting.mean(float(value), self._synchronizer.number)
            return torch.full_like(value, mean) if isinstance(value, Tensor) else mean

        return common

    def _prepare(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if self._synchronizer.foreign(parameters):
            self._compare(parameters)
        if self._central:
            self._central.leave_to_owners()

    def _compare(self, parameters: Sequence[Tensor]) -> None:
        """Raises a UsageError unless gradients that the script has assigned are equal on all ranks."""
        meeting, synchronizer = self._meeting, self._synchronizer
        meeting.meet(ASSIGNED, synchronizer.number)
        none = torch.empty(0)
        own = digests(none if parameter.grad is None else parameter.grad for parameter in parameters)
        apart = ranks_apart(own, meeting.group)
        if apart is not None:
            place, rank = apart
            raise UsageError(
                f"the gradient of {synchronizer.name(parameters[place])} is another one on rank {rank} than on rank 0 "
                f"in step {meeting.steps}, and not what backward() has left: gradients of torch.autograd.grad, and "
                "those that a script assigns, are of this process's share alone. Call loss.backward(), which makes "
                "them those of the whole batch, and change .grad after it"
            )

    def _after(self, *_: object) -> None:
        if self._central:
            self._central.end_step(self._synchronizer.checks)
        self._meeting.steps += 1
