"""How many processes a strategy asks for, before it is known where they run; plans for so many agree."""

from __future__ import annotations

import pytest
from torch import nn

import headrace as hr
from headrace.errors import UsageError
from headrace.modules import describe
from headrace.spec.cluster import Cluster, Host
from headrace.spec.plan import ProcessCounts
from headrace.strategies import Strategy


@pytest.mark.parametrize(
    ("strategy", "counts"),
    [
        (hr.OneDevice(), ProcessCounts(1, one_host=True)),
        (hr.Mirrored(3), ProcessCounts(3)),
        (hr.CentralStorage(2), ProcessCounts(2, one_host=True)),
        (hr.FullySharded(2), ProcessCounts(2)),
        (hr.Unconnected(2), ProcessCounts(2, one_host=True)),
        (hr.Gossip(4), ProcessCounts(4)),
        (hr.ParameterServer(4, servers=2, backups=1), ProcessCounts(4, 2, 2)),
        (hr.Downpour(2), ProcessCounts(2, 1)),
        (hr.ParameterAveraging(2), ProcessCounts(2)),
        (hr.ParameterAveraging(2, via="server", servers=2), ProcessCounts(2, 2)),
        (hr.Pipeline(3), ProcessCounts(3)),
        (hr.TensorParallel(2), ProcessCounts(2)),
        (hr.Hybrid(hr.Mirrored(2), hr.Pipeline(3)), ProcessCounts(6)),
        (hr.Hybrid(hr.FullySharded(2), hr.Pipeline(3)), ProcessCounts(6)),
        (hr.Hybrid(hr.Downpour(2, servers=2), hr.Pipeline(2)), ProcessCounts(4, 2)),
    ],
    ids=repr,
)
def test_a_strategy_says_how_many_processes_it_has(strategy: Strategy, counts: ProcessCounts) -> None:
    assert strategy.processes() == counts


@pytest.mark.parametrize("strategy", [hr.Mirrored(3), hr.ParameterServer(2, servers=2), hr.Downpour(2)], ids=repr)
def test_a_plan_has_as_many(strategy: Strategy) -> None:
    counts = strategy.processes()
    total = counts.workers + counts.serving
    cluster = Cluster((Host("a", 4, 1 << 30, ranks=tuple(range(total))),), ranks=total)
    plan = strategy.plan(describe(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))), cluster)
    assert (plan.workers, len(plan.roles)) == (counts.workers, total)


@pytest.mark.parametrize(("strategy", "option"), [(hr.Mirrored(), "workers"), (hr.Pipeline(), "stages")], ids=repr)
def test_a_number_that_is_not_said_is_asked_for(strategy: Strategy, option: str) -> None:
    with pytest.raises(UsageError, match=f"does not say how many {option} it has.*--workers 2"):
        strategy.processes()
