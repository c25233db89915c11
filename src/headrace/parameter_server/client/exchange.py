"""A worker's gradients on their way to the servers, and exchanges with servers, which own the optimizer.

    rank 0   ─ compute ─┐        ┌─ push to its servers ─┐          ┌─ ask for a lease ─► all ranks compute it
    rank 1   ─ compute ─┴ judge ─┴─ push to its servers ─┴ all have ┘

The ranks of one replica check its gradients together. A worker that holds the whole model is a replica of one rank.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headrace.checkpoint.forms import pack, unpack
from headrace.collectives.base import ProcessGroup
from headrace.collectives.digest import on_host
from headrace.devices import HOST
from headrace.internals import foreach_clamp_max, foreach_clamp_min, foreach_mul
from headrace.parameter_server.client.data_leases import LeasedStep, ServerDataLeases
from headrace.parameter_server.client.session import Session
from headrace.parameter_server.core.events import Reason
from headrace.parameter_server.sparse.worker import WorkerRows
from headrace.parameter_server.wire import Kind, Message, ShardLayout, ShardSpec
from headrace.spec.events import TableReads
from headrace.spec.model import ModelSpec
from headrace.spec.options import Options
from headrace.training.clipping import (
    HEALTHY,
    GradientClipper,
    LossScale,
    StepDecision,
    all_finite,
    clip_coefficient,
    squared_norm,
)
from headrace.training.exchange import Exchange
from headrace.training.optimizer import StatePiece
from headrace.training.update import PARAMETER


class GradientBuffer:
    """The gradients of a backward pass, as shards of the servers; one for each trainable parameter of `model`.

    With `sessions`, by server, large ones are made where they are pushed from. They do not outlive the next pass.
    """

    def __init__(
        self, layouts: Sequence[ShardLayout], model: ModelSpec, sessions: Sequence[Session] | None = None
    ) -> None:
        self._layouts = layouts
        self._shapes = [parameter.shape for parameter in model.trainable]
        self._sessions = sessions
        self._whole = _whole_parameters(layouts, model) if sessions is not None else {}
        self._index = {parameter.name: index for index, parameter in enumerate(model.trainable)}
        self._pushed = {
            self._index[piece.parameter] for layout in layouts for piece in layout.pieces if not piece.exact
        }
        self._gradients: list[Tensor | None] = [None] * len(self._index)
        # Those that `add` has made: nothing else has their memory.
        self._own: set[int] = set()

    def place(self, index: int) -> Tensor | None:
        """Returns where a gradient is pushed from, see `GradientPlaces`."""
        if self._sessions is None or index not in self._whole:
            return None
        server, shards = self._whole[index]
        place = self._sessions[server].push_place(shards)
        return None if place is None else place.view(self._shapes[index])

    def store(self, gradients: Sequence[Tensor | None]) -> None:
        self._gradients = list(gradients)
        self._own.clear()

    def store_nothing(self) -> None:
        self._gradients = [None] * len(self._index)
        self._own.clear()

    def bring(self) -> None:
        """Copies gradients from an accelerator to the host, for which the thread waits once a chunk of them."""
        there = [(at, each) for at, each in enumerate(self._gradients) if each is not None and each.device.type != HOST]
        # Of a chunk's bytes, each type has to begin at a multiple of its size.
        there.sort(key=lambda pair: -pair[1].itemsize)
        for (index, gradient), own in zip(there, on_host(each for _, each in there), strict=True):
            self._gradients[index] = own.view(gradient.dtype).view(gradient.shape)
            self._own.add(index)

    def add(self, others: GradientBuffer, factor: float = 1.0) -> None:
        """Adds other gradients times a factor: once into new memory, as autograd may share a tensor, then in place."""
        for index, (gradient, other) in enumerate(zip(self._gradients, others._gradients, strict=True)):
            if other is None:
                continue
            if gradient is None:
                self._gradients[index] = other if factor == 1 else other * factor
            elif index in self._own:
                gradient.add_(other, alpha=factor)
            else:
                self._gradients[index] = torch.add(gradient, other, alpha=factor)
                self._own.add(index)

    def multiply(self, factor: float) -> None:
        """Multiplies all, into new memory."""
        self._gradients = [None if gradient is None else gradient * factor for gradient in self._gradients]

    @property
    def gradients(self) -> tuple[Tensor | None, ...]:
        """One for each trainable parameter; None if the loss does not depend on it."""
        return tuple(self._gradients)

    @property
    def present(self) -> list[Tensor]:
        """The gradients that exist."""
        return [gradient for gradient in self._gradients if gradient is not None]

    def clip(
        self, value: float | None, norm: float | None, total: Callable[[Sequence[float]], list[float]] | None = None
    ) -> None:
        """Clips elements to `value`, then the norm of all to `norm`, like torch, bit for bit; None does not clip.

        `total` sums numbers over the ranks of a replica, all of which call this.
        """
        clipped = self.present
        if (not clipped and total is None) or (value is None and norm is None):
            return
        # Into new memory: autograd may share a tensor between parameters.
        if value is not None and clipped:
            clipped = list(foreach_clamp_max(foreach_clamp_min(clipped, -value), value))
        if norm is not None and total is not None:
            # A gradient that several ranks hold is measured by the rank that pushes it.
            there = [index for index, gradient in enumerate(self._gradients) if gradient is not None]
            pushed = [gradient for index, gradient in zip(there, clipped, strict=True) if index in self._pushed]
            (squared,) = total([squared_norm(pushed)])
            factor = clip_coefficient(norm, squared)
            clipped = [gradient * factor for gradient in clipped]
        elif norm is not None:
            coefficient = torch.clamp(norm / (nn.utils.get_total_norm(clipped) + 1e-6), max=1.0)
            clipped = list(foreach_mul(clipped, coefficient))
        left = iter(clipped)
        self._gradients = [None if gradient is None else next(left) for gradient in self._gradients]

    def by_shard(self) -> list[list[Tensor | None]]:
        """Returns the gradients by server and shard; None if the loss does not depend on the parameter."""
        self.bring()
        flat = [None if gradient is None else gradient.reshape(-1) for gradient in self._gradients]
        return [[_slice(flat[self._index[spec.parameter]], spec) for spec in layout.pieces] for layout in self._layouts]


def _slice(flat: Tensor | None, spec: ShardSpec) -> Tensor | None:
    return None if flat is None else flat[spec.start : spec.start + spec.elements].view(spec.shape)


def _whole_parameters(layouts: Sequence[ShardLayout], model: ModelSpec) -> dict[int, tuple[int, range]]:
    """Returns the server of each parameter that one server holds, and its shards there, by index."""
    holders = {}
    for index, parameter in enumerate(model.trainable):
        for server, layout in enumerate(layouts):
            shards = [shard for shard, spec in enumerate(layout.pieces) if spec.parameter == parameter.name]
            starts = [layout.pieces[shard].start for shard in shards]
            whole = sum(layout.pieces[shard].elements for shard in shards) == parameter.elements
            if shards and whole and starts == sorted(starts) and shards == list(range(shards[0], shards[-1] + 1)):
                holders[index] = server, range(shards[0], shards[-1] + 1)
    return holders


class GradientAccumulator:
    """The sum of the gradients of several steps, each with its share of a round.

    If shares differ (the last batch of an epoch is short) and `weighted`, each gradient is weighted with its own, so
    that the sum times the mean share is the sum of the gradients times their shares.
    """

    def __init__(self, layouts: Sequence[ShardLayout], model: ModelSpec, weighted: bool) -> None:
        self._new = partial(GradientBuffer, layouts, model)
        self._weighted = weighted
        self._sum = self._new()
        self._shares: list[float] = []

    def add(self, buffer: GradientBuffer, share: float) -> None:
        """Adds the gradients of one step, unless it had no examples."""
        if share:
            self._shares.append(share)
            self._sum.add(buffer, share / self._shares[0] if self._weighted else 1.0)

    def take(self) -> tuple[list[list[Tensor | None]], float, int]:
        """Returns the sum by server and shard, the mean share, and the number of steps; then starts anew."""
        buffer, shares, self._sum, self._shares = self._sum, self._shares, self._new(), []
        if len(set(shares)) < 2:
            return buffer.by_shard(), shares[0] if shares else 0.0, len(shares)
        mean = sum(shares) / len(shares)
        if self._weighted:
            buffer.multiply(shares[0] / mean)
        return buffer.by_shard(), mean, len(shares)


def alike(versions: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Returns versions by server and shard as one number where all are the same, else as one for each shard."""
    every = tuple(chain.from_iterable(versions))
    return every[:1] if len(set(every)) < 2 else every


class ReplicaGroup:
    """The ranks of one replica, which act as one worker of the servers; the one that `leads` asks for the data."""

    def __init__(self, group: ProcessGroup, options: Options, scale: LossScale | None, device: torch.device) -> None:
        self.group = group
        self.leads = group.rank == 0
        self._options = options
        # Only to look: clipping is that of one device.
        looking = replace(options, clip_norm=None, clip_value=None)
        self._clipper = GradientClipper(looking, group, scale, immediate=device.type == "cpu")

    @property
    def checks(self) -> bool:
        """Whether gradients that `judge` accepts are known to be finite."""
        return self._clipper.checks

    def judge(self, buffer: GradientBuffer, finite: bool, replica: int) -> StepDecision:
        """Checks and clips the gradient of replica `replica`; all ranks call it, and say if their loss is finite."""
        world = self.group.world
        present = buffer.present
        decision = self._clipper.clip(present, present, finite)
        if decision.apply:
            buffer.clip(self._options.clip_value, self._options.clip_norm, self.group.sum if world > 1 else None)
        return replace(decision, bad_losses=tuple(replica * world + place for place in decision.bad_losses))

    def any(self, flag: bool) -> bool:
        """Returns whether `flag` is true on any rank; all ranks call it."""
        return flag if self.group.world == 1 else self.group.sum([float(flag)])[0] > 0

    def all(self, flag: bool) -> bool:
        """Returns whether `flag` is true on every rank; all ranks call it."""
        return not self.any(not flag)


class ServedExchange(Exchange):
    """State, averages and gradient checks of a worker whose servers own the optimizer.

    `group` is the workers, or those that hold the same part of the model; `rows` moves those of tables.
    """

    keeps_writes = False
    _pushes_each: ClassVar[bool] = False
    """Whether each gradient is pushed before the next one is computed."""

    def __init__(
        self,
        leases: ServerDataLeases,
        layouts: Sequence[ShardLayout],
        model: ModelSpec,
        group: ProcessGroup,
        replica_group: ReplicaGroup,
        rows: WorkerRows | None = None,
    ) -> None:
        self.client, self.leases = leases.client, leases
        self.rows = rows
        sessions = [server.session for server in self.client.servers]
        # The ranks of a replica have pieces of their own, and clip them together.
        in_place = self._pushes_each and replica_group.group.world == 1
        self.buffer = GradientBuffer(layouts, model, sessions if in_place else None)
        self.replica_group = replica_group
        self.parameter_bytes = model.parameter_bytes
        self._layouts = layouts
        self._group = group

    def synchronize(self, finite: bool | Tensor = True) -> StepDecision:
        step = self.leases.step
        if step is None:
            # This worker had no data before the sync point, and no other worker waits for it.
            return HEALTHY
        decision, self.leases.late = self._exchange(step, bool(finite))
        return decision

    @abstractmethod
    def _exchange(self, step: LeasedStep, finite: bool) -> tuple[StepDecision, bool]:
        """Gives the servers what is due after a step; returns also whether that came too late to count."""

    def _judge(self, finite: bool) -> StepDecision:
        """Checks this worker's gradient, and clips it."""
        return self.replica_group.judge(self.buffer, finite, self._group.rank)

    def update(self, round_: int) -> None:
        """The servers have updated the parameters before they answered the push."""

    def skip(self, round_: int) -> None:
        """The servers have left the gradient out."""

    def swap_weights(self, averaged: bool) -> None:
        self._group.barrier()
        if self._group.rank == 0:
            self.client.ask_all(Message(Kind.AVERAGE, flag=averaged))
        self._group.barrier()
        self.client.pull()

    def state(self) -> Iterable[StatePiece]:
        pieces: list[StatePiece] = []
        for server in range(self._group.rank, len(self._layouts), self._group.world):
            for shard in range(len(self._layouts[server])):
                blob = self.client.ask(server, Message(Kind.STATE, shard, 1))
                # In one order on all ranks, because the ranks of a replica may join their pieces.
                pieces += [StatePiece.parse(name, value) for name, value in sorted(unpack(blob).items())]
        if self.rows is None:
            return pieces
        return chain(pieces, self.rows.state(range(self._group.rank, len(self._layouts), self._group.world)))

    def row_reads(self) -> tuple[TableReads, ...]:
        return self.rows.reads if self.rows is not None else ()

    def settings(self) -> dict[str, Any]:
        # A rank of a replica may have no trainable parameter, and so no server; the first rank has one.
        settings: dict[str, Any] = json.loads(self.client.ask(0, Message(Kind.STATE))) if self._layouts else {}
        return settings

    def load(self, pieces: Iterable[StatePiece], settings: Mapping[str, Any] | None = None) -> None:
        by_parameter: dict[str, list[StatePiece]] = {}
        every = list(pieces)
        for state in every:
            by_parameter.setdefault(state.parameter, []).append(state)
        for server in range(len(self._layouts) if self.leases.leads else 0):
            # First, because it makes the server drop all state that it has.
            self.client.ask(server, Message(Kind.LOAD), b"" if settings is None else json.dumps(settings).encode())
            for shard, spec in enumerate(self._layouts[server].pieces):
                saved = by_parameter.get(spec.parameter, ())
                blob = pack({piece.name: piece.value for piece in saved})
                self.client.ask(server, Message(Kind.LOAD, shard, 1), blob)
        if self.rows is not None and self.leases.leads:
            self.rows.load(every)

    def load_values(self, places: Sequence[Sequence[Tensor]], only_state: bool = False) -> None:
        """If this worker leads, loads values by server and shard into the servers; `only_state` omits parameters."""
        if self.rows is not None:
            self.rows.bring(self.leases.leads)
        for server, (layout, values) in enumerate(zip(self._layouts, places, strict=True) if self.leases.leads else ()):
            for shard, (spec, value) in enumerate(zip(layout.pieces, values, strict=True)):
                if spec.exact or not only_state:
                    state = StatePiece(spec.parameter, PARAMETER, spec.start, value)
                    self.client.ask(server, Message(Kind.LOAD, shard, 1), pack({state.name: value.cpu()}))

    def memory(self) -> tuple[int, int]:
        return self.parameter_bytes, 0


class ParameterServerExchange(ServedExchange):
    """Pushes each gradient, and pulls the updated parameters in the same round trip."""

    _pushes_each = True
    _pulled = False

    def begin(self, round_: int) -> None:
        if not self._pulled:
            self.client.pull()
        self._pulled = False
        if self.rows is not None:
            self.rows.begin(self.leases.lease)
        self.pulled = alike(self.client.versions)

    def _exchange(self, step: LeasedStep, finite: bool) -> tuple[StepDecision, bool]:
        of_rows, sound = self.rows.take() if self.rows is not None else ([], True)
        self.buffer.bring()
        decision = self._judge(finite and sound)
        known = decision.apply if self.replica_group.checks or not decision.apply else None
        gradients = self.buffer.by_shard()
        if known is None:
            known = sound and all_finite([tensor for shards in gradients for tensor in shards if tensor is not None])
        pushes = self.rows.pushes(of_rows) if self.rows is not None else ()
        lease, weight, share = step.lease, step.weight, step.share
        reason = self.client.push(gradients, lease, weight, share, known, pull=True, rows=pushes)
        # Else they would be there beside those of the next pass.
        self.buffer.store_nothing()
        if self.rows is not None and known and weight and reason in (None, Reason.DUPLICATE):
            self.rows.finish(lease, weight, share, reason is None)
        self._pulled = True
        # The lease is done when all ranks of the replica have pushed.
        return decision, self.replica_group.any(reason == Reason.LATE)
