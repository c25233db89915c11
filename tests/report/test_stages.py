"""A cut in words, as a run says it before it starts."""

from __future__ import annotations

from dataclasses import replace

from headrace.report.model.pipeline import replica_lines, stage_lines
from headrace.spec.plan import Plan, Role, StageCost


def plan_of(*stages: StageCost, partition: tuple[tuple[str, ...], ...]) -> Plan:
    return Plan("pipeline", {}, (), (1,), 0, (), partition=partition, stages=stages)


def test_each_stage_has_a_line() -> None:
    plan = plan_of(
        StageCost(3, 0.006, 8_000_000, 30_000_000, 0),
        StageCost(1, 0.002, 500, 2_500, 262_144),
        partition=(("stem", "blocks.0", "blocks.1"), ("head",)),
    )
    assert stage_lines(plan) == [
        "stage 0: 3 layers, stem to blocks.1: 6.00 ms a micro-batch (75 %), 8.00 MB of parameters, 30.0 MB in all",
        "stage 1: 1 layer, head: 2.00 ms a micro-batch (25 %), 500 B of parameters, 2.50 kB in all, gets 262 kB",
    ]


def test_what_was_not_measured_is_left_out() -> None:
    (line,) = stage_lines(plan_of(StageCost(1, 0.0, 8, 24, 0), partition=(("head",),)))
    assert line == "stage 0: 1 layer, head: 8 B of parameters, 24 B in all"
    assert stage_lines(plan_of(partition=())) == []


def test_replicas_and_their_servers_have_one() -> None:
    workers = tuple(Role(rank, "worker", "here", "cpu", 1, rank // 2, rank % 2) for rank in range(4))
    servers = tuple(Role(4 + stage, "server", "here", "cpu", 1, -1, stage) for stage in (0, 1))
    cut = plan_of(partition=(("stem",), ("head",)))
    plan = replace(cut, roles=(*workers, *servers), shares=(1, 1))
    held = "2 replicas of 2 ranks: 0 to 1, 2 to 3"
    assert replica_lines(plan) == [f"{held}; servers: rank 4 of stage 0, rank 5 of stage 1"]
    assert replica_lines(replace(plan, roles=workers)) == [held]
    assert replica_lines(replace(plan, roles=workers[:2])) == []
    assert replica_lines(replace(plan, roles=tuple(replace(role, data_rank=role.rank) for role in workers))) == []
    many = tuple(Role(rank, "worker", "here", "cpu", 1, rank // 2, rank % 2) for rank in range(40))
    assert replica_lines(replace(plan, roles=many))[0].endswith("12 to 13, 13 more")
