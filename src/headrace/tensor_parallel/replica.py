"""One rank's part of a split model: of each tensor, and how it computes, saves and loads together with the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from headrace.collectives.base import Collective, ProcessGroup
from headrace.collectives.threads import ThreadCollective
from headrace.devices import HOST
from headrace.errors import UsageError
from headrace.machine.generators import random_state, set_random_state
from headrace.metrics import Mean
from headrace.modules import parameters_and_buffers
from headrace.spec.job import Share
from headrace.spec.model import ModelSpec
from headrace.tensor_parallel.collectives import all_gather
from headrace.tensor_parallel.rules import any_number
from headrace.training.clipping import LossScale
from headrace.training.compute import Compute, Computed
from headrace.training.gradients import GradientSink
from headrace.training.optimizer import StatePiece
from headrace.training.user_code.trained import ReadGradients
from headrace.training.whole_model import ModelParallelGroup

_SHOWN = 6
"""Names of layers in a line for the user, of each rule."""

_PART = "headrace.part-"
"""What the keys of pieces begin with that are of a rank's part, and of no use to others."""


@dataclass(frozen=True)
class ShardDim:
    """Gives every rank an equal part along one dim.

    Along it lie `blocks` matrices, each cut by itself: the three of an attention's `in_proj_weight`.
    """

    dim: int
    blocks: int = 1

    def take(self, whole: Tensor, rank: int, world: int) -> Tensor:
        """Returns a rank's part of a whole tensor, a view where that is possible."""
        each: Tensor = whole.unflatten(self.dim, (self.blocks, world, -1))
        return each.select(self.dim + 1, rank).flatten(self.dim, self.dim + 1)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns the whole tensor of all ranks' parts, in their order."""
        blocks = [part.unflatten(self.dim, (self.blocks, -1)) for part in parts]
        return torch.stack(blocks, self.dim + 1).flatten(self.dim, self.dim + 2)

    def run(self, shape: Sequence[int], world: int) -> int:
        """Returns how many elements of a part of a tensor of such a shape lie together in it: every `world`-th run."""
        return math.prod(shape[self.dim :]) // (self.blocks * world)

    def place(self, parts: Sequence[Tensor], start: int, shape: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Yields pieces of the whole tensor, flat, and where each begins, of the same rows of all ranks' parts.

        `parts` are these rows by rank, flat; they begin with element `start` of parts of such a `shape`.
        """
        row = math.prod(shape[1:])
        if self.dim or len(parts[0]) == shape[0] * row:
            whole = self.join([part.view(-1, *shape[1:]) for part in parts])
            yield start * len(parts), whole.flatten()
            return
        # Of each matrix a rank has some rows, which lie together.
        length, stop = shape[0] // self.blocks * row, start + len(parts[0])
        for block in range(start // length, -(-stop // length)):
            low, high = max(start, block * length), min(stop, (block + 1) * length)
            for rank, part in enumerate(parts):
                yield low + (block * (len(parts) - 1) + rank) * length, part[low - start : high - start]


@dataclass(frozen=True)
class RewrittenModel:
    """A model of which this rank holds a part, and how its tensors are cut.

    `cuts` are those of parameters, by name; all others are whole on every rank. `shapes` are those of whole tensors;
    `device` is where `group` takes tensors; `notices` say what was left whole, and why.
    """

    module: nn.Module
    group: Collective
    cuts: Mapping[str, ShardDim]
    shapes: Mapping[str, tuple[int, ...]]
    kinds: Mapping[str, str]
    device: torch.device
    notices: tuple[str, ...] = ()

    @property
    def runs(self) -> dict[str, int]:
        """How many elements of each parameter that is cut lie together."""
        return {name: cut.run(self.shapes[name], self.group.world) for name, cut in self.cuts.items()}

    @property
    def repeated(self) -> frozenset[str]:
        """Names of the parameters that every rank holds."""
        return frozenset(self.shapes.keys() - self.cuts.keys())

    def __str__(self) -> str:
        """Says what was split, and how much of the parameters this rank holds."""
        world = self.group.world
        if not self.kinds and self.notices:
            return f"nothing of the model is split over {world} devices: each computes all of it"
        if not self.kinds:
            return f"nothing of the model can be divided evenly among {world} devices: each computes all of it"
        named: dict[str, dict[str, None]] = {}
        for name, kind in self.kinds.items():
            named.setdefault(kind, {})[any_number(name) or "the model"] = None
        said = [
            f"{kind} {', '.join(list(names)[:_SHOWN])}{' ...' * (len(names) > _SHOWN)}" for kind, names in named.items()
        ]
        held = sum(parameter.numel() for parameter in self.module.parameters())
        whole = sum(math.prod(shape) for shape in self.shapes.values())
        return f"split over {world} devices: {'; '.join(said)}; each holds {held / max(1, whole):.0%} of the parameters"

    def whole_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every parameter and buffer whole, by checkpoint name, on the first rank; all ranks do it together."""
        yield from self.joined(parameters_and_buffers(self.module))

    def joined(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yields tensors of which each rank has its part, whole, on the first rank; all ranks have the same names."""
        for name, tensor in tensors:
            cut = self.cuts.get(name.partition("/")[2])
            whole = tensor if cut is None else cut.join(self._every(tensor))
            if self.group.rank == 0:
                yield name, whole

    def join(self, pieces: Iterable[StatePiece]) -> Iterator[StatePiece]:
        """Yields what `everywhere` does, on the first rank alone; all of it is to be taken on all ranks."""
        for piece in self.everywhere(pieces):
            if self.group.rank == 0:
                yield piece

    def everywhere(self, pieces: Iterable[StatePiece]) -> Iterator[StatePiece]:
        """Yields pieces of whole parameters, of all ranks' pieces of their parts, one at a time: a device may be full.

        All ranks have pieces of the same names, places and lengths, in the same order: of whole parts, or of rows of
        them.
        """
        for piece in pieces:
            cut = self.cuts.get(piece.parameter)
            if cut is None or piece.start < 0:
                yield piece
                continue
            part = self.part_shape(piece.parameter)
            every = self._every(piece.value.flatten())
            for start, value in cut.place(every, piece.start, part):
                yield replace(piece, start=start, value=value, in_place=False)
            del every

    def mark(self, pieces: Iterable[StatePiece]) -> tuple[StatePiece, ...]:
        """Returns pieces that `divide` gives back to this rank as they are."""
        return tuple(replace(piece, key=_PART + piece.key) for piece in pieces)

    def divide(self, pieces: Iterable[StatePiece]) -> list[StatePiece]:
        """Returns this rank's part of pieces of whole parameters, however these were cut before."""
        found, own, wholes = [], [], dict[tuple[str, str], Tensor]()
        for piece in pieces:
            if piece.key.startswith(_PART):
                own.append(replace(piece, key=piece.key.removeprefix(_PART)))
                continue
            if piece.parameter not in self.cuts or piece.start < 0:
                found.append(piece)
                continue
            key = (piece.parameter, piece.key)
            if key not in wholes:
                wholes[key] = piece.value.new_zeros(self.shapes[piece.parameter])
            piece.copy_to(wholes[key], 0)
        for (name, kind), whole in wholes.items():
            part = self.cuts[name].take(whole, self.group.rank, self.group.world)
            found.append(StatePiece(name, kind, 0, part.flatten().clone()))
        # Last, because it replaces what is the same on all ranks.
        return [*found, *own]

    def part_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of this rank's part of a parameter."""
        shape = list(self.shapes[name])
        shape[self.cuts[name].dim] //= self.group.world
        return tuple(shape)

    def _every(self, part: Tensor) -> tuple[Tensor, ...]:
        """Returns the part of each rank."""
        return all_gather(part.detach().to(self.device).unsqueeze(0), 0, self.group).unbind()


class SlicedReplica(ModelParallelGroup):
    """One rank's slices of the layers of a replica."""

    def __init__(
        self, split: RewrittenModel, group: ProcessGroup, everyone: ProcessGroup, mates: ProcessGroup, model: ModelSpec
    ) -> None:
        self.group = group
        self.everyone = everyone
        self.model = model
        self.slices = self._split = split
        self._mates = mates
        self.repeated, self.times = split.repeated, group.world

    def compute(self, whole: Callable[[], Compute], sink: GradientSink | None, scale: LossScale | None) -> Compute:
        compute = SplitModel(whole(), self._split, self._mates)
        if self.everyone.rank == 0:
            compute.notes = (str(self._split), *self._split.notices)
        return compute

    def spread(self) -> None:
        for name, parameter in self._split.module.named_parameters():
            if name in self.repeated and parameter.requires_grad:
                dense = parameter.data.contiguous()
                self.group.broadcast(dense)
                parameter.data.copy_(dense)


class SplitModel(Compute):
    """Computes with slices of layers; `mates` are the ranks that hold the same slice."""

    divided = True

    def __init__(self, whole: Compute, split: RewrittenModel, mates: ProcessGroup) -> None:
        self.module, self.device = whole.module, whole.device
        self.counts = whole.counts and split.group.rank == 0
        self.mates = mates
        self._whole = whole
        self._split = split
        self._aligned = False
        trained = {name: each for name, each in whole.module.named_parameters() if each.requires_grad}
        self._gradients = ReadGradients(trained, "a device has slices of parameters")
        # Before the first forward, which may be one in the user's own loop. ScriptModules take no hooks.
        if not isinstance(whole.module, torch.jit.ScriptModule):
            whole.module.register_forward_pre_hook(self._align)

    def run(self, share: Share) -> Computed:
        self._align()
        computed = self._loss_of_one(self._whole.run(share))
        self.moved_bytes, self.in_flight, self.passes = (
            self._whole.moved_bytes,
            self._whole.in_flight,
            self._whole.passes,
        )
        return computed

    def backward(self, loss: Tensor | Mean, share: Share, adds: bool = False) -> Computed:
        if adds:
            self._gradients.require_unchanged()
        computed = self._loss_of_one(self._whole.backward(loss, share, adds))
        self._gradients.look()
        return computed

    def send(self, share: Share) -> None:
        self._gradients.require_unchanged()
        self._whole.send(share)

    def predict(self, batch: Any) -> Any:
        return self._whole.predict(batch)

    def attend(self) -> None:
        self._whole.attend()

    def explained(self, error: Exception) -> UsageError | None:
        return self._whole.explained(error)

    def equal_parameters(self) -> Iterator[tuple[str, Tensor]]:
        return self._whole.equal_parameters()

    def whole_tensors(self, leads: bool) -> Iterator[tuple[str, Tensor]]:
        yield from self._split.joined(self._whole.whole_tensors(leads))

    def has_state_of(self, module: str) -> bool:
        return self._whole.has_state_of(module)

    def _loss_of_one(self, computed: Computed) -> Computed:
        """Leaves the loss to the rank that counts."""
        return computed if self.counts else replace(computed, loss=None)

    def _align(self, *_: object) -> None:
        """Gives all ranks the first one's generator states: what all of them draw must be the same."""
        if self._aligned:
            return
        self._aligned = True
        group, device = self._split.group, self.device
        if not isinstance(group, ThreadCollective):
            torch.set_rng_state(_broadcast_rng_state(torch.get_rng_state(), group, device))
        if device.type != HOST:
            set_random_state(_broadcast_rng_state(random_state(device), group, device), device)


def _broadcast_rng_state(state: Tensor, group: Collective, device: torch.device) -> Tensor:
    sent = state.to(device)
    group.broadcast(sent)
    return sent.cpu()
