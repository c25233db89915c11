"""Random schedules are refused when they are planned, or train what one device does; none hangs; the check is quick."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from random import Random
from time import perf_counter

import pytest

import headrace as hr
from headrace import registry
from headrace.errors import UsageError
from headrace.pipeline.schedules import SCHEDULES
from headrace.pipeline.schedules.schedule import Action, PassKind, PipelineSchedule, needs
from headrace.pipeline.schedules.transfers import check_schedule
from headrace.testing.jobs import BATCH, SGD, Case, deep
from headrace.testing.references import ReferenceResult, distance, one_device, outcome_of

QUICK, ALL, A_BLOCK = 16, 1000, 100
SECONDS = 60.0
"""A run of three batches of a tiny model takes a fraction of one; what takes longer hangs."""


@dataclass(frozen=True)
class Drawn(PipelineSchedule):
    """What each rank does next is drawn from what it can do then; with a plant, it is spoilt afterwards."""

    def rank_of(self, stage: int) -> int:
        # Odd rounds of stages go back, as in a V, or all go the same way: by the number of micro-batches.
        turn, rank = divmod(stage, self.ranks)
        return self.ranks - 1 - rank if turn % 2 and self.micro_batches % 2 else rank

    def stages(self) -> int:
        return self.ranks * self.chunks

    def actions(self, rank: int) -> Iterator[Action]:
        return iter(orders_of(type(self).__name__, self)[rank])


@cache
def orders_of(seed: str, schedule: Drawn) -> list[list[Action]]:
    draw, last = Random(seed), schedule.stages() - 1
    micro_batches = list(range(schedule.micro_batches))
    forth, back = draw.sample(micro_batches, len(micro_batches)), draw.sample(micro_batches, len(micro_batches))
    halves = draw.random() < 0.5
    left: list[list[Action]] = [[] for _ in range(schedule.ranks)]
    for stage in range(last + 1):
        own = left[schedule.rank_of(stage)]
        own += [Action(stage, each) for each in forth]
        own += [Action(stage, each, PassKind.BACKWARD_INPUT if halves else PassKind.BACKWARD) for each in back]
        own += [Action(stage, each, PassKind.BACKWARD_WEIGHT) for each in back if halves]
    orders: list[list[Action]] = [[] for _ in left]
    made: set[Action] = set()
    while any(left):
        rank = draw.choice([rank for rank, own in enumerate(left) if own])
        # Of each stage and kind the first alone: between two stages messages have no numbers.
        first = {(each.stage, each.kind): each for each in reversed(left[rank])}
        ready = [each for each in first.values() if all(need in made for need in needs(each, last))]
        if ready:
            action = draw.choice(ready)
            left[rank].remove(action)
            orders[rank].append(action)
            made.add(action.makes)
    for _ in range(draw.choice((0, 0, 1, 2))):
        spoil(draw, draw.choice(orders))
    return orders


def spoil(draw: Random, order: list[Action]) -> None:
    """Exchanges, leaves out, repeats or moves passes of a rank."""
    index, other = draw.randrange(len(order)), draw.randrange(len(order))
    match draw.choice(("exchange", "exchange", "leave out", "repeat", "elsewhere")):
        case "exchange":
            order[index], order[other] = order[other], order[index]
        case "leave out":
            del order[index]
        case "repeat":
            order.insert(other, order[index])
        case _:
            each = order[index]
            order[index] = Action(each.stage + draw.choice((-1, 1)), each.micro_batch, each.kind)


@cache
def reference() -> ReferenceResult:
    return one_device(JOB, 1)


JOB = Case(deep, optimizer=SGD).job(2 * BATCH + 3)


def outcome_of_seed(seed: int) -> str:
    """Returns "refused" or "trained"; a hang, another error and another model fail."""
    draw = Random(seed)
    ranks, chunks, micro_batches = draw.choice((2, 3)), draw.choice((1, 2)), draw.choice((2, 3, 4))
    kind = type(f"Drawn{seed}", (Drawn,), {})
    registry.PLACED[f"drawn:{seed}"] = kind
    try:
        strategy = hr.Pipeline(ranks, micro_batches, schedule=f"drawn:{seed}", chunks=chunks)
        began = perf_counter()
        run = hr.fit(JOB, strategy, device="cpu", engine=hr.ThreadEngine(), check=False)
    except UsageError as error:
        said = str(error)
        assert f"schedule='drawn:{seed}'" in said
        if "wait for each other" in said:
            assert "rank" in said.partition("never done: ")[2], said
        return "waits" if "wait for each other" in said else "refused"
    finally:
        del registry.PLACED[f"drawn:{seed}"]
    assert perf_counter() - began < SECONDS
    assert distance(outcome_of(run).tensors, reference().tensors) <= 1e-9, seed
    return "trained"


@pytest.mark.slow
@pytest.mark.every
@pytest.mark.parametrize(
    "block", [0, *(pytest.param(first, marks=pytest.mark.full) for first in range(QUICK, ALL, A_BLOCK))]
)
def test_a_random_schedule_is_refused_or_trains_as_one_device(block: int) -> None:
    seeds = range(QUICK) if block == 0 else range(block, min(ALL, block + A_BLOCK))
    found = Counter(outcome_of_seed(seed) for seed in seeds)
    assert min(found["trained"], found["refused"]) >= len(seeds) // 10, found


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_the_check_of_8_ranks_and_64_micro_batches_takes_little(name: str) -> None:
    chunks = 2 if name in ("breadth_first", "interleaved", "v_half", "zb_v", "dualpipe_v") else 1
    began = perf_counter()
    check_schedule.__wrapped__(name, SCHEDULES[name](8, 64, chunks))
    assert perf_counter() - began < 1.0
