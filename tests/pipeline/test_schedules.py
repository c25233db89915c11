"""Schedules: what is drawn is what is done, no rank waits for ever, and the bubbles are those of the papers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from random import Random

import pytest

from headrace.errors import UsageError
from headrace.pipeline.schedules import SCHEDULES
from headrace.pipeline.schedules.schedule import Action, PassKind, PipelineSchedule, bubble, draw, in_flight, timed
from headrace.pipeline.schedules.transfers import check_schedule, queue_lengths
from pipeline.shapes import chunks_of

CASES = [
    (name, ranks, micro_batches, chunks)
    for name in SCHEDULES
    for chunks in chunks_of(name)
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
    micro_batches = 1 + max(int(number) for line in drawn for number in re.findall(r"\d+", line[9:]))
    assert draw(timed(orders(name, len(drawn), micro_batches, chunks_of(name)[0]))).splitlines() == drawn


@every_case
def test_every_micro_batch_goes_through_every_stage_and_back(
    name: str, ranks: int, micro_batches: int, chunks: int
) -> None:
    schedule = SCHEDULES[name](ranks, micro_batches, chunks)
    spans = timed(schedule.orders())
    whole, split = {PassKind.FORWARD, PassKind.BACKWARD}, {*PassKind} - {PassKind.BACKWARD}
    for each in product(range(schedule.stages()), range(micro_batches)):
        assert {span.action.kind for span in spans if (span.action.stage, span.action.micro_batch) == each} in (
            whole,
            split,
        )
    assert len(spans) == len({span.action for span in spans})
    assert all(schedule.rank_of(span.action.stage) == span.rank for span in spans)
    assert schedule.stages() == ranks * chunks


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
def test_most_schedules_need_the_shortest_channels(name: str, ranks: int, micro_batches: int, chunks: int) -> None:
    """Every stage sends to every later one; as far apart as stages are, so many micro-batches lie between them."""
    schedule = SCHEDULES[name](ranks, micro_batches, chunks)
    every = list(combinations(range(schedule.stages()), 2))
    lengths = queue_lengths(schedule, every)
    if name != "breadth_first":
        assert all(length == abs(a - b) + 1 for (a, b), length in lengths.items())
    # Rings of ranks that hold as much never wait for each other, whatever micro-batches are left out.
    assert max(lengths.values(), default=0) <= micro_batches + schedule.stages()


def test_breadth_first_needs_longer_channels() -> None:
    """With the shortest, rank 1 waits to send to rank 0, which waits to send to rank 1."""
    lengths = queue_lengths(SCHEDULES["breadth_first"](2, 8, 2))
    assert lengths[1, 2] == lengths[2, 1] == 5
    assert max(queue_lengths(SCHEDULES["breadth_first"](2, 2, 2)).values()) == 2


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 8), (4, 8), (4, 16), (8, 32)])
def test_what_vs_hold_and_how_long_they_idle(ranks: int, micro_batches: int) -> None:
    """In halves of what a rank of 1F1B has of the model, so that 1F1B's first rank holds twice its ranks."""
    work = 6 * micro_batches
    for name, most, idle in (
        ("zb_v", 2 * ranks, ranks - 1),
        ("dualpipe_v", 2 * ranks + 1, 4 * ranks),
        ("v_half", ranks + 3, 3 * ranks + 2),
    ):
        schedule = SCHEDULES[name](ranks, micro_batches, 2)
        assert max(in_flight(schedule.actions(rank), weights=True) for rank in range(ranks)) <= most, name
        cost = {PassKind.BACKWARD: 2.0}
        spans = timed(schedule.orders(), lambda action: cost.get(action.kind, 1.0))  # noqa: B023
        assert max(span.stop for span in spans) - work <= idle, name


def test_a_v_has_two_stages_a_rank() -> None:
    assert SCHEDULES["zb_v"](3, 6, 2).placement() == [0, 1, 2, 2, 1, 0]
    with pytest.raises(UsageError, match="each rank has 2 stages under ZeroBubbleV, got chunks=3"):
        SCHEDULES["zb_v"](3, 6, 3).stages()


@dataclass(frozen=True)
class Shuffled(PipelineSchedule):
    """A right schedule in whose orders some passes have changed places, are left out or come twice."""

    seed: int = 0

    def actions(self, rank: int) -> Iterator[Action]:
        draw = Random(f"{self.seed} {rank}")
        order = list(SCHEDULES["gpipe"](self.ranks, self.micro_batches).actions(rank))
        for _ in range(draw.randrange(3)):
            index, other = draw.randrange(len(order)), draw.randrange(len(order))
            order[index], order[other] = order[other], order[index]
        if draw.random() < 0.1:
            order.append(order[0])
        if draw.random() < 0.1:
            del order[draw.randrange(len(order))]
        return iter(order)


@pytest.mark.slow
def test_of_random_orders_each_is_refused_or_runs_to_its_end() -> None:
    done = Counter[str]()
    for seed in range(1000):
        schedule = Shuffled(2 + seed % 2, 2 + seed % 3, seed=seed)
        try:
            check_schedule("shuffled", schedule)
        except UsageError as error:
            done["cyclic" if "wait" in str(error) else "other"] += 1
            continue
        done["runs"] += 1
        assert sorted(span.rank for span in timed(schedule.orders())) == sorted(
            rank for rank, order in enumerate(schedule.orders()) for _ in order
        )
        queue_lengths(schedule)
    assert min(done["runs"], done["cyclic"], done["other"]) > 20, done
