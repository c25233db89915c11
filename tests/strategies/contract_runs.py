"""Ways to train a job and keep what came out: through an engine, by hand, and verb by verb."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

import headrace as hr
from collectives.seats import together
from headrace.api.checks import inspect_job
from headrace.collectives.base import Collective
from headrace.collectives.threads import ThreadCollective, ThreadGroup
from headrace.data import Loader, as_pipeline
from headrace.engine.base import Engine
from headrace.pipeline.stage import TracedModel
from headrace.pipeline.trace.tracing import trace
from headrace.spec.cluster import Cluster, Host
from headrace.spec.compute import LayerSpec
from headrace.spec.job import Share
from headrace.spec.model import ModelSpec, ParameterSpec, ProfileRequest
from headrace.spec.plain import from_plain, to_plain
from headrace.spec.plan import Plan
from headrace.strategies import Strategy, WorkerContext
from headrace.strategies.context import ModelProbe
from headrace.testing.references import ReferenceResult as Outcome
from headrace.testing.references import by_hand, distance, outcome_of
from headrace.training.clipping import StepDecision
from headrace.training.exchange import Replica
from headrace.training.optimizer import StatePiece
from headrace.training.synchronization import PeriodicSync
from headrace.training.user_code.objective import Objective

__all__ = [
    "CLUSTER",
    "MODEL",
    "Outcome",
    "Saved",
    "by_hand",
    "carried",
    "distance",
    "drive",
    "held",
    "outcome_of",
    "step",
    "train",
    "with_replicas",
]

T = TypeVar("T")
Wires = Callable[[ThreadGroup, int], Collective]

GIGABYTE = 2**30
CLUSTER = Cluster((Host("here", cores=4, memory_bytes=GIGABYTE),))
MODEL = ModelSpec(
    (ParameterSpec("weight", (40, 5)), ParameterSpec("fixed", (3,), trainable=False)),
    layers=(
        LayerSpec("first", ("weight",), 800, 1e-3, 2e-3, 160, 80),
        LayerSpec("second", ("fixed",), 12, 1e-3, 2e-3, 160, 80),
        LayerSpec("third", (), 0, 1e-3, 2e-3, 160, 80),
    ),
)


def carried(plan: Plan) -> Plan:
    """Returns the plan after its way through JSON."""
    return from_plain(Plan, json.loads(json.dumps(to_plain(plan))))


def train(
    job: hr.Job, strategy: Strategy, engine: Engine | None = None, loop: Callable[[hr.Worker], None] | None = None
) -> Outcome:
    """Trains by the usual loop unless another is given, in threads of this process unless another engine is.

    The model is not tried before, so that what it counts or draws is what the run does.
    """
    engine = engine or hr.ThreadEngine()
    with tempfile.TemporaryDirectory() as folder:
        begin = hr.fit if loop is None else partial(hr.launch, loop)
        return outcome_of(begin(job, strategy, device="cpu", run_dir=Path(folder), engine=engine, check=False))


@dataclass(frozen=True)
class Saved:
    """What a checkpoint will hold.

    Attributes:
        tensors: parameters and buffers of rank 0.
        pieces: optimizer state of all ranks.
        settings: the rest of the state, the same on all ranks, after its way through JSON.
    """

    tensors: Mapping[str, Tensor]
    pieces: Sequence[StatePiece]
    settings: Mapping[str, Any]


def step(replica: Replica, share: Share, round_: int) -> StepDecision:
    """Does one round as a worker does."""
    sync = replica.sync if isinstance(replica.sync, PeriodicSync) else None
    replica.exchange.begin(round_)
    computed = replica.compute.run(dataclasses.replace(share, of=share.examples) if sync else share)
    if sync:
        sync.weigh(computed.weight)
    verdict = replica.exchange.synchronize(computed.loss is None or bool(computed.loss.isfinite()))
    if verdict.apply:
        replica.exchange.update(round_)
    else:
        replica.exchange.skip(round_)
    if sync and sync.coming(round_ + 1) == round_ + 1:
        sync.synchronize(round_ + 1)
    return verdict


def held(replica: Replica) -> Saved:
    """Returns a copy of what a rank holds, with whole parameters; all ranks call it together."""
    tensors = {name: tensor.detach().clone() for name, tensor in replica.compute.module.state_dict().items()}
    # Those of which the module holds a part alone. A stage's whole tensors are its own, and not all of the model.
    tensors |= {name.partition("/")[2]: each.detach().clone() for name, each in replica.compute.whole_tensors(True)}
    return Saved(tensors, replica.state(), json.loads(json.dumps(replica.exchange.settings())))


def drive(
    job: hr.Job,
    strategy: Strategy,
    workers: int,
    start: int,
    stop: int,
    saved: Saved | None = None,
    wired: bool | Wires = False,
    estranged: bool = False,
) -> list[Saved]:
    """Does the rounds `[start, stop)` verb by verb; returns what each rank holds at the end.

    Args:
        job, strategy, workers, start, stop: what to do.
        saved: what to begin from.
        wired: gives the replicas a wire, as if they were on devices of their own; what makes them, or True.
        estranged: lets every rank but the first come with other weights and buffers.
    """

    def rounds(_: int, replica: Replica, loader: Loader) -> Saved:
        if saved:
            replica.load(saved.pieces, saved.settings)
        for round_, share in enumerate(islice(loader.rounds(start), stop - start), start):
            step(replica, share, round_)
        return held(replica)

    return with_replicas(job, strategy, workers, rounds, saved, wired, estranged, start)


def layers_of(traced: TracedModel) -> tuple[LayerSpec, ...]:
    """Returns the layers of a model as if each took as long."""
    return tuple(LayerSpec(each.name, each.parameters, 0, 1.0, 1.0, 0, 0, bool(each.joined)) for each in traced.layers)


def with_replicas(
    job: hr.Job,
    strategy: Strategy,
    workers: int,
    act: Callable[[int, Replica, Loader], T],
    saved: Saved | None = None,
    wired: bool | Wires = False,
    estranged: bool = False,
    first: int = 0,
) -> list[T]:
    """Builds a replica a worker, and lets each act in a thread of its own; returns what they returned, by rank.

    They begin with round `first`.
    """
    prepared = inspect_job(job)
    sample = next(Loader(as_pipeline(job.data)[0], job.seed, 2, (1,), 0, ordered=True).sweep(alone=True)).batch
    spec = prepared.model

    def measure(_: ProfileRequest) -> tuple[LayerSpec, ...]:
        return layers_of(trace(prepared.module, sample, job.inputs))

    spec = strategy.inspect_model(
        spec, ModelProbe(prepared.module, job.global_batch_size, CLUSTER, measure, lambda: sample, job.inputs)
    )
    plan = strategy.plan(spec, CLUSTER)
    assert plan.workers == workers
    assert job.loss is not None
    objective = Objective(job.loss, weighed=prepared.weighed)

    meeting = ThreadGroup(workers)

    def body(host: ThreadCollective) -> T:
        try:
            return build(host)
        except BaseException:
            meeting.abort(host.rank)
            raise

    def build(host: ThreadCollective) -> T:
        module = copy.deepcopy(job.model)
        assert isinstance(module, torch.nn.Module)
        if saved:
            module.load_state_dict(dict(saved.tensors))
        for tensor in (*module.parameters(), *module.buffers()) if estranged and host.rank else ():
            tensor.data.fill_(1)
        wire = ThreadCollective if wired is True else wired
        devices = functools.cache(lambda: wire(meeting, host.rank) if wire else None)
        place = plan.role(host.rank).data_rank
        loader = Loader(as_pipeline(job.data)[0], job.seed, job.global_batch_size, plan.shares, place)
        epoch = loader.rounds_per_epoch
        parts = WorkerContext(module, spec, objective, job.optimizer, job.options, host, devices, epoch, first=first)
        parts = dataclasses.replace(parts, sample=lambda: sample)
        with parts.closing:
            return act(host.rank, strategy.replica(plan, host.rank, parts), loader)

    return together(workers, body)
