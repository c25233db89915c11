"""plan_memory: what each worker of a run will hold, with and without the choices that need less."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from headrace.api.memory.quantised import in_8_bits
from headrace.api.probes.losses import join_loss
from headrace.api.probes.optimizers.probe import probe_optimizer
from headrace.data.loading.loader import Loader, as_pipeline
from headrace.errors import DataError, HeadraceError, UsageError
from headrace.machine.dynamo import postpone_compiler
from headrace.machine.identity import detect
from headrace.modules import describe
from headrace.prediction.memory.hollow import HollowMemory
from headrace.prediction.memory.plan import MemoryPlan
from headrace.prediction.memory.rank import HollowRank, RankMemory
from headrace.spec.compute import LayerSpec
from headrace.spec.job import Job, Share
from headrace.spec.model import ModelSpec, ProfileRequest
from headrace.spec.options import check_options
from headrace.spec.parameter_sets import one_optimizer
from headrace.strategies import FullySharded, Strategy, resolve
from headrace.strategies.context import ModelProbe
from headrace.strategies.refusals import refuse
from headrace.training.deferred.parts import Deferral
from headrace.training.embeddings.layer import sparse_layers
from headrace.training.user_code.trial import without_compilers
from headrace.training.user_code.untouched import same_generators, untouched
from headrace.worker.session import build_module, sample_of

_ALONE = "what its workers hold is not found by running one alone; headrace simulate estimates it"


def plan_memory(job: Job, strategy: str | Strategy, choices: bool = True) -> MemoryPlan:
    """Returns what the fullest worker will hold, as on the CPUs of this host; nothing of the model takes memory.

    Args:
        job: its model is made, and trained for three rounds, over tensors without values.
        strategy: one whose workers all do the same: without servers or stages, and not `hr.ContextParallel`.
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
    check_options(job.options, "cpu")
    with torch.random.fork_rng(devices=[]), untouched(job.data), same_generators(), without_compilers():
        planning = _Planning(job, chosen)
        memory = planning.memory(job, chosen)
        found: dict[str, RankMemory] = {}
        impossible: dict[str, str] = {}
        for name, other, way in _choices(job, chosen, planning.workers) if choices else ():
            try:
                same = planning if other.optimizer is job.optimizer else _Planning(other, way)
                found[name] = same.memory(other, way)
            except HeadraceError as error:
                impossible[name] = str(error)
    return MemoryPlan(chosen.name, planning.workers, planning.share.examples, memory, found, impossible)


def _choices(job: Job, strategy: Strategy, workers: int) -> Iterator[tuple[str, Job, Strategy]]:
    options = job.options

    def with_(**changed: Any) -> Job:
        return replace(job, options=replace(options, **changed))

    for recompute in ("full", "selective", None):
        if recompute != options.recompute:
            yield f"recompute={recompute!r}", with_(recompute=recompute), strategy
    if options.precision == "fp32":
        yield "precision='bf16'", with_(precision="bf16"), strategy
    if eight := in_8_bits(job.optimizer):
        yield "state in 8 bits", replace(job, optimizer=eight), strategy
    yield f"accumulate={2 * options.accumulate}", with_(accumulate=2 * options.accumulate), strategy
    sharded = FullySharded(workers, deferred=not isinstance(job.model, nn.Module))
    if workers > 1 and strategy.name != sharded.name:
        yield "hr.FullySharded", job, sharded


class _Planning:
    """What all plans of a job have in common: the model's shapes, and the fullest worker's share of a batch."""

    def __init__(self, job: Job, strategy: Strategy) -> None:
        self._cluster = detect("cpu")
        given = job.model if isinstance(job.model, nn.Module) else None
        self._lent = [*given.parameters(), *given.buffers()] if given else []
        self._model = self._shapes(join_loss(job, strategy.whole_model), strategy)
        plan = strategy.plan(self._model, self._cluster)
        if not all(role.computes for role in plan.roles):
            raise UsageError(f"a worker of {strategy.name} waits for servers: {_ALONE}")
        self.workers = plan.workers
        self.share = _share_of(job, plan.replicas)

    def memory(self, job: Job, strategy: Strategy) -> RankMemory:
        """Returns what the first worker holds, whose share is the largest."""
        refuse(strategy.refusals(), job.options)
        job = join_loss(job, strategy.whole_model)
        plan = strategy.plan(self._model, self._cluster)
        build = partial(build_module, replace(job, model=_in_parts(job) if strategy.in_parts else job.model))
        share = self.share
        return HollowRank(job, self._model, strategy, plan, 0, build, share.batch, share.examples, self._lent).measure()

    def _shapes(self, job: Job, strategy: Strategy) -> ModelSpec:
        with HollowMemory() as memory:
            for each in self._lent:
                memory.lend(each)
            module = build_module(job)
            if next(iter(sparse_layers(module)), None) is not None:
                raise UsageError("the rows of sparse embeddings that a batch uses are known when it is read; no plan")
        # Its trial compares values.
        found = probe_optimizer(one_optimizer(job.optimizer, "a plan of memory"), module.named_parameters())
        with memory:
            model = describe(module, found.sliceable)
            model = replace(model, copies=2 + found.kept, optimizer=found.needs)
            size, clip = job.global_batch_size, job.options.clip_norm
            given = module, size, self._cluster, _no_stages, partial(sample_of, job), job.inputs, clip
            probe = ModelProbe(*given, tries=False)
            return strategy.inspect_model(model, probe)


def _no_stages(_: ProfileRequest) -> tuple[LayerSpec, ...]:
    raise UsageError(f"a stage of a pipeline waits for what others compute: {_ALONE}")


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
