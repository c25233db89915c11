"""The job's optimizer: built as the user wrote it, or again over pieces of the same parameters; its state in pieces."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headrace import internals
from headrace.errors import UsageError
from headrace.spec.plan import Segment

Factory = Callable[..., Any]
IMPLEMENTATION = ("fused", "foreach", "capturable")
"""Options of optimizers that say how they compute, not what."""
NUMBERS = {"int": torch.int64, "float": torch.float64, "bool": torch.bool}
"""The types of numbers in an optimizer's state, as tensors."""


def build(factory: Factory, named: Iterable[tuple[str, Tensor]]) -> torch.optim.Optimizer:
    """Calls the job's optimizer factory with named parameters; it must return an optimizer over these alone."""
    named = list(named)
    try:
        optimizer = factory(named)
    except (TypeError, AttributeError) as named_error:
        # Optimizers from before torch 2.6 know plain tensors alone.
        try:
            optimizer = factory([parameter for _, parameter in named])
        except (TypeError, AttributeError):
            raise named_error from None
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(
            f"the job's optimizer must return a torch.optim.Optimizer, got {type(optimizer).__name__}; "
            "for example optimizer=functools.partial(torch.optim.SGD, lr=0.1)"
        )
    names = {id(parameter): name for name, parameter in named}
    strange = sum(id(tensor) not in names for group in optimizer.param_groups for tensor in group["params"])
    if strange:
        raise UsageError(
            f"{strange} of the tensors in the job's {type(optimizer).__name__} are not parameters of the model that "
            "is trained; make it from the named parameters that the function is given"
        )
    for group in optimizer.param_groups:
        # A function that makes groups of plain tensors loses their names.
        group["param_names"] = [names[id(tensor)] for tensor in group["params"]]
    return optimizer


def build_over(template: torch.optim.Optimizer, pieces: Mapping[str, Sequence[Tensor]]) -> torch.optim.Optimizer:
    """Builds an optimizer like `template` over pieces of its parameters, by name.

    `template` is built over whole parameters, possibly on the meta device; it gives the class, the groups and options.
    Raises a `UsageError` if the optimizer's class cannot be built from its own defaults.
    """
    groups, names = [], []
    for group in template.param_groups:
        tensors = [piece for name in group["param_names"] for piece in pieces.get(name, ())]
        if tensors:
            names.append(group["param_names"])
            options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            groups.append({**options, "params": tensors})
    kind = type(template)
    known = inspect.signature(kind).parameters
    defaults = {key: value for key, value in template.defaults.items() if key in known}
    if not groups:
        # A matrix, because some optimizers (Muon) take nothing else.
        groups = [{"params": [torch.zeros(0, 0, requires_grad=True)]}]
    try:
        optimizer = kind(groups, **defaults)
    except TypeError as error:
        raise UsageError(
            f"{kind.__name__} cannot be built again over pieces of the parameters from its defaults {defaults}: "
            f"{error}; use a strategy that keeps parameters whole (mirrored), or give the class's own arguments"
        ) from error
    for group, whole in zip(optimizer.param_groups, names, strict=False):
        # Names which of the template's groups it is; a rank that owns nothing has a group without a name.
        group["param_names"] = whole
    return optimizer


def prefer_fused(optimizer: torch.optim.Optimizer) -> None:
    """Lets Adam and AdamW update in one pass over memory, without temporary tensors, unless the job says how.

    On CPUs that takes a sixth of the time of torch's default. The result differs by a last bit; a job that says
    `foreach=False` keeps the default's.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        said = group["fused"] is not None or group["foreach"] is not None or group["capturable"]
        if not said and not group["differentiable"]:
            group["fused"] = all(tensor.is_floating_point() for tensor in group["params"]) or None


def build_over_owned(template: torch.optim.Optimizer, owned: Iterable[tuple[Segment, Tensor]]) -> torch.optim.Optimizer:
    """Builds an optimizer like `template` over segments of its parameters; see `build_over`."""
    by_name: dict[str, list[Tensor]] = {}
    for segment, piece in owned:
        by_name.setdefault(segment.parameter, []).append(piece)
    return build_over(template, by_name)


def is_elementwise(factory: Factory, named: Iterable[tuple[str, Tensor]]) -> bool:
    """Tells whether the optimizer treats every element alone; refuses one whose `step()` needs an argument (LBFGS)."""
    template = build(factory, [(name, _ghost(tensor)) for name, tensor in named])
    if isinstance(template, torch.optim.LBFGS):
        raise UsageError(
            "LBFGS.step() evaluates the loss several times, in a closure, and only one strategy does that; use "
            "hr.Sandblaster(workers=2) (--strategy sandblaster), or another optimizer"
        )
    return all(_treats_elements_alone(template, name) for name in _tried(template))


def require_lbfgs(factory: Factory, named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises UsageError unless the optimizer is L-BFGS."""
    made = build(factory, [(name, _ghost(tensor)) for name, tensor in named])
    if not isinstance(made, torch.optim.LBFGS):
        raise UsageError(
            f"the strategy is L-BFGS, and the job's optimizer is {type(made).__name__}; use optimizer="
            "functools.partial(torch.optim.LBFGS, line_search_fn='strong_wolfe'), or another strategy"
        )


def state_copies(factory: Factory, named: Iterable[tuple[str, Tensor]]) -> int:
    """Returns how many tensors of a parameter's size the optimizer keeps of it, in the group that keeps most.

    SGD none, with momentum 1, Adam 2; 1 for an optimizer that cannot step over a usual matrix (of sparse ones alone).
    """
    template = build(factory, [(name, _ghost(tensor)) for name, tensor in named])
    most = 0
    for name in _tried(template):
        parameter = nn.Parameter(torch.ones(6, 8))
        parameter.grad = torch.ones(6, 8)
        optimizer = build_over(template, {name: [parameter]})
        try:
            optimizer.step()
        except (RuntimeError, ValueError):
            most = max(most, 1)
        kept = (value for value in optimizer.state[parameter].values() if isinstance(value, Tensor))
        most = max(most, sum(value.numel() == parameter.numel() for value in kept))
    return most


def _tried(template: torch.optim.Optimizer) -> list[str]:
    """Returns the name of one parameter for all groups that differ in nothing but the learning rate."""
    tried = {}
    for group in template.param_groups:
        if group["params"]:
            options = {key: value for key, value in group.items() if key not in ("params", "param_names", "lr")}
            tried[repr(options)] = group["param_names"][0]
    return list(tried.values())


def _treats_elements_alone(template: torch.optim.Optimizer, name: str) -> bool:
    """Compares three steps on a whole tensor with those on a cut one."""
    whole = torch.linspace(-1, 1, 48).view(6, 8)
    start = [[whole.clone()], [piece.clone() for piece in whole.flatten().split([20, 28])]]
    results = []
    for tensors in start:
        parameters = [nn.Parameter(tensor) for tensor in tensors]
        try:
            optimizer = build_over(template, {name: parameters})
            for group in optimizer.param_groups:
                if "lr" in group:
                    group["lr"] = 0.1  # a run that warms up may begin with 0, and then nothing would move
            for step in range(3):
                gradient = torch.sin(torch.arange(48.0) * (step + 1))
                for parameter, piece in zip(parameters, gradient.split([p.numel() for p in parameters]), strict=True):
                    parameter.grad = piece.view_as(parameter).clone()
                optimizer.step()
        except TypeError as error:
            raise UsageError(
                f"{type(template).__name__}.step() cannot be called by itself: {error}; optimizers that need a "
                "closure cannot be used here"
            ) from error
        except (RuntimeError, ValueError):
            return False  # refuses vectors: it needs whole matrices
        results.append(torch.cat([parameter.detach().flatten() for parameter in parameters]))
    # Not to the last bit: fused kernels round the ends of a tensor in another way than its middle.
    whole_result, cut_result = results
    return torch.allclose(whole_result, cut_result, rtol=1e-4, atol=1e-5)


def _ghost(tensor: Tensor) -> nn.Parameter:
    ghost = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(ghost, requires_grad=tensor.requires_grad)


def is_plain_sgd(optimizer: torch.optim.Optimizer) -> bool:
    """Tells whether a step is exactly `parameter -= lr * gradient`."""
    if type(optimizer) is not torch.optim.SGD or any(map(_does_more, optimizer.param_groups)):
        return False
    hooks = (internals.step_pre_hooks(optimizer), internals.step_post_hooks(optimizer))
    return not any((*hooks, internals.global_pre_hooks, internals.global_post_hooks))


def _does_more(group: dict[str, Any]) -> bool:
    adds = group["momentum"] or group["weight_decay"] or group["maximize"] or group["fused"]
    return bool(adds) or not isinstance(group["lr"], float)


@dataclass(frozen=True)
class StatePiece:
    """A piece of optimizer state, in a form that any other split of the parameters can load.

    Attributes:
        start: first element of the flattened parameter that `value` covers; -1 if `value` belongs to the whole
            parameter (a step count, the statistics of its rows).
        value: flat; in its own shape where it belongs to the whole parameter.
    """

    parameter: str
    key: str
    start: int
    value: Tensor
    kind: str = "tensor"

    @property
    def name(self) -> str:
        """Its name in files and messages; `parse` reads it."""
        return f"{self.parameter}/{self.key}@{self.start}" + f"#{self.kind}" * (self.kind != "tensor")

    @classmethod
    def parse(cls, name: str, value: Tensor) -> StatePiece:
        """Returns the piece of that name. Raises a `ValueError` if no piece has such a name."""
        head, _, tail = name.rpartition("@")
        start, _, kind = tail.partition("#")
        parameter, _, key = head.rpartition("/")
        if int(start) < -1:
            raise ValueError(f"{name} begins before its parameter")
        return cls(parameter, key, int(start), value, kind or "tensor")

    def copy_to(self, target: Tensor, start: int) -> None:
        """Copies what this piece covers into a tensor that begins with the parameter's element `start`."""
        low, high = max(start, self.start), min(start + target.numel(), self.start + self.value.numel())
        if low < high:
            dense = target.contiguous()  # weights in channels-last order have others
            dense.view(-1)[low - start : high - start].copy_(self.value[low - self.start : high - self.start])
            if dense is not target:
                target.copy_(dense)


class StateSlices(Protocol):
    """How the optimizer state of a replica's ranks, of which each holds slices of parameters, becomes whole."""

    def join(self, pieces: Iterable[StatePiece]) -> tuple[StatePiece, ...]:
        """Returns pieces of whole parameters, on the first rank alone; all ranks of a replica call it."""

    def divide(self, pieces: Iterable[StatePiece]) -> list[StatePiece]:
        """Returns this rank's part of pieces of whole parameters."""

    def mark(self, pieces: Iterable[StatePiece]) -> tuple[StatePiece, ...]:
        """Returns pieces that `divide` gives back to this rank as they are."""


def state_pieces(
    optimizer: torch.optim.Optimizer, owned: Sequence[tuple[Segment, Tensor]], copies: bool = True
) -> tuple[StatePiece, ...]:
    """Returns the state of the pieces that this process updates; all of it must be tensors and numbers.

    Without `copies` the next update changes it.
    """
    pieces = []
    for segment, tensor in owned:
        for key, value in optimizer.state.get(tensor, {}).items():
            if not isinstance(value, Tensor):
                pieces.append(_number(segment, key, value, optimizer))
                continue
            kept = value.detach().clone() if copies else value.detach()
            whole = kept.numel() != tensor.numel() or kept.dim() == 0
            start, kept = (-1, kept) if whole else (segment.start, kept.flatten())
            pieces.append(StatePiece(segment.parameter, key, start, kept))
    return tuple(pieces)


def _number(segment: Segment, key: str, value: Any, optimizer: torch.optim.Optimizer) -> StatePiece:
    kind = type(value).__name__
    if kind not in NUMBERS:
        raise UsageError(
            f"{type(optimizer).__name__} keeps a {kind} as {key!r} of {segment.parameter!r}, which no checkpoint can "
            "hold; keep tensors and numbers, or run with checkpoints=False"
        )
    return StatePiece(segment.parameter, key, -1, torch.tensor(value, dtype=NUMBERS[kind]), kind)


def first_state(optimizer: torch.optim.Optimizer) -> dict[Tensor, dict[str, Any]]:
    """Returns a copy of the state that an optimizer makes in its constructor, by parameter; most make none there."""
    return {tensor: _copied(state) for tensor, state in optimizer.state.items()}


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}


def load_state(
    optimizer: torch.optim.Optimizer,
    owned: Sequence[tuple[Segment, Tensor]],
    pieces: Iterable[StatePiece],
    first: Mapping[Tensor, Mapping[str, Any]],
) -> None:
    """Replaces the state of the pieces that this process updates by `pieces`, however these are cut.

    A parameter without pieces gets its `first_state`.
    """
    found = by_parameter(pieces)
    for segment, tensor in owned:
        state: dict[str, Any] = {}
        for piece in found.get(segment.parameter, ()):
            if piece.start < 0:
                state[piece.key] = piece.value.clone() if piece.kind == "tensor" else piece.value.item()
                continue
            # In the parameter's order of memory, which fused kernels count on.
            target = state.setdefault(piece.key, torch.zeros_like(tensor, dtype=piece.value.dtype, requires_grad=False))
            piece.copy_to(target, segment.start)
        if state:
            optimizer.state[tensor] = state
        elif tensor in first:
            optimizer.state[tensor] = _copied(first[tensor])
        else:
            optimizer.state.pop(tensor, None)


def by_parameter(pieces: Iterable[StatePiece]) -> dict[str, list[StatePiece]]:
    """Returns the pieces of each parameter."""
    found: dict[str, list[StatePiece]] = {}
    for piece in pieces:
        found.setdefault(piece.parameter, []).append(piece)
    return found


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes that the optimizer's state takes."""
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
