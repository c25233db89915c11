"""The event files of a simulated run, as a real run writes them, so that `headrace report` draws it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path

from headrace.errors import UnfitMachine, UsageError
from headrace.machine.identity import versions
from headrace.prediction.simulation.scene import Scene
from headrace.prediction.simulation.timeline import Passes, Timeline
from headrace.spec.events import (
    LAUNCHER,
    Event,
    Notice,
    PipelineStepTimed,
    RunEnded,
    RunStarted,
    StagePass,
    Stepped,
    WorkerEnded,
    WorkerStarted,
    encode,
)
from headrace.spec.plain import to_plain
from headrace.spec.plan import Plan, Role
from headrace.strategies import Strategy
from headrace.strategies.strategy import describe_options

_PARTS = {"backward for the input": "input", "backward for the weights": "weights"}


def write(directory: Path, strategy: Strategy, scene: Scene, timeline: Timeline, memory: int) -> None:
    """Writes a run directory.

    Raises:
        UsageError: it holds events already.
        UnfitMachine: it cannot be written.
    """
    folder = directory / "events"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"{directory} holds the events of another run; name a new directory")
    except OSError as error:
        raise UnfitMachine(f"cannot write to the run directory {directory}: {error.strerror}; name another") from error
    by_rank: dict[int, list[Event]] = defaultdict(list)
    by_rank[LAUNCHER] = _launcher(strategy, scene, timeline)
    for rank, events in _workers(scene, timeline, memory).items():
        by_rank[rank] = events
    for rank, events in by_rank.items():
        name = "launcher" if rank == LAUNCHER else f"rank-{rank}"
        events.sort(key=lambda event: event.time_s)
        (folder / f"{name}.jsonl").write_text("".join(f"{encode(event)}\n" for event in events), encoding="utf-8")


def plan_of(strategy: Strategy, scene: Scene) -> Plan:
    """Returns who does what, without the parameters' owners."""
    ranks = scene.behaviour.devices
    roles = [
        Role(rank, "worker", host.name, scene.cluster.device, 1, rank // ranks, rank % ranks)
        for rank, host in enumerate(scene.hosts)
    ]
    first = len(roles)
    roles += [Role(first + place, "server", host.name, "cpu", 1, -1) for place, host in enumerate(scene.servers)]
    stages = tuple((f"stage {stage}",) for stage in range(ranks)) if ranks > 1 else ()
    return Plan(
        strategy.name,
        describe_options(strategy),
        tuple(roles),
        (1,) * scene.replicas,
        scene.model.trainable_bytes,
        (),
        stages,
    )


def _launcher(strategy: Strategy, scene: Scene, timeline: Timeline) -> list[Event]:
    started = RunStarted(
        LAUNCHER,
        0.0,
        strategy=strategy.name,
        workers=scene.workers,
        device=scene.cluster.device,
        threads=1,
        global_batch_size=scene.examples,
        examples_per_epoch=scene.examples * scene.assumptions.steps,
        started_at=datetime.now().astimezone().isoformat(timespec="seconds"),
        plan=to_plain(plan_of(strategy, scene)),
        versions=versions(),
    )
    told = ["simulated: nothing was trained, and all times are virtual", *timeline.notes]
    return [started, *(Notice(LAUNCHER, 0.0, text) for text in told), RunEnded(LAUNCHER, timeline.seconds, "ok")]


def _workers(scene: Scene, timeline: Timeline, memory: int) -> Mapping[int, list[Event]]:
    found: dict[int, list[Event]] = {}
    shares, ranks = scene.shares(), scene.behaviour.devices
    for rank, host in enumerate(scene.hosts):
        found[rank] = [WorkerStarted(rank, 0.0, host.name, 0, scene.cluster.device, 1)]
    columns = (
        timeline.worker,
        timeline.step,
        timeline.ended_s,
        timeline.compute_s,
        timeline.exchange_s,
        timeline.update_s,
    )
    for worker, step, ended, compute, exchange, update in zip(*(column.tolist() for column in columns), strict=True):
        # Of a replica that several ranks hold, the first counts the examples.
        own = shares[worker // ranks] if worker % ranks == 0 else 0
        found[worker].append(Stepped(worker, ended, step, 0, own, None, float(own), 0.0, compute, exchange, update))
    for each in timeline.passes:
        found[each.rank].append(_timed(each))
    found[0] += timeline.averaged
    for rank, events in found.items():
        steps = sum(isinstance(event, Stepped) for event in events)
        moved = round(timeline.moved_bytes * steps)
        events.append(WorkerEnded(rank, timeline.seconds, steps, moved, memory, scene.model.parameter_bytes, 0))
    return found


def _timed(passes: Passes) -> PipelineStepTimed:
    columns: Iterable[tuple[int, int, str, float, float]] = zip(
        passes.stages, passes.micro_batches, passes.kinds, passes.began_s, passes.ended_s, strict=True
    )
    spans = tuple(
        StagePass(stage, micro_batch, kind != "forward", began, ended, 0.0, _PARTS.get(kind, ""))
        for stage, micro_batch, kind, began, ended in columns
    )
    return PipelineStepTimed(passes.rank, max(passes.ended_s), passes.step, passes.in_flight, spans)
