"""What one process of a run holds: its model, exchange and optimizer are built and run, over tensors without values."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from headrace import internals
from headrace.checkpoint.trained_model import in_memory_of_their_own
from headrace.collectives.base import ProcessGroup
from headrace.prediction.memory.alone import OneOfGroup
from headrace.prediction.memory.hollow import Allocation, HollowMemory
from headrace.prediction.memory.kinds import KINDS, RankMemory
from headrace.prediction.memory.served import directory_of
from headrace.prediction.memory.stages import Messages, OneRanksChannels
from headrace.spec.job import Job, Share
from headrace.spec.model import ModelSpec
from headrace.spec.parameter_sets import one_optimizer
from headrace.spec.plan import Plan
from headrace.strategies import Strategy
from headrace.strategies.context import BatchInfo, WorkerContext
from headrace.training.exchange import Exchange, Replica
from headrace.training.optimizer import nested
from headrace.training.recompute.blocks import recomputing
from headrace.training.recompute.offloaded import OffloadedForward
from headrace.training.synchronization import DataLeases, Lease, PeriodicSync
from headrace.trees import map_tensors, parts_of, tensors_of
from headrace.worker.main import gathered_tensors
from headrace.worker.session import objective_of

_ROUNDS = 2
"""In the first one the optimizer's state is made."""


@dataclass(frozen=True)
class HollowRank:
    """A process of a plan, over tensors without values.

    Attributes:
        build: makes the model in the modes that it is trained in.
        batch, examples: its share of a batch.
        lent: what of the caller's the model is a copy of.
        sent: of a pipeline what stages send each other of a micro-batch, by its examples.
        cycle: rounds after which a worker of servers has done all that it does.
        hosted: whether parts of parameters, gradients and the optimizer's state are on an accelerator's host.
    """

    job: Job
    model: ModelSpec
    strategy: Strategy
    plan: Plan
    rank: int
    build: Callable[[], nn.Module]
    batch: Any
    examples: int
    lent: Sequence[Tensor] = ()
    sent: Mapping[int, Messages] = field(default_factory=dict)
    hosted: bool = False
    cycle: int = 1

    def measure(self) -> RankMemory:
        """Builds it, and trains until the optimizer's state is what it will stay."""
        memory = HollowMemory()
        with ExitStack() as closing, warnings.catch_warnings(), _collecting_never(), memory:
            warnings.simplefilter("ignore")
            for each in self.lent:
                memory.lend(each)
            module = self.build()
            if self.hosted:
                memory.find_hosted = partial(_parts, module)
            group = OneOfGroup(
                self.rank,
                self.plan.workers,
                memory.share,
                lambda rank, edges, schedule, whole: OneRanksChannels(
                    edges, schedule, rank, whole, self.sent, memory.share
                ),
            )
            replica = self._replica(memory, module, group, closing)
            if self.job.options.offloads:
                copies = _Copies(memory)
                OffloadedForward(module, copies.to_host, copies.back)
            if isinstance(replica.sync, DataLeases):
                replica.sync.begin()
            start, updater = memory.peak_bytes, replica.exchange.updater
            own = memory.at(map(_address, (*module.parameters(), *(updater.parameters if updater else ()))))
            share = Share(self.batch, self.examples, self.job.global_batch_size, 0)
            for round_ in range(_ROUNDS):
                memory.restart()
                self._steps(memory, replica, share, round_)
            found: dict[str, int] = {}
            memory.restart(memory.peak_step, lambda: found.update(self._kinds(memory, module, replica.exchange, own)))
            self._steps(memory, replica, share, _ROUNDS)
            memory.restart()
            self._leave(memory, replica, group)
            end = max(sum(memory.living().values()), memory.peak_bytes)
            return RankMemory(**found, start=start, end=end, host=memory.host_bytes, routed=memory.assumes)

    def _steps(self, memory: HollowMemory, replica: Replica, share: Share, round_: int) -> None:
        """Does a round, or as many as there are until all goes on as it began."""
        gc.collect()
        if not isinstance(replica.sync, DataLeases):
            self._step(memory, replica, share, round_)
            return
        left, leases = 0, replica.sync
        for number in range(round_ * self.cycle, (round_ + 1) * self.cycle):
            if not left:
                leases.ask()
                lease = leases.next()
                assert isinstance(lease, Lease)
                left = lease.rounds
            left -= 1
            leases.weigh(float(share.examples), share.examples / share.of)
            self._step(memory, replica, share, number)

    def _step(self, memory: HollowMemory, replica: Replica, share: Share, round_: int) -> None:
        sync = replica.sync
        replica.exchange.begin(round_)
        replica.compute.run(share)
        memory.take_to_host()
        if isinstance(sync, PeriodicSync):
            sync.weigh(float(share.examples))
        if replica.exchange.synchronize(True).apply:
            # What the optimizer makes is where the parts are.
            with memory.hosting() if self.hosted else nullcontext():
                replica.exchange.update(round_)
        if isinstance(sync, PeriodicSync):
            # In every round, so that it is in the one that is measured.
            sync.synchronize(round_ + 1)

    def _leave(self, memory: HollowMemory, replica: Replica, group: ProcessGroup) -> None:
        """Does what a worker does at the end, up to writing the model."""
        compute, plan = replica.compute, self.plan
        replica.adopt_trained_weights()
        if group.one_memory and (compute.divided or plan.replicas < plan.workers):
            # Each is written, and let go of, before the next.
            for _ in compute.whole_tensors(plan.leads(self.rank)):
                pass
            return
        tensors = dict(compute.whole_tensors(plan.leads(self.rank)))
        if plan.replicas < plan.workers:
            tensors = dict(gathered_tensors(self.model, compute.module, tensors, group, self.rank == 0))
        if self.rank == 0:
            with memory.hosting() if self.hosted or self.job.options.offloads else nullcontext():
                in_memory_of_their_own(tensors)

    def _replica(self, memory: HollowMemory, module: nn.Module, group: ProcessGroup, closing: ExitStack) -> Replica:
        job, plan = self.job, self.plan
        sample = map_tensors(lambda each: each[:2], self.batch)
        context = WorkerContext(
            module,
            self.model,
            objective_of(job, module),
            one_optimizer(job.optimizer, "a plan of memory"),
            job.options,
            group,
            batches=BatchInfo(job.global_batch_size, job.seed),
            closing=closing,
            servers=lambda: directory_of(plan, self.rank, group, memory.share),
            sample=lambda: sample,
        )
        choice = job.options.again
        with nullcontext() if choice is None else recomputing(module, choice):
            return self.strategy.replica(plan, self.rank, context)

    def _kinds(
        self, memory: HollowMemory, module: nn.Module, exchange: Exchange, own: Set[Allocation]
    ) -> Mapping[str, int]:
        """Returns the bytes of what lives now, by what it is."""
        updater = exchange.updater
        every = [*module.parameters(), *(updater.parameters if updater else ())]
        # Its parts of frozen units, too, while these are whole.
        kinds = {each.key: "parameters" for each in own if each.lives}
        kinds |= {_address(each): "gathered" for each in every if _address(each) not in kinds}
        kinds |= {_address(each): "buffers" for each in module.buffers()}
        kinds |= {_address(each): "batch" for each in tensors_of(self.batch)}
        kinds |= {_address(each.grad): "gradients" for each in every if each.grad is not None}
        kinds |= {_address(each): "state" for each in updater.averages.values()} if updater else {}
        for optimizer in nested(updater.optimizer).values() if updater else ():
            kept = [part for each in tensors_of(dict(optimizer.state)) for part in parts_of(each)]
            kinds |= {_address(each): "state" for each in kept}
        found = dict.fromkeys(KINDS, 0)
        for key, size in memory.living().items():
            # A unit that is gathered early is not its module's yet.
            rest = "exchange" if memory.is_shared(key) else "gathered" if memory.is_parameter(key) else "activations"
            found[kinds.get(key, rest)] += size
        # Of steps of its own beside servers.
        state = 0 if updater else exchange.memory()[1]
        return found | {"state": found["state"] + state, "activations": found["activations"] - state}


@contextmanager
def _collecting_never() -> Iterator[None]:
    """Leaves cycles of references as they are, so that a plan has what a worker holds at most between collections.

    What was there before is not looked at by the collections that a plan asks for.
    """
    collects = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if collects:
            gc.enable()


class _Copies:
    """What `OffloadedForward` copies to the host of an accelerator, and back."""

    def __init__(self, memory: HollowMemory) -> None:
        self._memory = memory

    def to_host(self, tensor: Tensor) -> Tensor:
        with self._memory.hosting(pinned=True):
            return torch.empty_like(tensor)

    def back(self, saved: tuple[torch.device, Tensor]) -> Tensor:
        return torch.empty_like(saved[1]) if self._memory.is_hosted(saved[1]) else saved[1]


def _parts(module: nn.Module) -> Iterator[Tensor]:
    """Yields what this rank has of parameters that are divided, and of their gradients."""
    for each in module.parameters():
        if isinstance(each, DTensor):
            yield internals.local_part(each)
            if isinstance(each.grad, DTensor):
                yield internals.local_part(each.grad)


def _address(tensor: Any) -> int:
    local = internals.local_part(tensor) if isinstance(tensor, DTensor) else tensor
    address: int = internals.storage_address(local.untyped_storage())
    return address
