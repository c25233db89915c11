"""Averaging through servers with sync points and patience, and replicas that speak to servers, in virtual time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import headrace as hr
from headrace.errors import UsageError
from headrace.prediction.assumptions import Assumptions
from headrace.prediction.simulation.simulate import Prediction, simulate
from headrace.report.model.events import read_log
from headrace.spec.cluster import Cluster
from headrace.spec.events import ParametersAveraged
from prediction.simulation.scenes import gpus, model
from strategies.contract_models import Case, dense

THROUGH = partial(hr.ParameterAveraging, via="server")
ANY_DRIFT = hr.AutoPeriod(drift=1e9)


def run(
    strategy: hr.Strategy, steps: int = 32, cluster: Cluster | None = None, *, examples: int = 32, megabytes: int = 100
) -> Prediction:
    return simulate(
        model(megabytes, layers=True),
        cluster or gpus(4),
        strategy,
        global_batch_size=examples,
        assumptions=Assumptions(steps=steps),
    )


def averaged(prediction: Prediction) -> list[int]:
    """Returns after how many rounds worker 0 has averaged."""
    timeline = prediction.timeline
    own = (timeline.worker == 0) & (timeline.exchange_s > 1e-9)
    return sorted((timeline.step[own] + 1).tolist())


def slow(cluster: Cluster, factor: float) -> Cluster:
    """Returns a cluster whose last host is so many times slower."""
    *others, last = cluster.hosts
    return replace(cluster, hosts=(*others, replace(last, speed=1 / factor)))


def test_a_period_that_adapts_doubles_at_sync_points() -> None:
    # Parameters take 100 ms each way, a step 32 ms: more than the 5 % that are allowed.
    prediction = run(THROUGH(4, period=ANY_DRIFT), 64)
    assert averaged(prediction) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert len(prediction.timeline.step) == 4 * 64
    assert any("drift" in note for note in prediction.notes)
    fixed = run(THROUGH(4, period=1), 64)
    assert prediction.step_s < 0.5 * fixed.step_s
    assert prediction.moved_bytes == pytest.approx(fixed.moved_bytes * 12 / 64)


@pytest.mark.slow
def test_a_real_run_averages_in_the_same_rounds(tmp_path: Path) -> None:
    """The exchange always takes more of the time than is allowed, there and in the simulation."""
    through = THROUGH(2, period=hr.AutoPeriod(exchange_share=1e-6, drift=1e9))
    job = replace(
        Case(dense).job(64, optimizer=partial(torch.optim.SGD, lr=0.01)), eval_data=None, epochs=None, steps=32
    )
    hr.fit(job, through, engine=hr.ThreadEngine(), run_dir=tmp_path / "run", checkpoints=False)
    events = read_log(tmp_path / "run").events
    real = sorted(each.step for each in events if isinstance(each, ParametersAveraged) and each.rank == 0)
    assert real == averaged(run(through, 32, gpus(2)))


def test_a_network_that_costs_nothing_keeps_the_period_short() -> None:
    prediction = run(THROUGH(4, period=ANY_DRIFT), cluster=gpus(4, gigabytes_per_s=1e6), megabytes=1)
    assert len(averaged(prediction)) == 32


def test_rounds_before_local_steps_are_averaged_one_by_one() -> None:
    assert averaged(run(THROUGH(4, period=8, post_local=5), 29)) == [1, 2, 3, 4, 5, 13, 21, 29]
    # The last lease before a sync point is what is left.
    assert averaged(run(THROUGH(4, period=8, post_local=5), 24)) == [1, 2, 3, 4, 5, 13, 21, 24]


def test_a_worker_that_is_late_is_waited_for_once() -> None:
    cluster = slow(gpus(4), 10.0)
    patient = run(THROUGH(4, period=1, wait="all"), 20, cluster, megabytes=1)
    hasty = run(THROUGH(4, period=1, wait=0.1), 20, cluster, megabytes=1)
    # The slow one takes 320 ms a step; with all there each round is as long.
    assert patient.step_s == pytest.approx(0.32, rel=0.05)
    timeline = hasty.timeline
    quick = timeline.exchange_s[timeline.worker < 3]
    # The others wait 100 ms, and not again before it has pushed, which is some ten of their steps later.
    assert quick.max() == pytest.approx(0.1, rel=0.1)
    assert np.median(quick) < 0.01
    assert 3 <= (quick > 0.05).sum() < len(quick) / 3
    # Nearly all of 80 leases are theirs: some 27 rounds of 36 ms, and six waits, instead of 20 rounds of 320 ms.
    assert hasty.timeline.seconds == pytest.approx(27 * 0.036 + 6 * 0.1, rel=0.15)
    with pytest.raises(UsageError, match=r"wait=0\.01 s is shorter than one step, which takes 0\.032 s"):
        run(THROUGH(4, period=1, wait=0.01), 20, cluster)


def test_enough_patience_is_that_of_all() -> None:
    both = [run(THROUGH(4, period=4, wait=wait), 16) for wait in (60.0, "all")]
    assert both[0].step_s == pytest.approx(both[1].step_s)


@pytest.mark.parametrize("inner", [hr.Pipeline(2, 4), hr.TensorParallel(2)])
@pytest.mark.parametrize("outer", [hr.ParameterServer, hr.Downpour])
def test_replicas_speak_to_servers_as_one_worker_each(inner: hr.Strategy, outer: type) -> None:
    served = run(hr.Hybrid(outer(2, servers=2), inner), 10, gpus(6), examples=16)
    mirrored = run(hr.Hybrid(hr.Mirrored(2), inner), 10, gpus(6), examples=16)
    assert (served.workers, served.servers) == (4, 2)
    # A rank moves its half, there and back.
    pushes = 1 if outer is hr.ParameterServer else hr.Downpour(2).push_every
    assert served.moved_bytes == pytest.approx(2 * 100e6 / 2 / pushes)
    computing = [each.shares["computing"] * each.step_s for each in (served, mirrored)]
    assert computing[0] == pytest.approx(computing[1], rel=0.01)
    assert 0.3 * mirrored.step_s < served.step_s < 3 * mirrored.step_s


def test_replicas_on_servers_take_what_a_sum_on_paper_says() -> None:
    # One replica of two ranks on two hosts: half of 16 examples' 60 ms, and the crossings; then 50 MB of each rank to a
    # server of its own, and back, over cards of 1 GB/s.
    prediction = run(hr.Hybrid(hr.ParameterServer(1, servers=2), hr.TensorParallel(2)), 10, gpus(4), examples=16)
    alone = run(hr.TensorParallel(2), 10, gpus(4), examples=16)
    crossing_s = alone.step_s - 0.060 / 2 - 0.002 / 2
    applied_s = 50e6 / 5e9 + 0.002 / 2
    assert prediction.step_s == pytest.approx(0.060 / 2 + crossing_s + 0.050 + applied_s + 0.050, rel=0.01)


def test_a_hybrid_with_servers_is_written_for_the_report(tmp_path: Path) -> None:
    simulate(
        model(10, layers=True), gpus(6), hr.Hybrid(hr.Downpour(2, servers=2), hr.Pipeline(2, 4)), global_batch_size=16,
        run_dir=tmp_path / "run",
    )  # fmt: skip
    assert {each.rank for each in read_log(tmp_path / "run").events} >= {0, 1, 2, 3}
