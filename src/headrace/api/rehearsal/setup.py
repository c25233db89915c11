"""What a rehearsal is set up from: the job, the plan, the machines and the timeline, and the memory that it needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from headrace.api.checks import JobInfo
from headrace.api.model_profile import identity, profile
from headrace.data.given import as_pipeline
from headrace.errors import InfeasiblePlan, UsageError
from headrace.machine.identity import host_name, versions
from headrace.machine.resources import cores, spare_memory_bytes
from headrace.policies.behaviour import ServerTerms
from headrace.prediction.assumptions import Assumptions
from headrace.prediction.cloud import cluster_of
from headrace.prediction.profiling.origin import require_origin, require_usable
from headrace.prediction.rehearsal.lockstep import Times, rehearse_in_turns, times_of, times_recorded
from headrace.prediction.rehearsal.one_mirror import OneMirror, with_one_mirror
from headrace.prediction.rehearsal.recorded import Record, RecordedOrder
from headrace.prediction.rehearsal.served import OrderSource, ServedRehearsal
from headrace.prediction.rehearsal.simulated import SimulatedOrder
from headrace.prediction.simulation.behaviour import behave
from headrace.prediction.simulation.event_files import plan_of
from headrace.prediction.simulation.scene import Scene
from headrace.prediction.simulation.simulate import counted, scene_of
from headrace.prediction.simulation.slices.steps import device_steps
from headrace.prediction.virtual_events import VirtualEvents
from headrace.report.format import byte_count, plural
from headrace.spec.cluster import Cluster, Host
from headrace.spec.events import LAUNCHER
from headrace.spec.model import ModelSpec
from headrace.spec.parameter_sets import one_optimizer
from headrace.spec.plan import Plan
from headrace.strategies import OneDevice, Strategy
from headrace.worker.run_spec import RunSpec

_QUICKLY_S = 0.3
"""How long each measurement of a profile takes that is made for a rehearsal alone."""

_ANY_MEMORY = 1 << 60
"""Bytes of the host of a plan: what a rehearsal needs is checked by itself."""


class RehearsalSetup:
    """One rehearsal: call `simulated` or `recorded` once.

    Attributes:
        plan: with the hosts of the cluster.
        memory_bytes: that the rehearsal needs here for parameters, optimizer state and gradients.
        notes: what a reader must know.
        alone_s: how long one of the machines would take for all rounds; 0 where that is not known.
    """

    plan: Plan
    memory_bytes: int = 0
    notes: tuple[str, ...] = ()
    alone_s: float = 0.0

    def __init__(
        self,
        info: JobInfo,
        strategy: Strategy,
        run_dir: Path,
        force: bool,
        assumptions: Assumptions,
        say: Callable[[str], object],
    ) -> None:
        self._info, self._strategy, self._run_dir = info, strategy, run_dir
        self._force, self._assumptions, self._say = force, assumptions, say

    def simulated(self, cluster: Cluster | Path | str | None, model: ModelSpec | Path | str | None) -> float:
        """Rehearses in the order of a simulation; returns its virtual time."""
        notes = ["rehearsed: gradients are real, and all times are virtual"]
        if cluster is None:
            machines = self._machines_like_this()
            notes.append("no cluster was given: each process has a machine like this one, with 1 Gbit/s between them")
        else:
            machines = cluster_of(cluster)
        strategy = self._strategy = counted(self._strategy, machines)
        known, told = self._model(model)
        notes += [*told, *require_usable(known, machines, self._force)]
        job = self._info.job
        scene = scene_of(known, machines, strategy, job.global_batch_size, self._assumptions)
        run = self._spec(strategy)
        self.plan = replace(plan_of(strategy, scene), segments=run.plan.segments)
        rounds = run.rounds_of(self._info.examples)
        one = scene.step(scene.hosts[0], scene.examples)
        self.alone_s = rounds * (one.forward_s + one.backward_s + one.optimizer_s + one.fixed_s)
        terms, evaluation_s = scene.behaviour.exchange, self._evaluation_s(scene)
        if not isinstance(terms, ServerTerms):
            timeline = behave(replace(scene, assumptions=replace(self._assumptions, steps=rounds)))
            self.notes = (*notes, *timeline.notes)
            return self._in_turns(run, times_of(timeline), timeline.moved_bytes, evaluation_s)
        self.notes = (*notes, *scene.behaviour.notes)
        steps = device_steps(scene)
        source = SimulatedOrder(scene, steps, terms, len(run.plan.shares))
        moved = run.model.trainable_bytes * (terms.pushed + terms.pulled) / terms.span
        round_s = max(step.forward_s + step.backward_s + step.fixed_s for step in steps)
        return self._served(run, terms, source, round_s, moved, evaluation_s)

    def recorded(self, record: Record) -> float:
        """Rehearses in the order of a real run; returns how long that took."""
        run = self._spec(self._strategy)
        self._require_same(record, run)
        self.plan = record.plan
        self.notes = (f"rehearsed in the order of a real run of {run.plan.workers} workers, with its times",)
        terms = self._strategy.behave(run.plan.replicas).exchange
        with _threads(record.started.threads):
            if not isinstance(terms, ServerTerms):
                return self._in_turns(run, times_recorded(record.steps), 0.0, 0.0)
            last_s = max((step.time_s for own in record.steps for step in own), default=0.0)
            round_s = last_s / max(1, run.rounds_of(self._info.examples))
            return self._served(run, terms, RecordedOrder(record, run.plan), round_s, 0.0, 0.0)

    def _served(
        self, run: RunSpec, terms: ServerTerms, source: OrderSource, round_s: float, moved: float, evaluation_s: float
    ) -> float:
        """Trains workers that speak to servers."""
        if run.callbacks:
            names = ", ".join(type(each).__name__ for each in run.callbacks)
            raise UsageError(
                f"the job's callbacks ({names}) are called by rank 0 of real workers, and a rehearsal of servers has "
                "none; leave callbacks= of the job out, or train it"
            )
        alone = replace(run, strategy=OneDevice(), plan=OneDevice().plan(run.model, _one_host()))
        interval_s, rate = round_s * run.rounds_of(self._info.examples), self._assumptions.apply_bytes_per_s

        def train(events: VirtualEvents) -> float:
            return ServedRehearsal(run, alone, terms, events, interval_s, evaluation_s, rate).train(source)

        # A worker keeps no parameters: only the gradients that it has not pushed yet.
        copies = run.model.copies + 1 + (2 if terms.local else 1) * run.plan.replicas
        return self._train(run, copies, moved, train)

    def _in_turns(self, run: RunSpec, times: Times, moved: float, evaluation_s: float) -> float:
        """Trains workers that exchange among themselves."""
        run = with_one_mirror(run)
        if isinstance(run.strategy, OneMirror):
            # Beside it the sum, and the gradients of two workers: one may wait for its turn to add them.
            copies = run.model.copies + 3
        else:
            # Each worker has parameters, gradients and optimizer state, and there is the sum or the mean of all.
            copies = (run.model.copies + 1) * run.plan.workers + 1
        return self._train(run, copies, moved, lambda events: rehearse_in_turns(run, events, times, evaluation_s))

    def _train(self, run: RunSpec, copies: int, moved: float, train: Callable[[VirtualEvents], float]) -> float:
        """Trains, which needs so many times the memory of the parameters, and writes the events."""
        self._require_memory(run, copies)
        rounds = run.rounds_of(self._info.examples)
        self._say(f"rehearsing {plural(run.plan.workers, 'worker')}, {plural(rounds, 'round')}")
        batch = run.job.global_batch_size
        events = VirtualEvents(self.plan, run.model, batch, self._info.examples, moved, os.getpid())
        for note in self.notes:
            events.note(LAUNCHER, 0.0, note)
        ended_s = train(events)
        events.save(self._run_dir)
        return ended_s

    def _evaluation_s(self, scene: Scene) -> float:
        """Returns how long the workers together take to evaluate: each computes the forward of its part."""
        sets = self._info.job.eval_sets
        if not sets:
            return 0.0
        one = scene.step(scene.hosts[0], max(1, scene.examples // scene.workers))
        return one.forward_s * sum(len(as_pipeline(data)[0]) for data in sets.values()) / max(1, scene.examples)

    def _spec(self, strategy: Strategy) -> RunSpec:
        info = self._info
        one_optimizer(info.job.optimizer, "a rehearsal")
        if info.model.tables or strategy.sparse_names():
            raise UsageError(
                "a model with sparse embeddings cannot be rehearsed: their rows are fetched one by one, and only a "
                "real run does that; leave out sparse=True, or train it"
            )
        plan = strategy.plan(info.model, _one_host())
        if info.job.global_batch_size < plan.replicas:
            raise InfeasiblePlan(
                f"a global batch of {info.job.global_batch_size} cannot be split among {plan.replicas} workers; "
                f"use global_batch_size={plan.replicas} or more, or fewer workers"
            )
        return RunSpec(
            job=info.job,
            train=None,
            strategy=strategy,
            plan=plan,
            model=info.model,
            weighed=info.weighed,
            run_dir=self._run_dir,
            started=0.0,
            callbacks=tuple(info.job.callbacks),
        )

    def _model(self, model: ModelSpec | Path | str | None) -> tuple[ModelSpec, tuple[str, ...]]:
        """Returns the profile, and what differs from what it was measured with."""
        if model is None:
            self._say("measuring the model; a profile (--model) saves that")
            job = self._info.job
            workers = max(1, self._strategy.processes().workers)
            share = max(1, job.global_batch_size // workers)
            return profile(job, device="cpu", batch_sizes=(share,), seconds=_QUICKLY_S), ()
        known = model if isinstance(model, ModelSpec) else ModelSpec.load(model)
        here = {**identity(self._info), **{key: value for key, value in versions().items() if key != "python"}}
        if known.trainable_bytes != self._info.model.trainable_bytes and not self._force:
            raise UsageError(
                f"the profile is of a model with {known.trainable_bytes:,} bytes of trainable parameters, and the "
                f"job's has {self._info.model.trainable_bytes:,}; profile the job (headrace profile), or give --force"
            )
        return known, require_origin(known, here, self._force)

    def _machines_like_this(self) -> Cluster:
        counts = self._strategy.processes()
        memory = spare_memory_bytes()
        hosts = [Host(f"machine-{number}", cores(), memory) for number in range(counts.workers + counts.servers)]
        return Cluster(tuple(hosts))

    def _require_memory(self, run: RunSpec, copies: int) -> None:
        """Refuses what does not fit here: so many times the parameters."""
        self.memory_bytes = copies * run.model.trainable_bytes
        here = spare_memory_bytes()
        if self.memory_bytes > here:
            raise InfeasiblePlan(
                f"to rehearse {run.plan.replicas} workers takes {byte_count(self.memory_bytes)} ({copies} times the "
                f"model's {byte_count(run.model.trainable_bytes)}), and {byte_count(here)} are free here; use fewer "
                "workers, or a smaller model"
            )

    def _require_same(self, record: Record, run: RunSpec) -> None:
        """Refuses a record of another job."""
        there, here = record.plan, run.plan
        differ = [
            f"{name}: {a} there and {b} here"
            for name, a, b in (
                ("global_batch_size", record.started.global_batch_size, run.job.global_batch_size),
                ("examples", record.started.examples_per_epoch, self._info.examples),
                ("workers", there.workers, here.workers),
                ("bytes of gradients", there.gradient_bytes, here.gradient_bytes),
                ("shards", len(there.segments), len(here.segments)),
            )
            if a != b
        ]
        for name in ("headrace", "torch"):
            if record.started.versions.get(name) != versions()[name] and not self._force:
                differ.append(f"{name}: {record.started.versions.get(name)} there and {versions()[name]} here")
        if differ:
            raise UsageError(f"the run is of another job: {'; '.join(differ)}. Give the job that it has trained")


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Computes with so many threads, as the workers of a run did: with another number, sums have another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _one_host() -> Cluster:
    return Cluster((Host(host_name(), cores(), _ANY_MEMORY),))
