"""The order in which all ranks of a pipeline send and receive, so that none waits for ever.

Between devices a send ends when the other side receives, and what a rank has asked for first ends first. So all ranks
take their part of one common order of all passes and transfers:

    rank 0   F0  >v0  F1  >v1  <g0  B0  <g1  B1          > sends, < receives; v are values, g their gradients
    rank 1   <v0  F0  <v1  B0  >g0  F1  B1  >g1

It is the order of time, where each pass takes as long as its kind does and a transfer begins when its value is made. No
rank waits for ever in it: of what is not done, take the first of the common order. All that stands before it on the
ranks that take part in it is done, so they have come to it, and what it needs has been made. This also holds where a
rank does what lies between two passes at once.

Between processes messages wait in channels, and a rank that sends waits where all places of one are full. Looped
breadth-first sends the values of all micro-batches before its ranks read any of those that come back, and needs as many
places; most schedules need two.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from headrace.errors import UsageError
from headrace.pipeline.schedules.schedule import Action, PassKind, PipelineSchedule, needs

_UNITS = {PassKind.FORWARD: 1, PassKind.BACKWARD: 2, PassKind.BACKWARD_INPUT: 1, PassKind.BACKWARD_WEIGHT: 1}
_HALVES = {PassKind.BACKWARD_INPUT, PassKind.BACKWARD_WEIGHT}


@dataclass(frozen=True)
class Transfer:
    """A micro-batch's values on their way to a later stage, or the gradients of such on their way back."""

    source: int
    target: int
    micro_batch: int

    @property
    def kind(self) -> str:
        """The kind of its channel: "values" or "gradients"."""
        return "values" if self.source < self.target else "gradients"


Program = tuple[tuple[Transfer, ...], ...]
"""Of one rank: the transfers before each of its passes, in order, and those behind the last one."""


def programs(
    orders: Sequence[Iterable[Action]], edges: Collection[tuple[int, int]], placement: Sequence[int]
) -> tuple[Program, ...]:
    """Returns what each rank sends and receives.

    Args:
        orders: the passes of each rank.
        edges: the stages between which values cross, the earlier one first.
        placement: the rank of each stage.

    Raises:
        ValueError: the ranks wait for each other's passes, with what each waits to do.
    """
    gaps: list[list[list[Transfer]]] = [[[]] for _ in orders]
    # At one time transfers are first: what a pass needs may have come when it begins.
    for _, _, rank, item in sorted(_events(orders, edges), key=lambda event: event[:3]):
        if isinstance(item, Action):
            gaps[rank].append([])
            continue
        for end in {placement[item.source], placement[item.target]}:
            if placement[item.source] != placement[item.target]:
                gaps[end][-1].append(item)
    return tuple(tuple(tuple(gap) for gap in own) for own in gaps)


def _events(
    orders: Sequence[Iterable[Action]], edges: Collection[tuple[int, int]]
) -> Iterator[tuple[int, bool, int, Action | Transfer]]:
    """Yields when each pass begins and each transfer, in units, whether it is a pass, and a place among equals."""
    left = [deque(order) for order in orders]
    last = max((action.stage for order in left for action in order), default=0)
    to = {stage: sorted(b for a, b in edges if a == stage) for stage in range(last + 1)}
    back = {stage: sorted(a for a, b in edges if b == stage) for stage in range(last + 1)}
    made: dict[Action, int] = {}
    free = [0] * len(left)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(left):
            while order and all(each in made for each in needs(order[0], last)):
                action, moved = order.popleft(), True
                begin = max([free[rank], *(made[each] for each in needs(action, last))])
                free[rank] = begin + _UNITS[action.kind]
                yield begin, True, rank, action
                made[action.makes] = free[rank]
                if action.kind is PassKind.BACKWARD_WEIGHT:
                    continue
                for target in (back if action.backward else to)[action.stage]:
                    yield free[rank], False, action.stage, Transfer(action.stage, target, action.micro_batch)
    if any(left):
        waiting = (
            f"rank {rank} for the {order[0].kind} of micro-batch {order[0].micro_batch} in stage {order[0].stage}"
            for rank, order in enumerate(left)
            if order
        )
        raise ValueError(f"{sum(map(len, left))} passes are never done: {', '.join(waiting):.300}")


@lru_cache(maxsize=64)
def check_schedule(name: str, schedule: PipelineSchedule) -> None:
    """Refuses a schedule that does not do each pass once, on its rank and in one order, or whose ranks wait for ever.

    Raises:
        UsageError: with the pass, and what is wrong with it.
    """
    found: dict[tuple[int, int], set[PassKind]] = {}
    orders, stages = schedule.orders(), schedule.stages()
    if schedule.orders() != orders:
        raise _wrong(name, "gives another order each time that it is asked, and each rank asks for itself")
    for rank, order in enumerate(orders):
        for action in order:
            where = f"the {action.kind} of micro-batch {action.micro_batch} in stage {action.stage}"
            kinds = found.setdefault((action.stage, action.micro_batch), set())
            if not (0 <= action.stage < stages and 0 <= action.micro_batch < schedule.micro_batches):
                raise _wrong(
                    name, f"has {where}, and there are {stages} stages and {schedule.micro_batches} micro-batches"
                )
            if schedule.rank_of(action.stage) != rank:
                raise _wrong(name, f"does {where} on rank {rank}, and rank_of says {schedule.rank_of(action.stage)}")
            if action.kind in kinds:
                raise _wrong(name, f"does {where} twice")
            kinds.add(action.kind)
    for stage in range(stages):
        for micro_batch in range(schedule.micro_batches):
            kinds = found.get((stage, micro_batch), set())
            if kinds not in ({PassKind.FORWARD, PassKind.BACKWARD}, {PassKind.FORWARD, *_HALVES}):
                there = ", ".join(sorted(kinds)) or "nothing"
                raise _wrong(
                    name,
                    f"does {there} with micro-batch {micro_batch} in stage {stage}, and that must be a forward pass "
                    "and a backward pass, or its two parts",
                )
    for back in (False, True):
        # Between two stages messages have no numbers: the first to be sent is the first to be used.
        (first, *others) = (_order(orders[schedule.rank_of(stage)], stage, back) for stage in range(stages))
        for stage, other in enumerate(others, 1):
            if other != first:
                what = "backward" if back else "forward"
                raise _wrong(name, f"does {what} of micro-batches {first} in stage 0, and of {other} in stage {stage}")
    try:
        programs(orders, (), schedule.placement())
    except ValueError as error:
        raise _wrong(name, f"lets its ranks wait for each other for ever: {error}") from None


def _order(actions: Iterable[Action], stage: int, back: bool) -> list[int]:
    kinds = (PassKind.BACKWARD, PassKind.BACKWARD_INPUT) if back else (PassKind.FORWARD,)
    return [action.micro_batch for action in actions if action.stage == stage and action.kind in kinds]


def _wrong(name: str, what: str) -> UsageError:
    return UsageError(f"schedule={name!r} {what}; correct its actions(), or use schedule='1f1b'")


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
