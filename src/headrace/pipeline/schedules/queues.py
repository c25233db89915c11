"""How many messages must have room between the ranks of a pipeline, so that none waits for ever.

A rank that sends waits where all places of a channel are full. Looped breadth-first sends the values of all
micro-batches before its ranks read any of those that come back, and needs as many places; most schedules need two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator

from headrace.pipeline.schedules.schedule import Action, PassKind, PipelineSchedule

Edge = tuple[int, int]
"""A stage that sends and one that receives; gradients go to the earlier one."""

_Move = tuple[Edge, bool]
"""Between which stages a message goes, and whether it is sent."""


def queue_lengths(schedule: PipelineSchedule, edges: Collection[Edge] | None = None) -> dict[Edge, int]:
    """Returns how many messages each channel between two ranks must hold.

    Args:
        schedule: one that `check_schedule` has found right.
        edges: the stages between which values cross, the earlier one first; None for each and the next.

    Raises:
        ValueError: ranks wait for messages that are never sent.
    """
    placement, stages = schedule.placement(), schedule.stages()
    pairs = {(stage, stage + 1) for stage in range(stages - 1)} if edges is None else set(edges)
    pairs |= {(later, earlier) for earlier, later in pairs}
    # As far apart as two stages are, as many micro-batches lie between them, and one is being written.
    lengths = {(a, b): abs(a - b) + 1 for a, b in pairs if placement[a] != placement[b]}
    waiting = dict.fromkeys(pairs, 0)
    left = [deque(_moves(order, sorted(pairs))) for order in schedule.orders()]
    while any(left):
        if any([_advance(moves, lengths, waiting) for moves in left]):
            continue
        # With another place where a rank waits to send, all that has been done could have been done as well.
        full = {moves[0][0] for moves in left if moves and moves[0][1]}
        if not full:
            raise ValueError(f"all ranks wait for messages, and {sum(map(len, left))} are left")
        for edge in full:
            lengths[edge] += 1
    return lengths


def _advance(moves: deque[_Move], lengths: dict[Edge, int], waiting: dict[Edge, int]) -> bool:
    """Does what a rank can do before it waits; returns whether that was anything."""
    moved = False
    while moves:
        edge, sends = moves[0]
        if (sends and waiting[edge] == lengths.get(edge, -1)) or (not sends and not waiting[edge]):
            break
        waiting[edge] += 1 if sends else -1
        moves.popleft()
        moved = True
    return moved


def _moves(actions: Iterable[Action], pairs: Iterable[Edge]) -> Iterator[_Move]:
    """Yields what a rank sends and receives, in the order of the runner."""
    for action in actions:
        if action.kind is PassKind.BACKWARD_WEIGHT:
            continue
        back = action.backward
        yield from (((a, b), False) for a, b in pairs if b == action.stage and (a > b) == back)
        yield from (((a, b), True) for a, b in pairs if a == action.stage and (a > b) == back)
