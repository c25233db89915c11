"""plan_memory: what each worker of a run will hold, with and without the choices that need less."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from headrace.api.memory.quantised import in_8_bits
from headrace.api.probes.losses import join_loss
from headrace.api.probes.optimizers.probe import probe_optimizer
from headrace.data.given import as_pipeline
from headrace.data.loading.loader import Loader
from headrace.devices import HOST
from headrace.errors import DataError, HeadraceError, UsageError
from headrace.machine.dynamo import postpone_compiler
from headrace.machine.identity import detect
from headrace.modules import describe
from headrace.pipeline.profile import first_batch
from headrace.policies.behaviour import Stages
from headrace.policies.roles import bounds
from headrace.prediction.memory.alone import OneOfGroup
from headrace.prediction.memory.hollow import HollowMemory
from headrace.prediction.memory.kinds import RankMemory
from headrace.prediction.memory.plan import MemoryPlan
from headrace.prediction.memory.rank import HollowRank
from headrace.prediction.memory.served import measure_servers
from headrace.prediction.memory.stages import Messages, layers_of, messages
from headrace.spec.compute import LayerSpec
from headrace.spec.job import Job, Share
from headrace.spec.model import ModelSpec, ProfileRequest
from headrace.spec.options import OFFLOAD, check_options
from headrace.spec.parameter_sets import one_optimizer
from headrace.spec.plan import Plan
from headrace.strategies import FullySharded, Hybrid, Strategy, resolve
from headrace.strategies.context import ModelProbe
from headrace.strategies.hybrid import levels_of
from headrace.strategies.hybrid_levels import by_kind
from headrace.strategies.refusals import refuse
from headrace.strategies.served_hybrid import Served
from headrace.strategies.strategy import describe_options
from headrace.tensor_parallel.recording import Trial
from headrace.tensor_parallel.rewriting import split
from headrace.training.deferred.lending import lending
from headrace.training.deferred.parts import Deferral
from headrace.training.embeddings.layer import sparse_layers
from headrace.training.user_code.trial import without_compilers
from headrace.training.user_code.untouched import same_generators, untouched
from headrace.training.whole_model import HALF, cut
from headrace.worker.session import build_module, objective_of, sample_of

_DIFFERENT = 3
"""A first gradient is kept, the second one is added in new memory, and all others there."""

_ALONE = "what its workers hold is not found by running one alone; headrace simulate estimates it"


def plan_memory(job: Job, strategy: str | Strategy, choices: bool = True) -> MemoryPlan:
    """Returns what the fullest worker will hold, as on the CPUs of this host; nothing of the model takes memory.

    A choice that keeps something in host memory is planned as on an accelerator, whose own memory is all the rest.

    Args:
        job: its model is made, and trained for three rounds, over tensors without values.
        strategy: of a pipeline each rank is planned, and each server.
        choices: whether other options, and `hr.FullySharded`, are tried, too.

    Raises:
        UsageError: the strategy is another one, or the options exclude each other.
        JobError: the model looks at values that it computes, so that nothing is known without them.
    """
    chosen = resolve(strategy)
    postpone_compiler()
    if job.options.compile:
        raise UsageError(
            f"compile={job.options.compile!r}: a compiled model chooses by itself what it keeps for backward; leave "
            "compile out for a plan of memory"
        )
    # What is kept in host memory is planned as for an accelerator.
    check_options(replace(job.options, recompute=job.options.again), HOST)
    with torch.random.fork_rng(devices=[]), untouched(job.data), same_generators(), without_compilers():
        planning = _Planning(job, chosen)
        roles = planning.roles(job, chosen)
        found: dict[str, RankMemory] = {}
        impossible: dict[str, str] = {}
        for name, other, way in _choices(job, chosen, planning.workers) if choices else ():
            try:
                same = planning if other.optimizer is job.optimizer else _Planning(other, way)
                found[name] = _fullest(same.roles(other, way))
            except HeadraceError as error:
                impossible[name] = str(error)
    count, examples = planning.workers, planning.share.examples
    several = roles if len(roles) > 1 else {}
    return MemoryPlan(chosen.name, count, examples, _fullest(roles), found, impossible, several)


def stages_of(strategy: Strategy, workers: int = 1) -> Stages | None:
    """Returns how a strategy divides one replica into stages that can be planned; None where it has none."""
    division = strategy.behave(workers).division
    data = by_kind(levels_of(strategy))[0]
    return division if isinstance(division, Stages) and not isinstance(data, Served) else None


def _fullest(roles: Mapping[str, RankMemory]) -> RankMemory:
    return max(roles.values(), key=lambda each: each.peak)


def _choices(job: Job, strategy: Strategy, workers: int) -> Iterator[tuple[str, Job, Strategy]]:
    options = job.options

    def with_(**changed: Any) -> Job:
        return replace(job, options=replace(options, **changed))

    own = describe_options(strategy)
    if stages_of(strategy):
        for name, value in {"recompute": "always", "schedule": "1f1b"}.items():
            if own.get(name, value) != value:
                yield f"{name}={value!r}", job, type(strategy)(**{**own, name: value})
    else:
        for recompute in ("full", "selective", OFFLOAD, None):
            if recompute != options.recompute:
                yield f"recompute={recompute!r}", with_(recompute=recompute), strategy
    if options.precision == "fp32":
        yield "precision='bf16'", with_(precision="bf16"), strategy
    if eight := in_8_bits(job.optimizer):
        yield "state in 8 bits", replace(job, optimizer=eight), strategy
    if not stages_of(strategy):
        yield f"accumulate={2 * options.accumulate}", with_(accumulate=2 * options.accumulate), strategy
    sharded = FullySharded(workers, deferred=not isinstance(job.model, nn.Module))
    if workers > 1 and strategy.name != sharded.name:
        yield "hr.FullySharded", job, sharded
    if "offload" in own:
        yield f"offload={not own['offload']}", job, type(strategy)(**{**own, "offload": not own["offload"]})


def _on_device(strategy: Strategy) -> tuple[Strategy, bool]:
    """Returns it with parts where a worker computes, and whether they are in host memory."""
    if len(levels := levels_of(strategy)) > 1:
        found = [_on_device(each) for each in levels]
        hosted = any(on_host for _, on_host in found)
        return (Hybrid(*(each for each, _ in found)), True) if hosted else (strategy, False)
    own = describe_options(strategy)
    if own.get("offload"):
        return type(strategy)(**{**own, "offload": False}), True
    return strategy, False


def _not_served(strategy: Strategy, plan: Plan) -> str:
    """Says what of a plan with servers is not known; "" where all is."""
    if all(role.computes for role in plan.roles):
        return ""
    if not isinstance(strategy, Served):
        return f"a worker of {strategy.name} waits for servers"
    # What was pushed over TCP is sent to the backup, and stays until it holds it: how much that is, is a race.
    races = strategy.backups and strategy.transport == "tcp"
    return "transport='tcp' sends a backup what was pushed, and holds it meanwhile" if races else ""


def _shorter(strategy: Strategy) -> tuple[Strategy, int]:
    """Returns it with so many rounds between exchanges as differ in memory, and after how many all repeats."""
    own: dict[str, Any] = dict(describe_options(strategy))
    every: dict[str, int] = {name: min(_DIFFERENT, own[name]) for name in ("push_every", "fetch_every") if name in own}
    return (type(strategy)(**(own | every)) if every else strategy), math.lcm(*every.values())


class _Planning:
    """What all plans of a job have in common: the model's shapes, and the fullest worker's share of a batch."""

    def __init__(self, job: Job, strategy: Strategy) -> None:
        self._cluster = detect(HOST)
        strategy, _ = _on_device(strategy)
        if strategy.closures:
            # The losses decide which gradients a line search keeps, the workers' order how many sums of portions wait.
            raise UsageError(
                f"what vectors the servers of {strategy.name} have is known when a line search ends; no plan"
            )
        given = job.model if isinstance(job.model, nn.Module) else None
        self._lent = [*given.parameters(), *given.buffers()] if given else []
        self._model = self._shapes(join_loss(job, strategy.whole_model), strategy)
        plan = strategy.plan(self._model, self._cluster)
        if why := _not_served(strategy, plan):
            raise UsageError(f"{why}: {_ALONE}")
        self.workers = plan.workers
        self.share = _share_of(job, plan.replicas)

    def roles(self, job: Job, strategy: Strategy) -> Mapping[str, RankMemory]:
        """Returns what processes hold that differ: each stage, or the first worker, whose share is the largest."""
        refuse(strategy.refusals(), job.options)
        strategy, hosted = _on_device(strategy)
        strategy, cycle = _shorter(strategy)
        backups = isinstance(strategy, Served) and bool(strategy.backups)
        if isinstance(strategy, Served):
            # A server and a worker do the same with a backup as without.
            strategy = replace(strategy, backups=0)
        job = join_loss(job, strategy.whole_model)
        plan = strategy.plan(self._model, self._cluster)
        build = partial(build_module, replace(job, model=_in_parts(job) if strategy.in_parts else job.model))
        share = self.share
        stages = stages_of(strategy, plan.workers)
        sent = self._messages(job, strategy, stages, plan, build) if stages else {}

        def measured(rank: int) -> RankMemory:
            given = job, self._model, strategy, plan, rank, build, share.batch, share.examples, self._lent, sent
            return HollowRank(*given, hosted, cycle).measure()

        if isinstance(strategy, Served):
            return {"worker 0": measured(0), **measure_servers(job, self._model, strategy, plan, backups)}
        if not stages:
            return {"worker 0": measured(0)}
        # Of each stage the first slice, which is the largest.
        ranks = range(0, plan.workers // plan.replicas, stages.slices)
        return {f"rank {rank}": measured(rank) for rank in ranks}

    def _messages(
        self, job: Job, strategy: Strategy, stages: Stages, plan: Plan, build: Callable[[], nn.Module]
    ) -> Mapping[int, Messages]:
        share, equal = self.share, (1,) * stages.micro_batches
        pieces = {stop - start: (start, stop) for start, stop in bounds(share.examples, equal) if start < stop}
        half = HALF.get(job.options.precision)
        tensor = by_kind(levels_of(strategy))[3]
        with HollowMemory() as memory, torch.autocast(HOST, half or torch.bfloat16, enabled=half is not None):
            for each in self._lent:
                memory.lend(each)
            module, sample = build(), sample_of(job)
            if tensor:
                # Between layers of which each device has a slice there are slices.
                split(module, tensor.rules, OneOfGroup(0, stages.slices, memory.share), Trial(sample, job.inputs))
            with lending(module):
                return {
                    size: messages(module, job.inputs, cut(share.batch, *piece, share.examples), sample, plan)
                    for size, piece in pieces.items()
                }

    def _shapes(self, job: Job, strategy: Strategy) -> ModelSpec:
        with HollowMemory() as memory:
            for each in self._lent:
                memory.lend(each)
            module = build_module(job)
            if next(iter(sparse_layers(module)), None) is not None:
                raise UsageError("the rows of sparse embeddings that a batch uses are known when it is read; no plan")
        # Its trial compares values.
        found = probe_optimizer(one_optimizer(job.optimizer, "a plan of memory"), module.named_parameters())

        def measure(request: ProfileRequest) -> tuple[LayerSpec, ...]:
            if not stages_of(strategy):
                raise UsageError(f"a stage of a pipeline waits for what others compute: {_ALONE}")
            return layers_of(module, objective_of(job, module), first_batch(job, request.examples), sample_of(job))

        with memory:
            model = describe(module, found.sliceable)
            model = replace(model, copies=2 + found.kept, optimizer=found.needs)
            size, clip = job.global_batch_size, job.options.clip_norm
            given = module, size, self._cluster, measure, partial(sample_of, job), job.inputs, clip
            probe = ModelProbe(*given, tries=False)
            return strategy.inspect_model(model, probe)


def _in_parts(job: Job) -> Callable[[], nn.Module]:
    make = job.model
    assert not isinstance(make, nn.Module)
    deferral = Deferral()
    return lambda: deferral.build(make)


def _share_of(job: Job, replicas: int) -> Share:
    """Returns the first worker's share of the first batch."""
    pipeline, _ = as_pipeline(job.data)
    loader = Loader(pipeline, job.seed, min(job.global_batch_size, len(pipeline)), (1,) * replicas, 0)
    share = next((share for share in loader.sweep(alone=True) if share.examples), None)
    if share is None:
        raise DataError("nothing is left of the data: a filter leaves out every example")
    return share
