"""A model whose parameters are divided among the workers by torch's `fully_shard`, and this worker's part of them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from headrace import internals
from headrace.collectives.base import Collective, ProcessGroup
from headrace.devices import synchronize
from headrace.errors import UnfitMachine, UsageError
from headrace.fully_sharded.forms import FrozenForms
from headrace.fully_sharded.link import CollectiveLink, OwnGradients, SharedLink, UnitGather, UnitLink, UnitScatter
from headrace.fully_sharded.units import is_kept_whole, unit_parameters, written
from headrace.hooks import hooks_of
from headrace.modules import memory_of, parameters_and_buffers
from headrace.training.buckets import sum_over
from headrace.training.gradients import divide
from headrace.trees import map_tensors

_numbers = itertools.count()


def mesh_of(group: ProcessGroup, device: torch.device, closing: ExitStack) -> DeviceMesh:
    """Returns the mesh of a group's ranks, which only says who they are: the group itself moves what they exchange.

    torch's own would be one a process, and needs a connection to each.
    """
    name: Any = f"headrace-{os.getpid()}-{next(_numbers)}"
    mesh = DeviceMesh(device.type, torch.arange(group.world), _init_backend=False, _rank=group.rank)
    # torch's stub lacks this constructor.
    new_group: Any = dist.ProcessGroup
    ranks = new_group(group.rank, group.world)
    internals.name_ranks(mesh, name, ranks)
    closing.callback(internals.unregister_process_group, name)
    return mesh


@dataclass(frozen=True)
class UnitForm:
    """How units are kept: released between forward and backward, gathered in the type `half`, parts on the host."""

    reshard: bool = True
    half: torch.dtype | None = None
    offload: bool = False


class ShardedModule:
    """A module, sharded in place, unit by unit.

    `carrier` moves what the ranks exchange; None for the memory that they share. Units are gathered, and gradients
    summed, in the type `half`, if it is not None. `fill` gives memory to named parameters that have none, before a unit
    is divided, and gives back what is free. With `offload` its part of the parameters and of their gradients lies in
    pinned memory of the host. `others` are as of `OwnGradients`.

    Attributes:
        pieces: this rank's part of each trained parameter, flat, by name; it is empty where there are more ranks than
            rows. Of a parameter without rows every rank has the whole.
        whole: names of those.
        unit_bytes: of each unit, by name, when it is gathered; "" is the rest of the model.
        own: what is known of this rank's gradients since `begin`.
        seen: names of the parameters that it has made one of.
        device: where the module is.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Sequence[str],
        group: ProcessGroup,
        carrier: Collective | None,
        form: UnitForm,
        closing: ExitStack,
        fill: Callable[[Sequence[str]], None] = lambda names: None,
        others: Collection[str] = (),
    ) -> None:
        fill([name for name, each in module.named_parameters() if is_kept_whole(each)])
        self.module = module
        self.half = form.half
        placed = (each.device for each in module.parameters() if not each.is_meta)
        self.device = next(placed, torch.device("cpu"))
        self.own = OwnGradients(others)
        self.seen = self.own.seen
        self._group = group
        self._carrier: Collective = carrier or group
        self._shapes = {name: each.shape for name, each in module.named_parameters()}
        kept = {name: each for name, each in module.named_parameters() if is_kept_whole(each)}
        self.whole = frozenset(kept)
        named = unit_parameters(module, units)
        self.unit_bytes = {unit: self._bytes(parameters) for unit, parameters in named.items()}
        summed = max(self._bytes(parameters, trained=True) for parameters in named.values())
        names = [list(parameters) for parameters in named.values()]
        # A reference to a parameter as it was keeps the whole of it in memory.
        del named
        largest = max(self.unit_bytes.values()) if group.world > 1 else 0
        units = tuple(self.unit_bytes)
        self._link: UnitLink = (
            CollectiveLink(group, units, carrier, self.device)
            if carrier
            else SharedLink(group, units, largest, summed if group.world > 1 else 0)
        )
        guards = [
            _WriteGuard([name for name in each if name not in kept], unit)
            for unit, each in zip(units, names, strict=True)
        ]
        self._fill = fill
        self._forms = FrozenForms(module)
        self._offload = form.offload
        self._parts = self._shard(units, names, guards, set(kept.values()), form.reshard, closing)
        self._guards = guards
        self._watch(names)
        self._parameters = dict(module.named_parameters())
        self._hooks = {name: hooks_of(self._parameters[name]) for name in self.whole}
        self.pieces = {
            name: each if name in kept else nn.Parameter(_local(each))
            for name, each in self._parameters.items()
            if each.requires_grad
        }

    def _bytes(self, parameters: Mapping[str, nn.Parameter], trained: bool = False) -> int:
        """Returns the bytes of a unit that is gathered, or of what is `trained` of it."""
        return sum(
            _padded(each.shape, self._group.world)
            * (self.half if self.half and each.is_floating_point() else each.dtype).itemsize
            for each in parameters.values()
            if each.requires_grad or not trained
        )

    def _shard(
        self,
        units: Sequence[str],
        names: Sequence[Sequence[str]],
        guards: Sequence[_WriteGuard],
        whole: set[nn.Parameter],
        reshard: bool,
        closing: ExitStack,
    ) -> list[Any]:
        require_unused_summed()
        mesh = mesh_of(self._group, self.device, closing)
        casts = MixedPrecisionPolicy(param_dtype=self.half)
        # The loss is not computed in half precision.
        widens = MixedPrecisionPolicy(param_dtype=self.half, output_dtype=torch.float32) if self.half else casts
        place = CPUOffloadPolicy() if self._offload else OffloadPolicy()
        parts = []
        for index, unit in enumerate(units):
            # Now, so that no more than one unit is there whole.
            self._fill(names[index])
            self._forms.take_off(names[index])
            part = self.module.get_submodule(unit)
            # Before torch's own hook, which would be lost where what it hangs on is changed in place, and which
            # releases the parameters; torch's own that gathers them goes first.
            part.register_forward_pre_hook(guards[index].begin)
            part.register_forward_hook(guards[index].end)
            part.register_forward_hook(_own_outputs)
            # The rest of the model is needed first in backward, so it stays.
            policy = casts if unit else widens
            fully_shard(
                part,
                mesh=mesh,
                reshard_after_forward=reshard and bool(unit),
                mp_policy=policy,
                offload_policy=place,
                ignored_params=whole,
            )
            self._forms.carry(names[index])
            part.register_forward_pre_hook(guards[index].require_places, prepend=True)
            assert isinstance(part, FSDPModule)
            part.set_custom_all_gather(cast(Any, UnitGather(self._link, index)))
            part.set_custom_reduce_scatter(cast(Any, UnitScatter(self._link, index)))
            if not self._carrier.queued:
                # Nothing would go on meanwhile, and the next unit would take memory: in the place of it comes this one.
                part.set_modules_to_backward_prefetch([part])
            # Losses are weighed by each rank's part of the global batch already.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
            part.set_reduce_scatter_unused_params(True, recurse=False)
            parts.append(part)
        return parts

    def _watch(self, names: Sequence[Sequence[str]]) -> None:
        """Notes of which parameters there is a gradient."""
        for part, its_own in zip(self._parts, names, strict=True):
            part.unshard()
            self._forms.put_on(part, its_own)
            for name in its_own:
                whole = self.module.get_parameter(name)
                if whole.requires_grad:
                    whole.register_post_accumulate_grad_hook(partial(self.own.note, name))
            part.reshard()
            self._fill(())

    def begin(self) -> None:
        """Forgets the gradients of the last step."""
        self.own.seen.clear()
        for name in self.pieces:
            self._parameters[name].grad = self.pieces[name].grad = None

    def hooked(self) -> list[str]:
        """Returns the names of the parameters that user code has hung hooks on, which would see no gradient."""
        pairs = self._parameters.items()
        return [name for name, parameter in pairs if hooks_of(parameter) != self._hooks.get(name, ((), ()))]

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Takes part in what the others compute, without gradients of its own."""
        own = self.whole - self.own.others
        held = [(self._parameters[name], self._parameters[name].grad) for name in own]
        self.own.silent = True
        try:
            yield
        finally:
            self.own.silent = False
        for parameter, gradient in held:
            parameter.grad = gradient

    def divide(self, weight: float | Tensor) -> None:
        """Divides the gradients by the weight of all examples."""
        weight = float(weight) if self._offload else weight
        divide([_gradient(each) for each in self._parameters.values()], weight)

    def sum_gradients(self, missing: Callable[[str], bool], mates: Collective | None) -> list[tuple[str, Tensor]]:
        """Puts the summed gradients into the pieces, except those of parameters of which no rank has one.

        They are summed over the ranks that hold the same pieces, too, where these are `mates`.
        """
        self._link.settle()
        found = []
        for name, piece in self.pieces.items():
            gradient = _gradient(self._parameters[name])
            if name in self.whole:
                gradient = torch.zeros_like(piece) if gradient is None else gradient
                self._carrier.all_reduce(gradient)
            self._parameters[name].grad = None
            if missing(name):
                piece.grad = None
                continue
            assert gradient is not None, f"no sum of the gradients of {name}"
            piece.grad = gradient.view(piece.shape)
            found.append((name, piece.grad))
        if mates:
            flat = [gradient.view(-1) for _, gradient in found]
            sum_over(mates, flat, self.device if self._offload else None)
        return found

    def reshard(self) -> None:
        """Releases what a forward without a backward has left gathered."""
        self._require_places()
        for part in self._parts:
            part.reshard()
        if self._offload:
            # Copies to the device may still read what is about to be changed.
            synchronize(self.device)

    def _require_places(self) -> None:
        """Raises UsageError for what user code has put in the place of a parameter, and no forward has seen."""
        for guard, part in zip(self._guards, self._parts, strict=True):
            guard.require_places(part)

    def whole_tensors(self, leads: bool) -> Iterator[tuple[str, Tensor]]:
        """Yields what of the model this rank saves, whole, by checkpoint name, where one of the ranks leads.

        Each parameter that is divided is another rank's in turn, so that none holds all; the rest is the leader's.
        """
        self._require_places()
        world, divided = self._group.world, 0
        (saves,) = self._group.sum([float(leads)])
        for name, tensor in parameters_and_buffers(self.module):
            kind, _, parameter = name.partition("/")
            if kind != "parameter" or parameter in self.whole:
                if leads:
                    yield name, tensor
                continue
            whole = self._gathered(parameter)
            # Not by its size, which may differ among ranks with slices; shifted, since blocks repeat.
            if saves and (divided + divided // world) % world == self._group.rank:
                yield name, whole
            divided += 1
            del whole

    def parts(self) -> Iterator[tuple[str, int, Tensor]]:
        """Yields this rank's part of every parameter, flat, after its name and the element at which the part begins."""
        for name, each in self._parameters.items():
            kept = name in self.whole
            row = 0 if kept else _padded(self._shapes[name], self._group.world) // self._group.world
            yield name, self._group.rank * row, each.detach().view(-1) if kept else _local(each)

    def describe(self) -> str:
        """Says how the model is divided."""
        largest = max(self.unit_bytes, key=lambda unit: self.unit_bytes[unit])
        units = [unit for unit in self.unit_bytes if unit]
        what = f"{len(units)} units and the rest of the model" if units else "the whole model as one unit"
        return (
            f"sharded over {self._group.world} workers: {what}; the largest is {largest or 'the rest'!r}, "
            f"{self.unit_bytes[largest]:,} bytes when it is gathered"
        )

    def held_bytes(self) -> int:
        """Returns the bytes of this rank's part of all parameters."""
        return sum(
            each.nbytes if name in self.whole else _local(each).nbytes for name, each in self._parameters.items()
        )

    def _gathered(self, name: str) -> Tensor:
        shape, local = self._shapes[name], _local(self._parameters[name]).cpu()
        part = local.new_zeros(_padded(shape, self._group.world) // self._group.world)
        part[: local.numel()] = local
        every = self._group.gather(part.view(torch.uint8)).view(part.dtype)
        return every.flatten()[: shape.numel()].view(shape)


def require_unused_summed() -> None:
    """Raises an `UnfitMachine` if torch cannot sum gradients of parameters that only some ranks use in a step."""
    if "set_reduce_scatter_unused_params" not in vars(FSDPModule):
        raise UnfitMachine(
            f"torch {torch.__version__} cannot sum the gradients of a unit of which some ranks use a part, and "
            "fully_sharded needs that: pip install 'torch>=2.13', or use mirrored"
        )


class _WriteGuard:
    """Refuses a forward that writes to the gathered parameters of a unit, which have such names in the model.

    And tensors that user code has put in the place of a parameter or of its memory, which gathering would not see.
    """

    def __init__(self, names: Sequence[str], unit: str) -> None:
        # No parameters or modules: torch's hooks of tensors hold the unit, and it this.
        self._names = {name: name.removeprefix(f"{unit}.") if unit else name for name in names}
        self._versions: list[int] = []
        self._divided: list[tuple[int, int]] = []
        self._gathered: list[tuple[int, int]] = []

    def require_places(self, module: nn.Module, inputs: Any = ()) -> None:
        """Goes before parameters are gathered."""
        now = self._places(module)
        self._divided = self._divided or now
        # A forward without a backward may have left them gathered.
        known = zip(self._divided, self._gathered or self._divided, strict=True)
        for name, place, places in zip(self._names, now, known, strict=True):
            if place not in places:
                raise UsageError(
                    f"another tensor was put in the place of {name!r} (parameter.data = ..., assign=True), which "
                    "fully_sharded has divided; write into it: parameter.data.copy_(...), parameter.data.clamp_(...)"
                )

    def begin(self, module: nn.Module, inputs: Any) -> None:
        """Goes before forward."""
        self._versions = self._now(module)

    def end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Goes after it."""
        self._gathered = self._places(module)
        for name, before, now in zip(self._names, self._versions, self._now(module), strict=True):
            if before != now:
                raise written(name)

    def _places(self, module: nn.Module) -> list[tuple[int, int]]:
        parameters = (module.get_parameter(name) for name in self._names.values())
        return [(id(each), memory_of(each)) for each in parameters]

    def _now(self, module: nn.Module) -> list[int]:
        return [internals.version(module.get_parameter(name)) for name in self._names.values()]


def _padded(shape: torch.Size, world: int) -> int:
    """Returns the elements of a parameter whose rows have been made a multiple of the ranks."""
    if not shape or not shape.numel():
        return 0
    return -(-shape[0] // world) * world * (shape.numel() // shape[0])


def _local(parameter: Any) -> Tensor:
    # Not `to_local()`, which makes a new tensor with a graph.
    tensor: Tensor = internals.local_part(parameter)
    return tensor.detach().view(-1)


def _gradient(parameter: Tensor) -> Tensor | None:
    gradient: Any = parameter.grad
    if gradient is None or type(gradient) is Tensor:
        return gradient
    local: Tensor = internals.local_part(gradient)
    return local.view(-1)


def _own_outputs(module: nn.Module, inputs: Any, output: Any) -> Any:
    return map_tensors(
        lambda each: each.clone() if each.requires_grad and internals.base(each) is not None else each, output
    )
