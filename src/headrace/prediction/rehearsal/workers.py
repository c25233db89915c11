"""Virtual workers: one module computes for all of them; each has its own data, random numbers, buffers and local steps.

What a worker runs is what a real one does: `WholeModel`, `ReplicaGroup.judge`, `LocalSteps`, `GradientAccumulator`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from headrace.data.loading.loader import Loader
from headrace.errors import NonFiniteGradient, NonFiniteLoss
from headrace.modules import copy_module
from headrace.parameter_server.client.downpour import LocalSteps
from headrace.parameter_server.client.exchange import GradientAccumulator, GradientBuffer, ReplicaGroup
from headrace.parameter_server.wire import Kind, Message, ShardLayout
from headrace.prediction.rehearsal.order import PlannedStep
from headrace.spec.job import Share
from headrace.strategies.context import WorkerContext
from headrace.strategies.served import agreement
from headrace.training.clipping import all_finite
from headrace.training.compute import Compute
from headrace.worker.loops.leased import lease_weight
from headrace.worker.losses import MOST_IN_A_ROW
from headrace.worker.run_spec import RunSpec
from headrace.worker.state import random_states, restore_random_states, seed_worker

_CPU = torch.device("cpu")


@dataclass
class VirtualWorker:
    """What is a worker's own.

    Attributes:
        random: the state of its generator.
        buffers: of its copy of the model.
        local: its local steps; None where it takes none.
        examples: that it has computed.
    """

    random: Tensor
    buffers: list[Tensor]
    local: LocalSteps | None
    accumulated: GradientAccumulator | None
    examples: int = 0
    in_a_row: int = 0
    nonfinite: bool = False


@dataclass(frozen=True)
class ComputedStep:
    """What a step has come to.

    Attributes:
        loss: None without examples.
        push: what its messages say, where the step ends a lease, and `gradients` by server and shard.
    """

    planned: PlannedStep
    share: Share
    loss: float | None
    weight: float
    push: Message | None
    gradients: Sequence[Sequence[Tensor | None]]
    skipped: bool


class VirtualWorkers:
    """Computes the steps of all workers, one after the other.

    Args:
        live: the module whose parameters are the servers'.
        context: of one worker; `build` returns the compute of a module.
        local: whether workers take local steps; `weighted` by their share of a round.
    """

    def __init__(
        self,
        run: RunSpec,
        live: nn.Module,
        context: WorkerContext,
        layouts: Sequence[ShardLayout],
        loader: Loader,
        local: bool,
        weighted: bool,
    ) -> None:
        self.live, self._run, self._loader = live, run, loader
        self.buffer = GradientBuffer(layouts, run.model)
        self._context, self._weighted, self._is_local = context, weighted, local
        self._shares = len(run.plan.shares)
        self._skips = run.job.options.on_nonfinite != "raise"
        self._computes: dict[int, Compute] = {id(live): self._compute_of(live)}
        self._apart: nn.Module | None = None
        self._group: ReplicaGroup = agreement(context)
        self.every = [self._begin(worker, layouts) for worker in range(run.plan.replicas)]

    @property
    def apart(self) -> nn.Module:
        """A copy of the module, for parameters that are not the servers' present ones."""
        if self._apart is None:
            self._apart = copy_module(self.live)
            self._computes[id(self._apart)] = self._compute_of(self._apart)
            for worker in self.every if self._is_local else ():
                worker.local = self._local_steps(self._apart)
        return self._apart

    @property
    def compute(self) -> Compute:
        """The compute of the servers' module."""
        return self._computes[id(self.live)]

    def steps(self, number: int, module: nn.Module, planned: Sequence[PlannedStep]) -> list[ComputedStep]:
        """Computes steps of a worker, one after the other, on the parameters of `module`, which its local steps change.

        `planned` are all steps until the worker fetches again. So nothing reads what a local step after the last of
        them would give, and it is left out.

        Raises:
            NonFiniteLoss: a loss is NaN or infinite, and the options say to raise.
            NonFiniteGradient: so is a gradient.
            DataError: an example cannot be read.
        """
        worker = self.every[number]
        with self._as(worker, module):
            return [self._step(number, worker, module, each, each is planned[-1]) for each in planned]

    def _step(
        self, number: int, worker: VirtualWorker, module: nn.Module, planned: PlannedStep, final: bool
    ) -> ComputedStep:
        share = self._loader.portion(planned.round, planned.part, planned.parts)
        buffers = [buffer.clone() for buffer in module.buffers()] if self._skips else []
        computed = self._computes[id(module)].run(Share(share.batch, share.examples, share.examples, share.epoch))
        loss = None if computed.loss is None else float(computed.loss)
        finite = loss is None or math.isfinite(loss)
        decision = self._group.judge(self.buffer, finite, 0)
        if not decision.apply:
            self._bad(number, worker, planned.round, loss, finite)
            # What a bad forward has changed is undone.
            _copy(buffers, module.buffers())
        else:
            worker.in_a_row = 0
        weight, part = lease_weight(share, computed)
        worker.examples += share.examples
        push: Message | None = None
        gradients: list[list[Tensor | None]] = []
        if worker.accumulated is None:
            gradients = self._fresh(self.buffer.by_shard())
            push = Message(Kind.PUSH, 0, decision.apply, planned.lease, weight, part, steps=1)
        else:
            if decision.apply:
                if not final:
                    assert worker.local is not None
                    worker.local.step(planned.round, self.buffer.gradients, part if self._weighted else 1.0)
                worker.accumulated.add(self.buffer, part)
            else:
                worker.nonfinite = True
            if planned.last:
                gradients, mean, count = worker.accumulated.take()
                present = [each for own in gradients for each in own if each is not None]
                finite_sum = all_finite(present) if count else not worker.nonfinite
                push = Message(
                    Kind.PUSH, 0, finite_sum, planned.lease, float(count > 0), mean, steps=max(1, count)
                )  # fmt: skip
                worker.nonfinite = False
        loss = loss if finite else None
        return ComputedStep(planned, share, loss, float(computed.weight), push, gradients, not decision.apply)

    def _bad(self, number: int, worker: VirtualWorker, round_: int, loss: float | None, finite: bool) -> None:
        action = self._run.job.options.on_nonfinite
        worker.in_a_row += 1
        if worker.in_a_row > MOST_IN_A_ROW.get(action, 0):
            if not finite and loss is not None:
                raise NonFiniteLoss(number, round_, loss, worker.in_a_row)
            raise NonFiniteGradient(round_, worker.in_a_row)

    def _fresh(self, gradients: list[list[Tensor | None]]) -> list[list[Tensor | None]]:
        """Copies a gradient that autograd shares between two parameters: the optimizer may write into it."""
        seen: set[int] = set()
        for own in gradients:
            for index, gradient in enumerate(own):
                if gradient is not None and gradient.data_ptr() in seen:
                    own[index] = gradient.clone()
                elif gradient is not None:
                    seen.add(gradient.data_ptr())
        return gradients

    @contextmanager
    def _as(self, worker: VirtualWorker, module: nn.Module) -> Iterator[None]:
        """Computes as a worker: with its random numbers and its buffers."""
        torch.set_rng_state(worker.random)
        _copy(worker.buffers, module.buffers())
        yield
        worker.random = torch.get_rng_state()
        _copy(module.buffers(), worker.buffers)

    def _begin(self, number: int, layouts: Sequence[ShardLayout]) -> VirtualWorker:
        kept = random_states(_CPU)
        seed_worker(self._run.job.seed, number)
        own = torch.get_rng_state()
        restore_random_states(kept, _CPU)
        buffers = [buffer.detach().clone() for buffer in self.live.buffers()]
        accumulated = GradientAccumulator(layouts, self._run.model, self._weighted) if self._is_local else None
        return VirtualWorker(own, buffers, None, accumulated)

    def _local_steps(self, module: nn.Module) -> LocalSteps:
        context = self._context
        return LocalSteps(module, self._run.model, context.optimizer, context.options, context.rounds_per_epoch, 0)

    def _compute_of(self, module: nn.Module) -> Compute:
        return replace(self._context, module=module).whole_model(self.buffer, local_shares=self._shares)


@torch.no_grad()
def _copy(source: Iterable[Tensor], target: Iterable[Tensor]) -> None:
    for one, other in zip(source, target, strict=True):
        other.copy_(one)
