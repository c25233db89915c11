"""The job's optimizer: built as the user wrote it, or again over pieces of the same parameters; its state in pieces."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from headrace import internals
from headrace.devices import HOST
from headrace.errors import UsageError
from headrace.spec.plan import Segment
from headrace.trees import Wrapper, as_json, cloned, from_json, map_inner, map_tensors, nbytes

Factory = Callable[..., Any]
IMPLEMENTATION = ("fused", "foreach", "capturable")
"""Options of optimizers that say how they compute, not what."""
NUMBERS = {"int": torch.int64, "float": torch.float64, "bool": torch.bool}
"""The types of numbers in an optimizer's state, as tensors."""
_FLAT = "flat"
"""The kind of a piece of what is kept flat of a parameter that is not."""
_TREE = "tree"
"""The kind of a piece that says how a collection, or what is no number, is made of the tensors after it."""


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


def build_over(
    factory: Factory,
    named: Iterable[tuple[str, Tensor]],
    owned: Sequence[tuple[Segment, Tensor]],
    values: bool = False,
    filled: bool = False,
) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
    """Builds the job's optimizer over whole parameters, and puts pieces of them in their place.

    It is the object that the factory has made, with its hooks, attributes, groups and options. Each of its parameters
    becomes the first of its pieces, without becoming another object; the others follow it in its group. One without
    pieces becomes empty, and gets no gradient, or an empty one. State that the constructor has made is cut likewise.

    Args:
        factory: the job's.
        named: all parameters of the model, whole, in order.
        owned: pieces, and where they lie.
        values: whether the optimizer is made from the values of `named`, which then stay in memory until it is made;
            else it sees zeros.
        filled: whether the empty parameters get empty gradients, for a step that takes no None.

    Returns:
        The optimizer, and its parameters in the order of `owned`, over the memory of the pieces.
    """
    there = {segment.parameter: tensor.device for segment, tensor in owned}
    device = next(iter(there.values()), None)
    whole = {name: _stand_in(tensor, there.get(name, device or tensor.device), values) for name, tensor in named}
    optimizer = build(factory, whole.items())
    places: dict[str, list[int]] = {}
    for index, (segment, _) in enumerate(owned):
        places.setdefault(segment.parameter, []).append(index)
    members: dict[int, list[nn.Parameter]] = {}
    tensors: dict[int, nn.Parameter] = {}
    stores = [store for _, store in state_stores(optimizer)]
    for name, parameter in whole.items():
        indices = places.get(name, [])
        members[id(parameter)] = _replace(parameter, [owned[index] for index in indices], stores)
        tensors |= zip(indices, members[id(parameter)], strict=False)
        if filled and not indices and parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
    # A wrapper and the optimizer in it may have one list.
    lists = {id(group["params"]): group["params"] for each in nested(optimizer).values() for group in each.param_groups}
    for parameters in lists.values():
        parameters[:] = [piece for tensor in parameters for piece in members[id(tensor)]]
    names = {id(piece): name for name, tensor in whole.items() for piece in members[id(tensor)]}
    for group in optimizer.param_groups:
        group["param_names"] = [names[id(tensor)] for tensor in group["params"]]
    return optimizer, [tensors[index] for index in range(len(owned))]


def stand_in(shape: Sequence[int], dtype: torch.dtype, device: torch.device, trainable: bool = True) -> nn.Parameter:
    """Returns a parameter of zeros that takes no memory and cannot be written to."""
    return nn.Parameter(torch.zeros((), dtype=dtype, device=device).expand(tuple(shape)), trainable)


def _stand_in(tensor: Tensor, device: torch.device, values: bool) -> nn.Parameter:
    # What a pipeline's rank has given up is another rank's.
    if values and not tensor.is_meta:
        return nn.Parameter(tensor.detach().to(device), tensor.requires_grad)
    return stand_in(tensor.shape, tensor.dtype, device, tensor.requires_grad)


def _replace(
    whole: nn.Parameter, parts: Sequence[tuple[Segment, Tensor]], stores: Sequence[StateStore]
) -> list[nn.Parameter]:
    """Lets a parameter become the first of its pieces, and returns all of them."""
    kept = [store.pop(whole, None) for store in stores]
    elements = whole.numel()
    pieces = [whole, *(nn.Parameter(part.detach()) for _, part in parts[1:])]
    for piece, (segment, part) in zip(pieces, parts, strict=False):
        piece.data = part.detach()
        for store, state in zip(stores, kept, strict=True):
            if state:
                store[piece] = {key: _cut(value, elements, segment, part) for key, value in state.items()}
    if not parts:
        whole.data = whole.new_empty((0, *whole.shape[1:]))
    return pieces


def _cut(value: Any, elements: int, segment: Segment, part: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, Wrapper) or value.numel() != elements or (value.dim() == 0 and part.dim()):
        return cloned(value)
    piece = value.detach().flatten()[segment.start : segment.stop].clone()
    return piece if value.dim() == 1 else piece.view(part.shape)


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


def require_lbfgs(factory: Factory, named: Iterable[tuple[str, Tensor]]) -> None:
    """Raises UsageError unless the optimizer is L-BFGS."""
    made = build(factory, [(name, _stand_in(tensor, tensor.device, False)) for name, tensor in named])
    if not isinstance(made, torch.optim.LBFGS):
        raise UsageError(
            f"the strategy is L-BFGS, and the job's optimizer is {type(made).__name__}; use optimizer="
            "functools.partial(torch.optim.LBFGS, line_search_fn='strong_wolfe'), or another strategy"
        )


def is_plain_sgd(optimizer: torch.optim.Optimizer) -> bool:
    """Tells whether a step is exactly `parameter -= lr * gradient`."""
    if type(optimizer) is not torch.optim.SGD:
        return False
    for group in optimizer.param_groups:
        does_more = group["momentum"] or group["weight_decay"] or group["maximize"] or group["fused"]
        if does_more or not isinstance(group["lr"], float):
            return False
    return not has_step_hooks(optimizer)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Tells whether something else is called with a step."""
    hooks = (internals.step_pre_hooks(optimizer), internals.step_post_hooks(optimizer))
    return any((*hooks, internals.global_pre_hooks, internals.global_post_hooks))


@dataclass(frozen=True)
class StatePiece:
    """A piece of optimizer state, in a form that any other split of the parameters can load.

    Attributes:
        start: first element of the flattened parameter that `value` covers; -1 if `value` belongs to the whole
            parameter (a step count, the statistics of its rows).
        value: flat; in its own shape where it belongs to the whole parameter, or is on a device and no copy.
        in_place: whether `value` is what the next update changes, and no copy of it.
    """

    parameter: str
    key: str
    start: int
    value: Tensor
    kind: str = "tensor"
    in_place: bool = False

    @classmethod
    def of(cls, parameter: str, key: str, start: int, tensor: Tensor, copies: bool = True) -> StatePiece:
        """Returns a piece of what training changes: a copy, flat; in place without `copies`, and on a device."""
        value, in_place = _taken(tensor, copies)
        return cls(parameter, key, start, value, in_place=in_place)

    @property
    def flat(self) -> Tensor:
        """The value as it is saved."""
        return self.value.flatten() if self.start >= 0 else self.value

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

    def join(self, pieces: Iterable[StatePiece]) -> Iterable[StatePiece]:
        """Returns pieces of whole parameters, on the first rank alone; all ranks of a replica call it."""

    def divide(self, pieces: Iterable[StatePiece]) -> list[StatePiece]:
        """Returns this rank's part of pieces of whole parameters."""

    def mark(self, pieces: Iterable[StatePiece]) -> tuple[StatePiece, ...]:
        """Returns pieces that `divide` gives back to this rank as they are."""


StateStore = dict[Any, dict[str, Any]]
"""What an optimizer keeps of parameters, by parameter."""


def nested(optimizer: torch.optim.Optimizer) -> dict[str, torch.optim.Optimizer]:
    """Returns the optimizer and those that it wraps, by what names of theirs begin with: "", "inner."."""
    found, waiting = {"": optimizer}, [("", optimizer)]
    for prefix, each in waiting:
        for name, value in vars(each).items():
            if isinstance(value, torch.optim.Optimizer) and all(value is not known for known in found.values()):
                found[f"{prefix}{name}."] = value
                waiting.append((f"{prefix}{name}.", value))
    return found


def state_stores(optimizer: torch.optim.Optimizer) -> list[tuple[str, StateStore]]:
    """Returns where it keeps the state of parameters, with what the keys there begin with; `state` is the first."""
    every = nested(optimizer)
    found: dict[int, tuple[str, Any]] = {id(each.state): (prefix, each.state) for prefix, each in every.items()}
    for prefix, each in every.items():
        for name, value in vars(each).items():
            if isinstance(value, dict) and all(
                isinstance(key, Tensor) and isinstance(own, dict) for key, own in value.items()
            ):
                found.setdefault(id(value), (f"{prefix}{name}.", value))
    return list(found.values())


def state_pieces(
    optimizer: torch.optim.Optimizer, owned: Sequence[tuple[Segment, Tensor]], copies: bool = True
) -> tuple[StatePiece, ...]:
    """Returns the state of the pieces that this process updates: tensors, numbers, texts, and collections of them.

    Without `copies`, and on a device, the pieces are in place. Raises a `UsageError` where it is something else.
    """
    found: list[StatePiece] = []
    for prefix, store in state_stores(optimizer):
        for segment, tensor in owned:
            for key, value in store.get(tensor, {}).items():
                try:
                    found += _pieces_of(segment, f"{prefix}{key}", value, tensor, copies)
                except TypeError as error:
                    raise UsageError(
                        f"{type(optimizer).__name__} keeps {error} as {key!r} of {segment.parameter!r}, which no "
                        "checkpoint can hold; keep tensors and numbers, or run with checkpoints=False"
                    ) from None
    return tuple(found)


def _pieces_of(segment: Segment, key: str, value: Any, tensor: Tensor, copies: bool) -> Iterator[StatePiece]:
    kind, tensors = type(value).__name__, [value]
    if kind in NUMBERS:
        yield StatePiece(segment.parameter, key, -1, torch.tensor(value, dtype=NUMBERS[kind]), kind)
        return
    keys: Iterable[str] = [key]
    if type(value) not in (Tensor, nn.Parameter):
        form = json.dumps(as_json(value, tensors := []))
        yield StatePiece(segment.parameter, key, -1, torch.tensor(list(form.encode()), dtype=torch.uint8), _TREE)
        keys = (f"{key}~{index}" for index in range(len(tensors)))
    for name, each in zip(keys, tensors, strict=True):
        sized = each.dim() > 0 and each.shape in (tensor.shape, (tensor.numel(),))
        kept, in_place = _taken(each, copies, flat=sized)
        form = _FLAT if sized and each.shape != tensor.shape else "tensor"
        yield StatePiece(segment.parameter, name, segment.start if sized else -1, kept, form, in_place)


def _taken(tensor: Tensor, copies: bool, flat: bool = True) -> tuple[Tensor, bool]:
    """Returns what a piece has of a tensor, and whether it is the tensor itself: on a device, or without `copies`."""
    if tensor.device.type != HOST:
        return tensor.detach(), True  # a flat form might be a copy
    kept = tensor.detach().clone() if copies else tensor.detach()
    return kept.flatten() if flat else kept, not copies


def first_state(optimizer: torch.optim.Optimizer) -> list[tuple[str, StateStore]]:
    """Returns a copy of the state that an optimizer makes in its constructor; most make none there."""
    return [
        (prefix, {key: map_tensors(cloned, state) for key, state in store.items() if isinstance(key, Tensor)})
        for prefix, store in state_stores(optimizer)
    ]


def load_state(
    optimizer: torch.optim.Optimizer,
    owned: Sequence[tuple[Segment, Tensor]],
    pieces: Iterable[StatePiece],
    first: Sequence[tuple[str, StateStore]] = (),
) -> None:
    """Replaces the state of the pieces that this process updates by `pieces`, however these are cut.

    A parameter without pieces gets its `first_state`.
    """
    begun, found = dict(first), by_parameter(pieces)
    stores = dict(state_stores(optimizer))
    for segment, tensor in owned:
        states: dict[str, dict[str, Any]] = {prefix: {} for prefix in stores}
        for piece in found.get(segment.parameter, ()):
            prefix = max((each for each in stores if piece.key.startswith(each)), key=len)
            _put(states[prefix], piece, piece.key.removeprefix(prefix), segment, tensor)
        for prefix, store in stores.items():
            state, beginning = states[prefix], begun.get(prefix, {}).get(tensor)
            for key, form in [each for each in state.items() if isinstance(each[1], _Tree)]:
                made = from_json(form.content, lambda index, key=key, state=state: state.pop(f"{key}~{index}"))  # type: ignore[misc]
                state[key] = map_tensors(partial(_beside, tensor), made)
            if state or beginning is not None:
                store[tensor] = state or map_tensors(cloned, beginning)
            else:
                store.pop(tensor, None)


def _beside(tensor: Tensor, made: Tensor) -> Tensor:
    """Moves what a tensor is made of to the device of the parameter that it is the state of."""
    return map_inner(lambda inner: inner.to(tensor.device), made) if isinstance(made, Wrapper) else made


@dataclass(frozen=True)
class _Tree:
    """What `as_json` has made of a collection, until its tensors are there."""

    content: Any


def _put(state: dict[str, Any], piece: StatePiece, key: str, segment: Segment, tensor: Tensor) -> None:
    if piece.kind == _TREE:
        state[key] = _Tree(json.loads(bytes(piece.value.tolist())))
    elif piece.start < 0:
        place = HOST if key == "step" else tensor.device  # as torch loads it
        state[key] = piece.value.to(place, copy=True) if piece.kind == "tensor" else piece.value.item()
    else:
        # In the parameter's order of memory, which fused kernels count on.
        target = torch.zeros_like(tensor, dtype=piece.value.dtype, requires_grad=False)
        piece.copy_to(state.setdefault(key, target.flatten() if piece.kind == _FLAT else target), segment.start)


def by_parameter(pieces: Iterable[StatePiece]) -> dict[str, list[StatePiece]]:
    """Returns the pieces of each parameter."""
    found: dict[str, list[StatePiece]] = {}
    for piece in pieces:
        found.setdefault(piece.parameter, []).append(piece)
    return found


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Returns the bytes that the optimizer's state takes."""
    return sum(nbytes(list(store.values())) for _, store in state_stores(optimizer))
