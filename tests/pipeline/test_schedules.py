"""Schedules: what is drawn is what is done, nobody waits for ever, and the bubble is the papers'."""

from __future__ import annotations

from collections import deque
from importlib import import_module
from itertools import product

import pytest

from headrace.pipeline.schedules import SCHEDULES, Action, Schedule
from headrace.pipeline.schedules.schedule import bubble, draw, in_flight, timed

MODULES = {"gpipe": "gpipe", "1f1b": "one_forward_one_backward", "interleaved": "interleaved"}
CASES = [
    (name, ranks, micro_batches, chunks)
    for name, chunks in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3))
    for ranks, micro_batches in product((1, 2, 3, 4), (1, 2, 3, 4, 8))
    if name != "interleaved" or micro_batches % ranks == 0
]
every_case = pytest.mark.parametrize(("name", "ranks", "micro_batches", "chunks"), CASES)


@pytest.mark.parametrize(("name", "ranks", "chunks"), [("gpipe", 3, 1), ("1f1b", 3, 1), ("interleaved", 2, 2)])
def test_the_drawing_is_what_is_done(name: str, ranks: int, chunks: int) -> None:
    module = import_module(f"headrace.pipeline.schedules.{MODULES[name]}")
    drawn = [line.strip() for line in (module.__doc__ or "").splitlines() if line.strip().startswith("rank ")]
    assert draw(timed(SCHEDULES[name], ranks, 4, chunks)).splitlines() == drawn


@every_case
def test_every_micro_batch_goes_through_every_stage_and_back(
    name: str, ranks: int, micro_batches: int, chunks: int
) -> None:
    spans = timed(SCHEDULES[name], ranks, micro_batches, chunks)
    wanted = {
        Action(stage, micro_batch, backward)
        for stage, micro_batch, backward in product(range(ranks * chunks), range(micro_batches), (False, True))
    }
    assert {span.action for span in spans} == wanted
    assert len(spans) == len(wanted)
    assert all(span.action.stage % ranks == span.rank for span in spans)


@every_case
def test_backward_goes_in_one_order_on_all_stages(name: str, ranks: int, micro_batches: int, chunks: int) -> None:
    """So that gradients add up to the same bits, whatever the number of stages."""
    orders = {
        tuple(
            a.micro_batch for a in schedule_of(name, rank, ranks, micro_batches, chunks) if a.backward and a.stage == s
        )
        for rank in range(ranks)
        for s in range(rank, ranks * chunks, ranks)
    }
    assert len(orders) == 1


def schedule_of(name: str, rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Action]:
    return list(SCHEDULES[name](rank, ranks, micro_batches, chunks))


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (3, 8), (4, 32)])
def test_bubbles_are_those_of_the_papers(ranks: int, micro_batches: int) -> None:
    idle = (ranks - 1) / (micro_batches + ranks - 1)
    for name in ("gpipe", "1f1b"):
        spans = timed(SCHEDULES[name], ranks, micro_batches, cost=lambda action: 1.0 + action.backward)
        assert bubble(spans) == pytest.approx(idle)


@pytest.mark.parametrize(("ranks", "micro_batches", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 8, 3)])
def test_the_interleaved_bubble_is_divided_by_the_chunks(ranks: int, micro_batches: int, chunks: int) -> None:
    spans = timed(SCHEDULES["interleaved"], ranks, micro_batches, chunks)
    ideal = (ranks - 1) / micro_batches / chunks
    assert bubble(spans) == pytest.approx(ideal / (1 + ideal))


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 8), (4, 8), (4, 3)])
def test_gpipe_holds_all_micro_batches_and_1f1b_as_many_as_stages_behind(ranks: int, micro_batches: int) -> None:
    for rank in range(ranks):
        assert in_flight(schedule_of("gpipe", rank, ranks, micro_batches, 1)) == micro_batches
        assert in_flight(schedule_of("1f1b", rank, ranks, micro_batches, 1)) == min(ranks - rank, micro_batches)


def test_1f1b_with_times_of_zero_bubble_pipelines() -> None:
    """Qi et al. 2023, table 5: the 1.5B model on 8 stages with 24 micro-batches; transfers are a latency."""
    forward, backward, weights, transfer = 18.522, 18.086, 9.337, 0.601
    spans = timed(
        SCHEDULES["1f1b"], 8, 24, cost=lambda a: backward + weights if a.backward else forward, transfer=transfer
    )
    work = 24 * (forward + backward + weights)
    longest = max(
        max(span.stop for span in spans if span.rank == rank) - min(span.start for span in spans if span.rank == rank)
        for rank in range(8)
    )
    assert round(1 - work / longest, 4) == 0.2431


def test_an_interleaved_schedule_wants_a_multiple_of_ranks() -> None:
    with pytest.raises(ValueError, match="3 micro-batches are no multiple of 2 ranks"):
        list(SCHEDULES["interleaved"](0, 2, 3, 2))


def test_ranks_that_wait_for_each_other_are_found() -> None:
    def backwards(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Action]:
        return [Action(rank, 0, backward=True), Action(rank, 0)]

    with pytest.raises(ValueError, match="all ranks wait, and 4 actions are left"):
        timed(lambda *numbers: iter(backwards(*numbers)), 2, 1)


@every_case
def test_nobody_waits_for_ever_where_ways_are_short(name: str, ranks: int, micro_batches: int, chunks: int) -> None:
    """Every stage sends to every later one, with as few messages under way as the runtime allows."""
    assert Roadworks(SCHEDULES[name], ranks, micro_batches, chunks).comes_through()


class Roadworks:
    """Ranks whose messages wait in queues of the runtime's length; a sender waits while one is full."""

    def __init__(self, schedule: Schedule, ranks: int, micro_batches: int, chunks: int) -> None:
        self.ranks, self.stages = ranks, ranks * chunks
        self.steps = [deque(self.moves(schedule(rank, ranks, micro_batches, chunks))) for rank in range(ranks)]
        self.queues: dict[tuple[int, int], deque[int]] = {}

    def moves(self, actions: object) -> list[tuple[str, tuple[int, int], int]]:
        found = []
        for action in actions:  # type: ignore[attr-defined]
            before, behind = range(action.stage), range(action.stage + 1, self.stages)
            sources, targets = (behind, before) if action.backward else (before, behind)
            found += [("receive", (source, action.stage), action.micro_batch) for source in sources]
            found += [("send", (action.stage, target), action.micro_batch) for target in targets]
        return found

    def comes_through(self) -> bool:
        while any(self.steps):
            if not any([self.advance(steps) for steps in self.steps]):
                return False
        return True

    def advance(self, steps: deque[tuple[str, tuple[int, int], int]]) -> bool:
        moved = False
        while steps:
            verb, way, micro_batch = steps[0]
            queue = self.queues.setdefault(way, deque())
            near = (way[0] - way[1]) % self.ranks == 0
            if verb == "send" and not near and len(queue) == abs(way[0] - way[1]) + 1:
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
