"""Executes the order of a run with servers: real gradients, pushes, local steps and evaluations.

queue of a server ──► fetch: compute the worker's steps up to its next fetch
                  └─► push:  apply what the worker has computed
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.data.given import as_pipeline
from headrace.data.loading.loader import Loader
from headrace.errors import DataError
from headrace.machine.resources import peak_resident_bytes
from headrace.parameter_server.wire import Kind, Message
from headrace.policies.behaviour import ServerTerms
from headrace.prediction.rehearsal.order import PlannedStep, ServerAction, SyncInterval
from headrace.prediction.rehearsal.server import RehearsedServer
from headrace.prediction.rehearsal.workers import ComputedStep, VirtualWorkers
from headrace.prediction.virtual_events import VirtualEvents
from headrace.spec.events import Evaluated, NonFinite, ServerStarted, Stepped
from headrace.spec.parameter_sets import one_optimizer
from headrace.strategies.context import BatchInfo, WorkerContext
from headrace.training.exchange import Replica
from headrace.training.shared_buffers.batch_norm import averaged_buffers
from headrace.worker.evaluations.early_stopping import EarlyStopper
from headrace.worker.loops.leased import next_sync_point
from headrace.worker.main import leave_model
from headrace.worker.run_spec import RunSpec
from headrace.worker.session import build_evaluation, build_module, objective_of

_TOLD = 50
"""Counts of the servers, in an interval that is as long as the first."""

_Versions = Mapping[tuple[int, int], int]
"""Of the parameters that a gradient was computed with, by server and shard."""


@dataclass
class _Fetch:
    """What a worker has fetched so far, by server and shard; the parameters, where they come in pieces."""

    versions: dict[tuple[int, int], int] = field(default_factory=dict)
    pieces: dict[tuple[int, int], Tensor] = field(default_factory=dict)


class OrderSource(Protocol):
    """Tells what happens, interval by interval."""

    def interval(self, first: int, until: int, now_s: float, versions: Sequence[Sequence[int]]) -> SyncInterval:
        """Returns what happens from round `first`, at `now_s`, to the sync point before round `until`.

        `versions` are those of the servers' shards when it begins.
        """


class ServedRehearsal:
    """One rehearsal: call `train` once.

    Args:
        run: with the plan that a real run would have on one host.
        alone: the same job on one device, for evaluation and the trained model.
        interval_s: about how long it is from one sync point to the next, on the clock of the run.
        evaluation_s: how long an evaluation takes.
        apply_bytes_per_s: of a server.
    """

    def __init__(
        self,
        run: RunSpec,
        alone: RunSpec,
        terms: ServerTerms,
        events: VirtualEvents,
        interval_s: float,
        evaluation_s: float,
        apply_bytes_per_s: float,
    ) -> None:
        self._run, self._alone, self._local, self._events = run, alone, terms.local, events
        self._evaluation_s, self._apply_bytes_per_s = evaluation_s, apply_bytes_per_s
        job, plan = run.job, run.plan
        self._module = build_module(job)
        self._loader = Loader(as_pipeline(job.data)[0], job.seed, job.global_batch_size, (1,), 0)
        every = self._loader.rounds_per_epoch
        self._servers = [RehearsedServer(run, rank, self._module) for rank in plan.servers]
        context = WorkerContext(
            module=self._module,
            model=run.model,
            objective=objective_of(job, self._module, run.weighed),
            optimizer=one_optimizer(job.optimizer, "a rehearsal"),
            options=job.options,
            group=ThreadCollective(ThreadGroup(1), 0),
            rounds_per_epoch=every,
            batches=BatchInfo(self._loader.full_batch, job.seed),
        )
        weighted = plan.options.get("scale") == "share"
        layouts = [server.layout for server in self._servers]
        self._workers = VirtualWorkers(run, self._module, context, layouts, self._loader, terms.local, weighted)
        self._stopper = EarlyStopper(job.options.early_stopping)
        self._replica = alone.strategy.replica(alone.plan, 0, context)
        self._computed: list[deque[tuple[ComputedStep, _Versions]]] = [deque() for _ in range(plan.replicas)]
        self._fetches: list[dict[int, _Fetch]] = [{} for _ in range(plan.replicas)]
        self._shards = sum(len(server.layout) for server in self._servers)
        self._waited_s = [0.0] * plan.replicas
        self._pushed: set[tuple[int, int]] = set()
        self._next_s = self._every_s = interval_s / _TOLD
        for role, server in zip(events.plan.roles[plan.workers :], self._servers, strict=True):
            size = server.server.memory()[0]
            events.write(ServerStarted(role.rank, 0.0, role.host, os.getpid(), len(server.layout), size))

    def train(self, source: OrderSource) -> float:
        """Trains to the end; returns when that is, on the clock of the run.

        Raises:
            NonFiniteLoss, NonFiniteGradient, DataError: as a real run.
        """
        run, every = self._run, self._loader.rounds_per_epoch
        done, rounds, ended_s = 0, run.rounds(every), 0.0
        # No checkpoints: they would be sync points, too, where the run to come has them.
        while done < rounds and not self._stopper.over:
            versions = [list(server.versions) for server in self._servers]
            interval = source.interval(done, next_sync_point(run, every, done), ended_s, versions)
            self._execute(interval)
            done = interval.done
            for server in self._servers:
                server.busy_s += interval.busy_s
            ended_s = self._meet(done, interval.ended_s)
        self._finish(ended_s)
        return ended_s

    def _execute(self, interval: SyncInterval) -> None:
        """Executes all queues; a queue waits where its next push is not computed yet."""
        plans = [_by_fetch(own) for own in interval.steps]
        queues = [deque(queue) for queue in interval.queues]
        self._pushed = {(each.worker, each.number) for queue in queues for each in queue if each.pushes}
        while any(queues):
            moved = False
            for queue in queues:
                while queue and self._do(queue[0], plans):
                    queue.popleft()
                    moved = True
            if not moved:
                stuck = next(queue[0] for queue in queues if queue)
                raise DataError(
                    f"the record of the run contradicts itself: worker {stuck.worker} pushes lease {stuck.number} "
                    "before it has fetched what it was computed with"
                )

    def _do(self, action: ServerAction, plans: Sequence[dict[int, list[PlannedStep]]]) -> bool:
        """Carries out an action; returns False where it has to wait for another queue."""
        if not action.pushes:
            self._fetch(action, plans[action.worker].get(action.number, ()))
            return True
        worker = action.worker
        computed = self._computed[worker]
        last = next((index for index, (each, _) in enumerate(computed) if each.planned.last), None)
        if last is None or computed[last][0].planned.lease != action.number:
            return False
        ready, versions = computed[last]
        late = self._push(action, ready, versions)
        if action.server in (-1, len(self._servers) - 1) and self._is_whole(action):
            for _ in range(last + 1):
                self._tell(worker, computed.popleft()[0], late)
        return True

    def _is_whole(self, action: ServerAction) -> bool:
        """Whether a push is about the last of a server's shards."""
        layout = self._servers[action.server].layout
        return not action.shards or action.shards[-1] == len(layout) - 1

    def _push(self, action: ServerAction, computed: ComputedStep, versions: _Versions) -> bool:
        """Applies a push; returns whether it came too late to count."""
        assert computed.push is not None
        late = False
        for index, server in self._named(action):
            late |= server.push(
                action.worker,
                computed.gradients[index],
                computed.push,
                [versions[index, shard] for shard in range(len(server.layout))],
                action.shards,
            )
        return late

    def _named(self, action: ServerAction) -> Iterator[tuple[int, RehearsedServer]]:
        for index, server in enumerate(self._servers):
            if action.server in (-1, index):
                yield index, server

    def _fetch(self, action: ServerAction, planned: Sequence[PlannedStep]) -> None:
        """Lets a worker take over parameters, and computes what it does with them, when it has all of them."""
        whole = action.server == -1 or (len(self._servers) == 1 and not action.shards)
        # Of one that comes in pieces the next may begin before it is complete.
        fetch = self._fetches[action.worker].setdefault(action.number, _Fetch())
        for index, server in self._named(action):
            shards = action.shards or range(len(server.layout))
            server.fetch(action.worker, action.shards)
            for shard in shards:
                fetch.versions[index, shard] = server.versions[shard]
                if not whole:
                    fetch.pieces[index, shard] = server.fetched(shard).clone()
        if len(fetch.versions) < self._shards:
            return
        del self._fetches[action.worker][action.number]
        if not planned:
            return
        plain = all(server.layout.reply_slots is None for server in self._servers)
        # A single step until the next fetch leaves the parameters as they are.
        in_place = whole and plain and (not self._local or len(planned) == 1)
        module = self._module if in_place else self._copied(fetch.pieces)
        waiting = self._computed[action.worker]
        for computed in self._workers.steps(action.worker, module, planned):
            waiting.append((computed, fetch.versions))
            # A record has no push that the servers have refused: it is not finite, and changes nothing.
            if computed.push and not computed.push.flag and (action.worker, computed.push.lease) not in self._pushed:
                lease = [step for step, _ in waiting if step.planned.lease == computed.push.lease]
                for step in lease:
                    self._tell(action.worker, step, late=False)
                for _ in lease:
                    waiting.pop()

    def _copied(self, pieces: Mapping[tuple[int, int], Tensor]) -> torch.nn.Module:
        """Returns the copy of the module with what a worker has fetched: pieces, or the present parameters."""
        apart = self._workers.apart
        targets = dict(apart.named_parameters())
        with torch.no_grad():
            for index, server in enumerate(self._servers):
                for shard, spec in enumerate(server.layout.pieces):
                    target = targets[spec.parameter].data.view(-1)[spec.start : spec.start + spec.elements]
                    target.copy_(pieces[index, shard] if pieces else server.fetched(shard))
        return apart

    def _tell(self, number: int, computed: ComputedStep, late: bool) -> None:
        planned, share = computed.planned, computed.share
        self._waited_s[number] += planned.exchange_s
        # What comes too late counts when its data is leased again.
        counted = (0, None, 0.0) if late else (share.examples, computed.loss, computed.weight)
        times = planned.compute_s, planned.exchange_s, planned.update_s
        lease = planned.lease if counted[0] else -1
        self._events.write(Stepped(number, planned.ended_s, planned.round, share.epoch, *counted, 0.0, *times, lease))
        if computed.skipped:
            ranks = (number,) if computed.loss is None else ()
            action = self._run.job.options.on_nonfinite
            self._events.write(NonFinite(number, planned.ended_s, planned.round, ranks, action))
        if planned.ended_s >= self._next_s:
            self._next_s = planned.ended_s + self._every_s
            self._tell_servers(planned.ended_s)

    def _tell_servers(self, time_s: float) -> None:
        first = self._run.plan.workers
        for index, server in enumerate(self._servers):
            self._events.write(server.stats(first + index, time_s, self._waited_s, self._apply_bytes_per_s))

    def _meet(self, done: int, now_s: float) -> float:
        """Settles an interval and evaluates where that is due; returns when training goes on."""
        for index, computed in enumerate(self._computed):
            if computed:
                raise DataError(f"worker {index} has computed {len(computed)} steps that no server has applied")
        self._tell_servers(now_s)
        every, options = self._loader.rounds_per_epoch, self._run.job.options
        rounds = self._run.rounds(every)
        due = done % (options.eval_every or every) == 0 or done >= rounds
        if self._run.job.eval_data is not None and due:
            metrics, examples = self._evaluate()
            now_s += self._evaluation_s
            self._events.write(Evaluated(0, now_s, done, done // every, examples, metrics, self._evaluation_s))
            ending = self._stopper.see(metrics, done)
            if ending:
                self._events.note(0, now_s, ending)
        for server in self._servers:
            server.do(Message(Kind.SETTLE, lease=done))
        return now_s

    def _evaluate(self) -> tuple[dict[str, float], int]:
        """Evaluates with the mean of the workers' running statistics, and with averaged weights if there are any."""
        options = replace(self._alone.job.options, ema_decay=None)
        spec = replace(self._alone, job=replace(self._alone.job, options=options))
        replica = Replica(self._workers.compute, self._replica.exchange)
        evaluation = build_evaluation(spec, spec.plan.role(0), replica, ThreadCollective(ThreadGroup(1), 0))
        assert evaluation is not None
        averages = self._run.job.options.ema_decay is not None
        self._average_buffers()
        for server in self._servers if averages else ():
            server.do(Message(Kind.AVERAGE, flag=1))
        result = evaluation.run(1.0)
        for server in self._servers if averages else ():
            server.do(Message(Kind.AVERAGE))
        return result

    @torch.no_grad()
    def _average_buffers(self) -> None:
        """Puts the first worker's buffers into the module, and the means of all workers' running statistics."""
        every = self._workers.every
        total = float(sum(worker.examples for worker in every))
        averaged = {id(buffer) for buffer in averaged_buffers(self._module)}
        for index, buffer in enumerate(self._module.buffers()):
            if id(buffer) not in averaged:
                buffer.copy_(every[0].buffers[index])
                continue
            # In the order of the workers, as `average` sums.
            parts = [worker.examples / total if total else 1 / len(every) for worker in every]
            mean = every[0].buffers[index] * parts[0]
            for worker, part in zip(every[1:], parts[1:], strict=True):
                mean += worker.buffers[index] * part
            buffer.copy_(mean)

    def _finish(self, ended_s: float) -> None:
        """Writes the trained model and the last events."""
        self._average_buffers()
        for server in self._servers if self._run.job.options.ema_decay is not None else ():
            server.do(Message(Kind.AVERAGE, flag=1))
        leave_model(self._alone, 0, ThreadCollective(ThreadGroup(1), 0), self._workers.compute)
        self._tell_servers(ended_s)
        self._events.end(ended_s, peak_resident_bytes(), [server.server.memory() for server in self._servers])


def _by_fetch(steps: Sequence[PlannedStep]) -> dict[int, list[PlannedStep]]:
    """Returns the steps of a worker by the fetch whose parameters they begin with."""
    found: dict[int, list[PlannedStep]] = {}
    current = 0
    for step in steps:
        if step.fetch >= 0:
            current = step.fetch
        found.setdefault(current, []).append(step)
    return found
