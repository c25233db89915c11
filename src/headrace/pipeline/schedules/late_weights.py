"""1F1B whose weights' gradients are made later than the inputs': what ZB-H1 and ZB-H2 have in common."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.pipeline.schedules.schedule import Action, PassKind, PipelineSchedule


def with_late_weights(schedule: PipelineSchedule, rank: int, ahead: int, late: int) -> Iterator[Action]:
    """Yields a rank's passes.

    Args:
        ahead: forward passes before the first backward, if there are so many micro-batches.
        late: by so many micro-batches a weight pass comes after the pass of the input's gradient.
    """
    count = schedule.micro_batches
    ahead = min(ahead, count)
    for micro_batch in range(ahead):
        yield Action(rank, micro_batch)
    for micro_batch in range(count):
        if micro_batch + ahead < count:
            yield Action(rank, micro_batch + ahead)
        yield Action(rank, micro_batch, PassKind.BACKWARD_INPUT)
        if micro_batch >= late:
            yield Action(rank, micro_batch - late, PassKind.BACKWARD_WEIGHT)
    for micro_batch in range(max(0, count - late), count):
        yield Action(rank, micro_batch, PassKind.BACKWARD_WEIGHT)
