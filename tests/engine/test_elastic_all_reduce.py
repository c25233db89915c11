"""Workers that average their parameters among themselves, and are lost and join: what counts, counts once."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import headrace as hr
from engine.conftest import below, fork_servers
from engine.elastic_loops import ROUND, job, lose_rank_1
from engine.test_elastic import Counter, Hand, check_counts, counting_job
from headrace.engine.local.engine import LocalEngine
from headrace.errors import UsageError
from headrace.spec.events import Notice, WorkerStarted

pytestmark = pytest.mark.slow

PERIOD = 5
SYNCED = 5
"""Rounds at the last synchronization before the round in which a worker is lost."""
assert SYNCED < ROUND < SYNCED + PERIOD

STRATEGIES: dict[str, Callable[..., hr.ParameterAveraging]] = {
    "mean": functools.partial(hr.ParameterAveraging, average_optimizer_state=True),
    "nesterov": functools.partial(hr.ParameterAveraging, outer="nesterov"),
    "elastic": functools.partial(hr.ParameterAveraging, outer="elastic"),
}


def trained(engine: LocalEngine, outer: str, how: str) -> dict[str, torch.Tensor]:
    schedule = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3)
    run = hr.launch(
        functools.partial(lose_rank_1, how, SYNCED),
        job(options=hr.Options(schedule=schedule), eval_data=(torch.ones(6, 4), torch.ones(6, 1))),
        STRATEGIES[outer](3, period=PERIOD, min_workers=2),
        engine=engine,
    )
    said = [event.text for event in run.events if isinstance(event, Notice)]
    assert f"round {SYNCED} begins with 2 workers: without rank 1" in said
    return dict(run.model.state_dict())


@pytest.mark.parametrize("outer", ["mean", "nesterov", "elastic"])
@pytest.mark.parametrize("how", ["in forward", pytest.param("after half of its update", marks=pytest.mark.full)])
def test_the_others_end_as_if_the_lost_worker_had_left_at_the_last_synchronization(
    engine: LocalEngine, outer: str, how: str
) -> None:
    wanted = trained(engine, outer, "on purpose")
    found = trained(engine, outer, how)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("period", [1, 4])
def test_two_of_three_are_lost_and_replaced_and_every_epoch_is_complete(
    engine: LocalEngine, period: int, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    hand = Hand({30: (0, signal.SIGKILL), 31: (1, signal.SIGKILL), 200: (2, 0)}, done=done)
    strategy = hr.ParameterAveraging(3, period=period, min_workers=1, max_workers=3)
    run = hr.fit(counting_job(40, model=functools.partial(Counter, done)), strategy, engine=engine, on_event=hand,
                 run_dir=tmp_path / "run", checkpoints=hr.Checkpoints(every_steps=7, every_s=None))  # fmt: skip
    check_counts(run, 40)
    assert sorted(lost.lost for lost in hand.lost) == [0, 1]
    assert sum(isinstance(event, WorkerStarted) for event in run.events) == 5, "both have come back"
    assert [below(server) for server in fork_servers()] == [[]] * len(fork_servers())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UsageError, match="min_workers=3 is more than workers=2"):
        hr.LocalSGD(2, min_workers=3)
    with pytest.raises(UsageError, match="leave min_workers out, or use via='all_reduce'"):
        hr.LocalSGD(2, min_workers=1, via="server")
    with pytest.raises(UsageError, match="the ranks of a replica cannot"):
        hr.Hybrid(hr.LocalSGD(2, min_workers=1), hr.Pipeline(stages=2))
