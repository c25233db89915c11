"""hr.summary(job, strategy) of pipelines: each rank, with bytes that can be added up by hand."""

from __future__ import annotations

import pytest

import headrace as hr
from api.memory.stacks import LAYERS, PARAMETERS, WIDTH, blocks, job, near
from headrace.api.memory.planning import plan_memory
from headrace.collectives.shared_memory import slot_bytes

HALVES = hr.Pipeline(2, 4, partition=[LAYERS, LAYERS])
"""Where it is not said, the times of layers decide."""


def test_a_pipeline_is_planned_rank_by_rank() -> None:
    plan = plan_memory(job(), HALVES, choices=False)
    assert plan.roles.keys() == {"rank 0", "rank 1"}
    assert plan.peak == max(each.peak for each in plan.roles.values())
    result = 64 * WIDTH * 4
    for memory in plan.roles.values():
        assert memory.parameters == PARAMETERS // 2
        assert near(memory.state, PARAMETERS)
        # Quarters of a result that wait for their receiver, four each way at most, and what a broadcast goes through.
        assert 0 < memory.exchange - 4 * slot_bytes(2) <= 2 * result
    # The first rank of GPipe holds what two blocks keep of all micro-batches: a result each.
    large = plan_memory(job(batch=2048), HALVES, choices=False).roles["rank 0"]
    assert 2 * 32 * result <= large.activations <= 5 * 32 * result


def test_stages_that_are_sharded_are_planned_for_the_ranks_of_one_replica() -> None:
    divided = plan_memory(job(batch=128), hr.Hybrid(hr.FullySharded(2), HALVES), choices=False)
    assert divided.roles.keys() == {"rank 0", "rank 1"}
    for memory in divided.roles.values():
        # A quarter in parts, and a stage that is gathered.
        assert near(memory.parameters + memory.gathered, 3 * PARAMETERS // 4)
        assert near(memory.state, 2 * PARAMETERS // 4)


def test_stages_that_are_mirrored_share_their_gradients_and_the_sum() -> None:
    divided = plan_memory(job(batch=128), hr.Hybrid(hr.Mirrored(2), HALVES), choices=False)
    alone = plan_memory(job(batch=64), HALVES, choices=False)
    assert divided.roles.keys() == {"rank 0", "rank 1"}
    for name, memory in divided.roles.items():
        assert memory.parameters == alone.roles[name].parameters
        assert memory.state == alone.roles[name].state
        # Those of both replicas, and the sum.
        assert near(memory.exchange - alone.roles[name].exchange, 3 * memory.parameters)


@pytest.mark.slow
@pytest.mark.parametrize(("outer", "copies"), [(None, 2), ("nesterov", 4)])
def test_stages_that_are_averaged_share_copies_of_the_parameters(outer: str | None, copies: int) -> None:
    strategy = hr.Hybrid(hr.ParameterAveraging(2, 16, outer), HALVES)
    divided = plan_memory(job(batch=128), strategy, choices=False)
    alone = plan_memory(job(batch=64), HALVES, choices=False)
    assert divided.roles.keys() == {"rank 0", "rank 1"}
    for name, memory in divided.roles.items():
        assert memory.parameters == alone.roles[name].parameters
        assert memory.state == alone.roles[name].state
        # Those of both replicas, with Nesterov's last mean and its momentum, and what sums go through.
        more = memory.exchange - alone.roles[name].exchange
        assert near(more, copies * memory.parameters + 4 * slot_bytes(2))


def test_a_schedule_and_recomputation_are_choices_of_a_pipeline() -> None:
    plan = plan_memory(job(batch=1024), hr.Pipeline(2, 8))
    assert {"recompute='always'", "schedule='1f1b'"} <= plan.choices.keys()
    assert not any("accumulate" in name for name in (*plan.choices, *plan.impossible))
    as_it_is = plan.memory.activations
    for name in ("recompute='always'", "schedule='1f1b'"):
        assert plan.choices[name].peak < plan.peak, name
        assert plan.choices[name].activations < as_it_is, name
    shown = str(plan).splitlines()
    assert [line[:6] for line in shown[3:5]] == ["rank 0", "rank 1"]


@pytest.mark.slow
def test_slices_of_stages_are_planned_for_the_first_slice_of_each() -> None:
    strategy = hr.Hybrid(hr.Pipeline(2, 4, partition=[3, 3]), hr.TensorParallel(2))
    divided = plan_memory(job(blocks), strategy, choices=False)
    alone = plan_memory(job(blocks), hr.Pipeline(2, 4, partition=[3, 3]), choices=False)
    assert divided.roles.keys() == {"rank 0", "rank 2"}
    for memory, whole in zip(divided.roles.values(), alone.roles.values(), strict=True):
        assert 0.5 * whole.parameters <= memory.parameters <= 0.51 * whole.parameters
        assert near(memory.state, 2 * memory.parameters)
        # Each slice gets the messages of the stage, and sums go through slots.
        assert near(memory.exchange, whole.exchange + 4 * slot_bytes(2))
