"""Transfers between devices: whatever a rank sends and receives, in its order, none waits for ever."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise

import pytest

import headrace as hr
from headrace.errors import UsageError
from headrace.pipeline.schedules import SCHEDULES, transfers
from headrace.pipeline.schedules.schedule import Action, PassKind, PipelineSchedule
from headrace.pipeline.schedules.transfers import Program, Transfer, check_schedule, programs
from headrace.strategies import pipeline
from pipeline.shapes import chunks_of
from strategies.contract_runs import CLUSTER, MODEL

Edges = Collection[tuple[int, int]]
Batch = tuple[Transfer, ...]
GRADIENTS = (PassKind.BACKWARD, PassKind.BACKWARD_INPUT)


def chain(stages: int) -> Edges:
    return list(pairwise(range(stages)))


def skips(stages: int) -> Edges:
    return list(combinations(range(stages), 2))


def rendezvous(batches: Sequence[Sequence[Batch]], placement: Sequence[int]) -> list[int]:
    """Returns at which batch each rank ends that does one batch after the other; its number of batches if all are done.

    A transfer is done when both sides are at a batch that has it and it is the first of its direction left in both; a
    batch ends when all its transfers are done. So it is with NCCL: a group is one kernel, which ends when all ends
    have met, and the kernels of a communicator run one after the other.
    """
    at = [0] * len(batches)
    left = [list(own[0]) if own else [] for own in batches]
    moved = True
    while moved:
        moved = False
        for rank in range(len(batches)):
            while at[rank] < len(batches[rank]) and not left[rank]:
                at[rank] += 1
                left[rank] = list(batches[rank][at[rank]]) if at[rank] < len(batches[rank]) else []
                moved = True
            for transfer in list(left[rank]):
                source, target = placement[transfer.source], placement[transfer.target]
                if rank != source:
                    continue
                if first(left[source], placement, source, target) == first(left[target], placement, source, target):
                    met = first(left[source], placement, source, target)
                    left[source].remove(met)
                    left[target].remove(met)
                    moved = True
                    break
    return at


def first(batch: Sequence[Transfer], placement: Sequence[int], source: int, target: int) -> Transfer | None:
    return next((each for each in batch if (placement[each.source], placement[each.target]) == (source, target)), None)


def stuck(ranks: Sequence[Program], placement: Sequence[int]) -> bool:
    batches = [[gap for gap in own if gap] for own in ranks]
    return rendezvous(batches, placement) != [len(own) for own in batches]


def check(orders: list[list[Action]], edges: Edges, placement: Sequence[int]) -> None:
    """All is sent and received once, after it is made and before it is used, and no rank waits for ever."""
    ranks = programs(orders, edges, placement)
    assert not stuck(ranks, placement)
    for rank, (order, program) in enumerate(zip(orders, ranks, strict=True)):
        assert len(program) == len(order) + 1
        place = {action: index for index, action in enumerate(order)}
        seen: set[Transfer] = set()
        for gap, batch in enumerate(program):
            for transfer in batch:
                assert transfer not in seen
                seen.add(transfer)
                kinds = GRADIENTS if transfer.kind == "gradients" else (PassKind.FORWARD,)
                sends = placement[transfer.source] == rank
                stage = transfer.source if sends else transfer.target
                found = [Action(stage, transfer.micro_batch, kind) for kind in kinds]
                (at,) = (place[action] for action in found if action in place)
                assert at < gap if sends else at >= gap
        assert seen == {each for each in every(orders, edges, placement) if rank in ends(each, placement)}


def ends(transfer: Transfer, placement: Sequence[int]) -> tuple[int, int]:
    return placement[transfer.source], placement[transfer.target]


def every(orders: list[list[Action]], edges: Edges, placement: Sequence[int]) -> Iterator[Transfer]:
    for order in orders:
        for action in order:
            for a, b in edges:
                if placement[a] == placement[b]:
                    continue
                if action.kind is PassKind.FORWARD and action.stage == a:
                    yield Transfer(a, b, action.micro_batch)
                if action.kind in GRADIENTS and action.stage == b:
                    yield Transfer(b, a, action.micro_batch)


@pytest.mark.every
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, *(pytest.param(ranks, marks=pytest.mark.full) for ranks in (6, 7, 8))])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_no_rank_waits_for_ever(name: str, ranks: int) -> None:
    """Where values go to the next stage alone, and where each stage sends to all later ones."""
    for chunks in chunks_of(name):
        for micro_batches in range(1, 13):
            schedule = SCHEDULES[name](ranks, micro_batches, chunks)
            if ranks < 5:
                check_schedule(name, schedule)
            orders, stages = schedule.orders(), schedule.stages()
            check(orders, chain(stages), schedule.placement())
            if stages <= 8 and micro_batches in (1, 2, 5, 8, 12):
                check(orders, skips(stages), schedule.placement())


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_micro_batches_without_examples_are_left_out(name: str) -> None:
    for chunks in chunks_of(name):
        schedule = SCHEDULES[name](4, 6, chunks)
        for present in ({0}, {0, 1, 2}, {0, 2, 4}, {1, 5}):
            orders = [[each for each in order if each.micro_batch in present] for order in schedule.orders()]
            check(orders, skips(schedule.stages()), schedule.placement())


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 1), (4, 1), (2, 2), (2, 4), (3, 3)])
def test_an_evaluation_waits_for_nobody_either(ranks: int, chunks: int) -> None:
    placement = [stage % ranks for stage in range(ranks * chunks)]
    orders = [[Action(stage, 0) for stage, holder in enumerate(placement) if holder == rank] for rank in range(ranks)]
    check(orders, skips(ranks * chunks), placement)


def test_the_drawings_are_what_is_done() -> None:
    """That of the module, and that of the page on pipelines."""
    schedule = SCHEDULES["1f1b"](2, 2)
    letters = {"values": "v", "gradients": "g"}
    drawn = []
    for rank, (order, gaps) in enumerate(
        zip(schedule.orders(), programs(schedule.orders(), [(0, 1)], [0, 1]), strict=True)
    ):
        cells: list[str] = []
        for gap, action in zip(gaps, [*order, None], strict=True):
            cells += [f"{'<>'[each.source == rank]}{letters[each.kind]}{each.micro_batch}" for each in gap]
            cells += [f"{'FB'[action.backward]}{action.micro_batch}"] if action else []
        drawn.append(f"rank {rank}   {'  '.join(cells)}")
    text = (transfers.__doc__ or "").splitlines()
    assert [line.strip().partition("        ")[0] for line in text if line.startswith("    rank ")] == drawn


def at_use(order: list[Action], edges: Edges, rank: int, placement: Sequence[int]) -> Program:
    """Returns what a rank does that receives when it needs something and sends what it has made at once."""
    batches: list[Batch] = []
    for action in order:
        before = sorted(a for a, b in edges if b == action.stage)
        behind = sorted(b for a, b in edges if a == action.stage)
        if action.kind is PassKind.BACKWARD_WEIGHT:
            continue
        got, given = (behind, before) if action.backward else (before, behind)
        batches += [(Transfer(each, action.stage, action.micro_batch),) for each in got if placement[each] != rank]
        batches += [(Transfer(action.stage, each, action.micro_batch),) for each in given if placement[each] != rank]
    return tuple(batches)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_h1", "zb_h2"])
def test_the_check_finds_ranks_that_wait_for_each_other(name: str) -> None:
    """These would, if each received when it needs something: two that send to each other wait for ever."""
    schedule = SCHEDULES[name](3, 6, 2)
    placement = schedule.placement()
    edges = chain(schedule.stages())
    found = [at_use(order, edges, rank, placement) for rank, order in enumerate(schedule.orders())]
    assert stuck(found, placement)


@dataclass(frozen=True)
class Own(PipelineSchedule):
    """GPipe, changed."""

    fault: str = ""

    def actions(self, rank: int) -> Iterator[Action]:
        every = [Action(rank, index) for index in range(self.micro_batches)]
        back = [Action(rank, index, PassKind.BACKWARD) for index in range(self.micro_batches)]
        if self.fault == "back first" and rank == 0:
            every, back = back, every
        if self.fault == "crossed" and rank == 1:
            # Rank 0 wants the gradient of the first before the forward of the last, rank 1 the reverse.
            every, back = [*every, back[0]], back[1:]
        if self.fault == "crossed" and rank == 0:
            every, back = [every[0], back[0], *every[1:]], back[1:]
        if self.fault == "other order" and rank == 1:
            every = [every[1], every[0], *every[2:]]
        if self.fault == "backward in another order" and rank == 1:
            back = back[::-1]
        if self.fault == "twice":
            every.append(every[0])
        if self.fault == "left out":
            del back[-1]
        if self.fault == "elsewhere":
            every[0] = Action(1 - rank, 0)
        if self.fault == "beyond":
            every.append(Action(rank, self.micro_batches))
        yield from (*every, *back)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            "back first",
            "wait for each other for ever: 12 passes are never done: rank 0 for the backward of micro-batch 0",
        ),
        ("crossed", "wait for each other for ever: .* rank 1 for the forward of micro-batch 1 in stage 1"),
        ("other order", r"does forward of micro-batches \[0, 1, 2\] in stage 0, and of \[1, 0, 2\] in stage 1"),
        ("backward in another order", r"does backward of micro-batches \[0, 1, 2\] in stage 0, and of \[2, 1, 0\]"),
        ("twice", "does the forward of micro-batch 0 in stage 0 twice"),
        ("left out", "does forward with micro-batch 2 in stage 0, and that must be a forward pass and a backward pass"),
        ("elsewhere", "does the forward of micro-batch 0 in stage 1 on rank 0, and rank_of says 1"),
        ("beyond", "has the forward of micro-batch 3 in stage 0, and there are 2 stages and 3 micro-batches"),
    ],
)
def test_a_schedule_of_somebody_else_is_checked(fault: str, said: str) -> None:
    with pytest.raises(UsageError, match=f"schedule='mine' .*{said}.*; correct its actions"):
        check_schedule("mine", Own(2, 3, fault=fault))


def test_a_pipeline_of_such_a_schedule_is_refused_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {"right": Own, "wrong": partial(Own, fault="crossed")}
    monkeypatch.setattr(pipeline, "SCHEDULES", table)
    assert hr.Pipeline(2, 3, "right").plan(MODEL, CLUSTER).workers == 2
    with pytest.raises(UsageError, match="schedule='wrong' lets its ranks wait for each other for ever"):
        hr.Pipeline(2, 3, "wrong").plan(MODEL, CLUSTER)


def test_backward_passes_may_be_whole_or_in_two_parts() -> None:
    class Mixed(PipelineSchedule):
        def actions(self, rank: int) -> Iterator[Action]:
            yield from (Action(rank, 0), Action(rank, 1), Action(rank, 0, PassKind.BACKWARD))
            yield from (Action(rank, 1, PassKind.BACKWARD_INPUT), Action(rank, 1, PassKind.BACKWARD_WEIGHT))

    check_schedule("mixed", Mixed(3, 2))
    check(Mixed(3, 2).orders(), chain(3), [0, 1, 2])
