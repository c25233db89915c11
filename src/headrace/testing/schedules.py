"""The contract of schedules of pipelines."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import product

import headrace as hr
from headrace import registry
from headrace.pipeline.schedules.schedule import PipelineSchedule, draw, in_flight, timed
from headrace.pipeline.schedules.transfers import check_schedule, queue_lengths
from headrace.testing.jobs import BATCH, SGD, Case, deep
from headrace.testing.references import distance, one_device, outcome_of


def check_pipeline_schedule(
    kind: type[PipelineSchedule], chunks: Sequence[int] = (1,), ranks: Sequence[int] = (1, 2, 3, 4), trains: bool = True
) -> None:
    """Checks a schedule with 1 to 12 micro-batches, and trains a model by it on two ranks.

    Each pass is done once, on its rank, in one order on all stages; no ranks wait for each other; what `held` says is
    what a stage holds; a drawing in the docstring is what is done; the trained model is that of one device.

    Args:
        chunks: numbers of stages a rank that it can have.

    Raises:
        AssertionError, UsageError: a rule that it does not keep.
    """
    for size, micro_batches, count in product(ranks, (1, 2, 3, 4, 8, 12), chunks):
        schedule = kind(size, micro_batches, count)
        check_schedule(kind.__name__, schedule)
        queue_lengths(schedule)
        for stage in range(schedule.stages()):
            own = [action for action in schedule.actions(schedule.rank_of(stage)) if action.stage == stage]
            held = in_flight(own, weights=True)
            if schedule.held(stage) != held:
                raise AssertionError(
                    f"held({stage}) of {kind.__name__}({size}, {micro_batches}, {count}) is {schedule.held(stage)}, "
                    f"and the stage keeps something of {held} micro-batches at a time; plans count memory by it"
                )
    _check_drawing(kind, chunks[0])
    if trains:
        _check_training(kind, chunks[0])


def _check_drawing(kind: type[PipelineSchedule], chunks: int) -> None:
    lines = (kind.__doc__ or "").splitlines()
    drawn = [line.strip() for line in lines if line.strip().startswith("rank ")]
    if not drawn:
        return
    micro_batches = 1 + max(int(number) for line in drawn for number in re.findall(r"\d+", line[9:]))
    done = draw(timed(kind(len(drawn), micro_batches, chunks).orders())).splitlines()
    if done != drawn:
        raise AssertionError(f"the drawing of {kind.__name__} is not what it does; that is\n" + "\n".join(done))


def _check_training(kind: type[PipelineSchedule], chunks: int) -> None:
    job = Case(deep, optimizer=SGD).job(2 * BATCH + 3)
    place = f"{kind.__module__}:{kind.__qualname__}"
    before = registry.PLACED.get(place)
    registry.PLACED[place] = kind
    try:
        strategy = hr.Pipeline(2, BATCH, schedule=place, chunks=chunks)
        run = hr.fit(job, strategy, device="cpu", engine=hr.ThreadEngine(), check=False)
    finally:
        # What was placed goes to the workers of later runs, too, which may not find its module.
        del registry.PLACED[place]
        if before is not None:
            registry.PLACED[place] = before
    apart = distance(outcome_of(run).tensors, one_device(job, 1).tensors)
    if not apart <= 1e-9:
        raise AssertionError(f"trained by {kind.__name__} on two ranks, a model is {apart:.2g} from one device's")
