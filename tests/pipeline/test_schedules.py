"""Schedules: what is drawn is what is done, no rank waits for ever, and the bubbles are those of the papers."""

from __future__ import annotations

from collections import deque
from itertools import product

import pytest

from headrace.pipeline.schedules import SCHEDULES
from headrace.pipeline.schedules.schedule import Action, PassKind, PipelineSchedule, bubble, draw, in_flight, timed

CASES = [
    (name, ranks, micro_batches, chunks)
    for name in SCHEDULES
    for chunks in ((2, 3) if SCHEDULES[name](1, 1, 2).stages() > 1 else (1,))
    for ranks, micro_batches in product((1, 2, 3, 4), (1, 2, 3, 4, 8))
]
SHAPES = [(2, 4), (3, 8), (4, 32), (8, 24)]
every_case = pytest.mark.parametrize(("name", "ranks", "micro_batches", "chunks"), CASES)
GRADIENTS = (PassKind.BACKWARD, PassKind.BACKWARD_INPUT)


def orders(name: str, *shape: int) -> list[list[Action]]:
    return SCHEDULES[name](*shape).orders()


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_drawing_is_what_is_done(name: str) -> None:
    lines = (SCHEDULES[name].__doc__ or "").splitlines()
    drawn = [line.strip() for line in lines if line.strip().startswith("rank ")]
    assert draw(timed(orders(name, *((2, 4, 2) if name == "interleaved" else (3, 4))))).splitlines() == drawn


@every_case
def test_every_micro_batch_goes_through_every_stage_and_back(
    name: str, ranks: int, micro_batches: int, chunks: int
) -> None:
    schedule = SCHEDULES[name](ranks, micro_batches, chunks)
    spans = timed(schedule.orders())
    every = list(product(range(schedule.stages()), range(micro_batches)))
    whole = {Action(*each, kind) for each in every for kind in (PassKind.FORWARD, PassKind.BACKWARD)}
    split = {Action(*each, kind) for each in every for kind in PassKind if kind is not PassKind.BACKWARD}
    assert {span.action for span in spans} in (whole, split)
    assert len(spans) == len({span.action for span in spans})
    assert all(schedule.rank_of(span.action.stage) == span.rank for span in spans)
    assert schedule.stages() == (ranks * chunks if name == "interleaved" else ranks)


@every_case
@pytest.mark.parametrize("kinds", [GRADIENTS, (PassKind.BACKWARD, PassKind.BACKWARD_WEIGHT)])
def test_backward_goes_in_one_order_on_all_stages(
    name: str, ranks: int, micro_batches: int, chunks: int, kinds: tuple[PassKind, ...]
) -> None:
    """So that gradients add up to the same bits, whatever the number of stages."""
    schedule = SCHEDULES[name](ranks, micro_batches, chunks)
    found = {
        tuple(a.micro_batch for a in schedule.actions(schedule.rank_of(stage)) if a.kind in kinds and a.stage == stage)
        for stage in range(schedule.stages())
    }
    assert len(found) == 1


@pytest.mark.parametrize(("ranks", "micro_batches"), SHAPES)
def test_bubbles_are_those_of_the_papers(ranks: int, micro_batches: int) -> None:
    idle = (ranks - 1) / (micro_batches + ranks - 1)
    for name in ("gpipe", "1f1b"):
        cost = {PassKind.FORWARD: 1.0, PassKind.BACKWARD: 2.0}
        spans = timed(orders(name, ranks, micro_batches), lambda action: cost[action.kind])  # noqa: B023
        assert bubble(spans) == pytest.approx(idle)


@pytest.mark.parametrize(("ranks", "micro_batches", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 8, 3)])
def test_the_interleaved_bubble_is_divided_by_the_chunks(ranks: int, micro_batches: int, chunks: int) -> None:
    ideal = (ranks - 1) / micro_batches / chunks
    assert bubble(timed(orders("interleaved", ranks, micro_batches, chunks))) == pytest.approx(ideal / (1 + ideal))


def longest_s(name: str, ranks: int, micro_batches: int, times: tuple[float, ...], transfer: float = 0.0) -> float:
    """Returns how long the rank that takes longest is at it; `times` are those of the three kinds of work."""
    forward, backward, weights = times
    cost = {
        PassKind.FORWARD: forward,
        PassKind.BACKWARD: backward + weights,
        PassKind.BACKWARD_INPUT: backward,
        PassKind.BACKWARD_WEIGHT: weights,
    }
    spans = timed(orders(name, ranks, micro_batches), lambda action: cost[action.kind], transfer)
    own = [[span for span in spans if span.rank == rank] for rank in range(ranks)]
    return max(each[-1].stop - each[0].start for each in own)


@pytest.mark.parametrize("times", [(1, 1, 1), (2, 3, 2), (3, 3, 1), (1, 2, 1)])
@pytest.mark.parametrize(("ranks", "micro_batches"), SHAPES)
def test_weight_passes_fill_the_bubble_of_1f1b(ranks: int, micro_batches: int, times: tuple[int, ...]) -> None:
    forward, backward, weights = times
    work = micro_batches * sum(times)
    assert longest_s("1f1b", ranks, micro_batches, times) - work == (ranks - 1) * sum(times)
    assert longest_s("zb_h1", ranks, micro_batches, times) - work == (ranks - 1) * (forward + backward - weights)


def test_in_units_zb_h1_has_a_third_of_the_bubble_of_1f1b() -> None:
    assert longest_s("zb_h1", 4, 8, (1, 1, 1)) == 3 * 8 + 3
    assert longest_s("1f1b", 4, 8, (1, 1, 1)) == 3 * 8 + 9


@pytest.mark.parametrize(("name", "rate"), [("1f1b", 0.2431), ("zb_h1", 0.1585)])
def test_bubbles_with_the_times_of_zero_bubble_pipelines(name: str, rate: float) -> None:
    """Qi et al. 2023, table 5: the 1.5B model on 8 stages with 24 micro-batches; transfers are a latency."""
    times = (18.522, 18.086, 9.337)
    assert round(1 - 24 * sum(times) / longest_s(name, 8, 24, times, transfer=0.601), 4) == rate


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 8), (4, 8), (4, 3)])
def test_how_many_micro_batches_a_rank_holds(ranks: int, micro_batches: int) -> None:
    """GPipe all of them, 1F1B as many as stages are behind; ZB-H1 what weight passes need of those before as well."""
    for rank in range(ranks):
        behind = min(ranks - rank, micro_batches)
        for name, most, held in (
            ("gpipe", micro_batches, micro_batches),
            ("1f1b", behind, behind),
            ("zb_h1", behind, min(ranks, micro_batches)),
        ):
            schedule = SCHEDULES[name](ranks, micro_batches)
            assert in_flight(schedule.actions(rank)) == most
            assert in_flight(schedule.actions(rank), weights=True) == schedule.held(rank) == held


def test_an_interleaved_schedule_leaves_out_what_its_last_group_lacks() -> None:
    for four, three in zip(orders("interleaved", 2, 4, 2), orders("interleaved", 2, 3, 2), strict=True):
        assert three == [action for action in four if action.micro_batch < 3]


def test_ranks_that_wait_for_each_other_are_found() -> None:
    stuck = [[Action(rank, 0, PassKind.BACKWARD), Action(rank, 0)] for rank in range(2)]
    with pytest.raises(ValueError, match="all ranks wait, and 4 actions are left"):
        timed(stuck)


@every_case
def test_no_rank_waits_for_ever_where_channels_are_short(
    name: str, ranks: int, micro_batches: int, chunks: int
) -> None:
    """Every stage sends to every later one, with as few messages under way as the runtime allows."""
    assert ShortChannels(SCHEDULES[name](ranks, micro_batches, chunks)).all_pass()


class ShortChannels:
    """Ranks whose messages wait in queues of the runtime's length; a sender waits while one is full."""

    def __init__(self, schedule: PipelineSchedule) -> None:
        self.placement, self.stages = schedule.placement(), schedule.stages()
        self.steps = [deque(self.moves(order)) for order in schedule.orders()]
        self.queues: dict[tuple[int, int], deque[int]] = {}

    def moves(self, actions: list[Action]) -> list[tuple[str, tuple[int, int], int]]:
        found = []
        for action in actions:
            if action.kind is PassKind.BACKWARD_WEIGHT:
                continue
            before, behind = range(action.stage), range(action.stage + 1, self.stages)
            sources, targets = (behind, before) if action.kind in GRADIENTS else (before, behind)
            found += [("receive", (source, action.stage), action.micro_batch) for source in sources]
            found += [("send", (action.stage, target), action.micro_batch) for target in targets]
        return found

    def all_pass(self) -> bool:
        while any(self.steps):
            if not any([self.advance(steps) for steps in self.steps]):
                return False
        return True

    def advance(self, steps: deque[tuple[str, tuple[int, int], int]]) -> bool:
        moved = False
        while steps:
            verb, edge, micro_batch = steps[0]
            queue = self.queues.setdefault(edge, deque())
            near = self.placement[edge[0]] == self.placement[edge[1]]
            if verb == "send" and not near and len(queue) == abs(edge[0] - edge[1]) + 1:
                break
            if verb == "receive" and not queue:
                break
            if verb == "send":
                queue.append(micro_batch)
            else:
                assert queue.popleft() == micro_batch
            steps.popleft()
            moved = True
        return moved
