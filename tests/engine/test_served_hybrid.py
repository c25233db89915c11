"""Replicas that several processes hold, with servers: they die, are asked to end, and go on under other strategies."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

import headrace as hr
from engine.lasting import lasting_job
from engine.test_parameter_server import EVERY_FOUR, assert_ended_in_order, at_step, rounds_of, stopped_at
from engine.test_server_snapshots import Killer
from engine.victims import NOTICED_S, long_job, two_layers
from headrace.engine.local.engine import LocalEngine
from headrace.errors import PeerLost
from headrace.report.model.events import read_events
from headrace.spec.events import Notice, Stepped
from strategies.contract_runs import distance

pytestmark = pytest.mark.slow

INNER = hr.Pipeline(stages=2, micro_batches=2)
LOCK_STEP = partial(hr.ParameterServer, servers=2, staleness_bound=0)
REGIMES = {
    "lock-step": hr.Hybrid(LOCK_STEP(2), INNER),
    "asynchronous": hr.Hybrid(hr.ParameterServer(2, servers=2), INNER),
    "downpour": hr.Hybrid(hr.Downpour(2, servers=2, push_every=2, fetch_every=3), INNER),
}
LAST = 3
"""The second replica's last stage."""

every_regime = pytest.mark.parametrize("strategy", REGIMES.values(), ids=list(REGIMES))


@every_regime
@pytest.mark.parametrize(
    ("victim", "named"), [(LAST, r"stage 1 of 2, replica 1"), (4, "server of stage 0 of 2")], ids=["stage", "server"]
)
def test_a_killed_rank_ends_the_run_and_is_named(
    engine: LocalEngine, strategy: hr.Strategy, victim: int, named: str, tmp_path: Path
) -> None:
    killed = []

    def kill(pids: dict[int, int]) -> None:
        killed.append(time.monotonic())
        os.kill(pids[victim], signal.SIGKILL)

    job, on_event = long_job(model=two_layers), at_step(40, kill, ranks=6)
    with pytest.raises(PeerLost, match=rf"rank {victim} \({named}\) on .* killed by signal 9") as lost:
        hr.fit(job, strategy, engine=engine, run_dir=tmp_path, checkpoints=EVERY_FOUR, on_event=on_event)
    assert time.monotonic() - killed[0] < NOTICED_S
    assert "resume=True (--resume) goes on" in str(lost.value)
    # How far they had come when the signal did depends on what else the machine does.
    steps = 10 + max(event.step for event in read_events(tmp_path) if isinstance(event, Stepped))
    shorter = hr.Job(**{**vars(job), "epochs": None, "steps": steps})
    run = hr.fit(shorter, hr.OneDevice(), engine=engine, run_dir=tmp_path, resume=True)
    assert run.summary.steps == steps


@every_regime
@pytest.mark.parametrize("rank", [0, LAST, 5])
def test_a_rank_that_is_asked_to_end_ends_all_with_what_was_trained(
    engine: LocalEngine, strategy: hr.Strategy, rank: int, tmp_path: Path
) -> None:
    ask = at_step(20, lambda pids: os.kill(pids[rank], signal.SIGTERM), ranks=6)
    job = long_job(model=two_layers, eval_data=None)
    assert_ended_in_order(hr.fit(job, strategy, engine=engine, run_dir=tmp_path, on_event=ask))


@pytest.mark.parametrize("engine_of", ["threads", "processes"])
def test_a_checkpoint_goes_from_replicas_to_one_device_to_one_replica_and_back(
    engine: LocalEngine, engine_of: str, tmp_path: Path
) -> None:
    job = lasting_job("plain", {"clip_norm": None}, epochs=5)
    whole = hr.fit(job, hr.OneDevice(), device="cpu", engine=hr.ThreadEngine())
    slices = hr.Hybrid(LOCK_STEP(2), hr.TensorParallel(devices=2))
    chain = [REGIMES["lock-step"], hr.OneDevice(), hr.Hybrid(LOCK_STEP(1), INNER), slices, REGIMES["lock-step"]]
    for index, strategy in enumerate(chain):
        run = hr.launch(
            partial(stopped_at, 5 * (index + 1)),
            job,
            strategy,
            device="cpu",
            engine=engine if engine_of == "processes" else hr.ThreadEngine(),
            run_dir=tmp_path,
            resume=index > 0,
        )
    assert distance(run.model.state_dict(), whole.model.state_dict()) <= 1e-9
    assert run.metrics == pytest.approx(whole.metrics, rel=1e-9)


@every_regime
def test_a_resumed_run_visits_every_example_once(tmp_path: Path, strategy: hr.Strategy) -> None:
    job = lasting_job("plain")
    for at, resume in ((5, False), (99, True)):
        run = hr.launch(
            partial(stopped_at, at), job, strategy, engine=hr.ThreadEngine(), run_dir=tmp_path, resume=resume
        )
    assert rounds_of(run) == {round_: 2 if round_ % 5 == 4 else 12 for round_ in range(15)}


def test_a_run_goes_on_from_the_servers_snapshots(engine: LocalEngine, tmp_path: Path) -> None:
    """With every portion once, of the servers of both stages."""
    strategy, job = REGIMES["asynchronous"], long_job(model=two_layers, eval_data=None, epochs=None, steps=200)
    often = hr.Checkpoints(every_steps=150, every_s=None, snapshots_every_s=0.02)
    killer = Killer(LAST, servers=(4, 5), snapshots=2)
    with pytest.raises(PeerLost):
        hr.fit(job, strategy, engine=engine, run_dir=tmp_path, checkpoints=often, on_event=killer)
    run = hr.fit(job, strategy, engine=engine, run_dir=tmp_path, checkpoints=often, resume=True)
    assert any("go on from snapshots" in event.text for event in run.events if isinstance(event, Notice))
    assert run.summary.steps == 200
