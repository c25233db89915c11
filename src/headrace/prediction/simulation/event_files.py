"""The events of a simulated run, for `headrace report`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from headrace.errors import UnfitMachine, UsageError
from headrace.prediction.simulation.scene import Scene
from headrace.prediction.simulation.timeline import Passes, Timeline
from headrace.prediction.virtual_events import VirtualEvents
from headrace.spec.events import LAUNCHER, PipelineStepTimed, StagePass, Stepped
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
    examples = scene.examples * scene.assumptions.steps
    plan, moved = plan_of(strategy, scene), timeline.moved_bytes
    events = VirtualEvents(plan, scene.model, scene.examples, examples, moved)
    for text in ("simulated: nothing was trained, and all times are virtual", *timeline.notes):
        events.note(LAUNCHER, 0.0, text)
    shares, ranks = scene.shares(), scene.behaviour.devices
    for worker, step, ended_s, compute_s, exchange_s, update_s in timeline.rows():
        # Of a replica that several ranks hold, the first counts the examples.
        count = shares[worker // ranks] if worker % ranks == 0 else 0
        events.write(Stepped(worker, ended_s, step, 0, count, None, float(count), 0.0, compute_s, exchange_s, update_s))
    for event in (*map(_timed, timeline.passes), *timeline.averaged):
        events.write(event)
    events.end(timeline.seconds, memory)
    events.save(directory)


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


def _timed(passes: Passes) -> PipelineStepTimed:
    columns: Iterable[tuple[int, int, str, float, float]] = zip(
        passes.stages, passes.micro_batches, passes.kinds, passes.began_s, passes.ended_s, strict=True
    )
    spans = tuple(
        StagePass(stage, micro_batch, kind != "forward", began, ended, 0.0, _PARTS.get(kind, ""))
        for stage, micro_batch, kind, began, ended in columns
    )
    return PipelineStepTimed(passes.rank, max(passes.ended_s), passes.step, passes.in_flight, spans)
