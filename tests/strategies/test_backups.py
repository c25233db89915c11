"""Servers with backups, as plans have them."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import pytest

import headrace as hr
from headrace.errors import InfeasiblePlan, UsageError
from headrace.parameter_server.replication.failover import server_of
from headrace.spec.cluster import Cluster, Host
from headrace.spec.plain import from_plain, to_plain
from headrace.spec.plan import Plan
from strategies.contract_runs import CLUSTER, MODEL

STRATEGIES = [hr.ParameterServer, hr.Downpour]
LAUNCHED = dataclasses.replace(CLUSTER, ranks=3)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_server_has_its_backup_behind_all_servers(strategy: Callable[..., hr.Strategy]) -> None:
    plan = strategy(workers=2, servers=2, backups=1, sharding="fixed_shards:2").plan(MODEL, CLUSTER)
    assert [role.kind for role in plan.roles] == ["worker"] * 2 + ["server"] * 2 + ["backup"] * 2
    assert (plan.workers, plan.servers, plan.backups, plan.shares) == (2, (2, 3), (4, 5), (1, 1))
    assert [server_of(plan, rank) for rank in (2, 3, 4, 5)] == [2, 3, 2, 3]
    assert {segment.owner for segment in plan.segments} == {2, 3}
    assert from_plain(Plan, json.loads(json.dumps(to_plain(plan)))) == plan


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("backups", "reason"),
    [
        (2, "backups=2 asks for 6 backups of 3 servers, and a server has one at most; use backups=1"),
        (-1, "backups must be a whole number of at least 0, got -1"),
        (True, "backups must be a whole number of at least 0, got True"),
        (None, "backups must be 0 or 1, got None"),
    ],
)
def test_backups_that_there_cannot_be(strategy: Callable[..., hr.Strategy], backups: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=re.escape(reason)):
        strategy(servers=3, backups=backups)


@pytest.mark.parametrize(
    ("strategy", "cluster", "reason"),
    [
        (hr.ParameterServer(backups=1), LAUNCHED, "use backups=0, or start the run without a launcher"),
        (hr.Downpour(backups=1), LAUNCHED, "use backups=0, or start the run without a launcher"),
        # Beside the 5,600 bytes of two workers and a server: the backup's, and the copy that fills it.
        (hr.ParameterServer(2, backups=1), Cluster((Host("here", 4, 7_199),)), "needs 7,200 bytes of host memory"),
    ],
)
def test_a_cluster_without_room_for_backups(strategy: hr.Strategy, cluster: Cluster, reason: str) -> None:
    with pytest.raises(InfeasiblePlan, match=reason):
        strategy.plan(MODEL, cluster)
