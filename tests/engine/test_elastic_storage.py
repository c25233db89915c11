"""Central storage whose workers are lost and join: what a lost one held is there, and no update is made twice."""

from __future__ import annotations

import functools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import headrace as hr
from engine.conftest import below, fork_servers
from engine.elastic_loops import ROUND, job, lose_rank_1
from engine.test_elastic import Counter, Hand, check_counts, counting_job
from headrace.engine.local.engine import LocalEngine
from headrace.errors import InfeasiblePlan, UsageError
from headrace.spec.events import Notice, WorkerStarted

pytestmark = pytest.mark.slow


class Counting(torch.optim.Adam):
    """Counts its steps in an attribute and in its groups."""

    counted = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.counted += 1
        for group in self.param_groups:
            group["counted"] = group.get("counted", 0) + 1
            group["lr"] = 0.01 / (1 + 0.1 * self.counted + 0.1 * group["counted"])
        super().step(closure)


ADAM = functools.partial(Counting, lr=0.01)
AVERAGED = hr.Options(ema_decay=0.9, schedule=functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3))


def trained(engine: LocalEngine, how: str) -> dict[str, torch.Tensor]:
    data = (torch.ones(6, 4), torch.ones(6, 1))
    run = hr.launch(
        functools.partial(lose_rank_1, how, ROUND),
        job(optimizer=ADAM, options=AVERAGED, eval_data=data),
        hr.CentralStorage(workers=3, min_workers=2),
        engine=engine,
    )
    said = [event.text for event in run.events if isinstance(event, Notice)]
    assert f"round {ROUND} begins with 2 workers: without rank 1" in said
    return dict(run.model.state_dict())


@pytest.fixture(scope="module")
def wanted(engine: LocalEngine) -> dict[str, torch.Tensor]:
    return trained(engine, "on purpose")


@pytest.mark.parametrize("how", ["in forward", "while it sums", "in its update", "after half of its update"])
def test_the_others_end_as_if_the_lost_worker_had_left_on_purpose(
    engine: LocalEngine, wanted: dict[str, torch.Tensor], how: str
) -> None:
    found = trained(engine, how)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_two_of_three_are_lost_at_once_and_replaced_and_every_epoch_is_complete(
    engine: LocalEngine, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    hand = Hand({30: (0, signal.SIGKILL), 31: (1, signal.SIGKILL), 200: (2, 0)}, done=done)
    strategy = hr.CentralStorage(3, min_workers=1, max_workers=3)
    run = hr.fit(counting_job(40, model=functools.partial(Counter, done)), strategy, engine=engine, on_event=hand,
                 timeout_s=2.0, run_dir=tmp_path / "run",
                 checkpoints=hr.Checkpoints(every_steps=7, every_s=None))  # fmt: skip
    check_counts(run, 40)
    assert sorted(lost.lost for lost in hand.lost) == [0, 1]
    assert sum(isinstance(event, WorkerStarted) for event in run.events) == 5, "both have come back"
    assert [below(server) for server in fork_servers()] == [[]] * len(fork_servers())
    more = hr.fit(counting_job(42), hr.Mirrored(2), engine=engine, run_dir=tmp_path / "more", resume=tmp_path / "run")
    check_counts(more, 42)


def test_what_does_not_fit_is_refused(engine: LocalEngine) -> None:
    with pytest.raises(UsageError, match="lets them come and go; give one of them"):
        hr.CentralStorage(min_workers=1, balance="speed")
    adafactor = functools.partial(torch.optim.Adafactor, lr=0.01)
    with pytest.raises(InfeasiblePlan, match="the job's optimizer needs whole parameters"):
        hr.fit(job(optimizer=adafactor), hr.CentralStorage(2, min_workers=1), engine=engine)
