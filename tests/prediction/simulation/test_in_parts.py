"""Simulated pipelines and layers that devices divide: what they take is what a sum on paper says."""

from __future__ import annotations

from dataclasses import replace

import pytest

import headrace as hr
from headrace.policies.behaviour import Behaviour, Slices
from headrace.prediction.assumptions import Assumptions
from headrace.prediction.simulation.scene import Scene
from headrace.prediction.simulation.simulate import simulate
from headrace.prediction.simulation.slices.steps import sliced_steps
from headrace.spec.cluster import Cluster, Host, Link
from prediction.simulation.scenes import QUICK, gpus, model, run


def test_a_pipelines_crossings_move_there_and_back() -> None:
    # 3 cuts of 4 stages, 4 micro-batches, 4 MB each; each is sent and received, in both directions.
    prediction = run(hr.Pipeline(stages=4, micro_batches=4), model=model(layers=True))
    assert prediction.moved_bytes == pytest.approx(2 * 2 * 3 * 4 * 4e6 / 4)


@pytest.mark.parametrize("inner", [hr.Pipeline(stages=2, micro_batches=2), hr.TensorParallel(2)])
def test_mirrors_in_parts_sum_in_shared_memory_as_whole_ones_do(inner: hr.Strategy) -> None:
    known, one_host = model(layers=True), Cluster((Host("here", 16, 64_000_000_000),))
    whole = run(hr.Mirrored(4), one_host, model=known).moved_bytes
    inside = run(inner, one_host, examples=8, model=known).moved_bytes
    parts = run(hr.Hybrid(hr.Mirrored(4), inner), one_host, model=known).moved_bytes
    assert parts == pytest.approx(inside + whole / 2)


def test_gradients_of_all_micro_batches_but_the_first_are_added() -> None:
    found = model(layers=True)
    assert found.compute
    adding = replace(found, compute=replace(found.compute, accumulate_s=0.008))
    # Equal stages add a quarter each, for 3 of 4 micro-batches.
    longer_s = [run(hr.Pipeline(stages=4, micro_batches=4), model=each).step_s for each in (found, adding)]
    assert longer_s[1] - longer_s[0] == pytest.approx((4 + 3) * 0.008 / 4 * 3 / 4)
    whole, cut = (
        simulate(adding, gpus(1), "one_device", global_batch_size=8, accumulate=count, assumptions=QUICK).step_s
        for count in (1, 4)
    )
    assert cut - whole == pytest.approx(3 * 0.008)
    scene = Scene(adding, gpus(1), gpus(1).hosts, (), 8, Assumptions(), accumulate=4)
    assert scene.step(scene.hosts[0], 8).backward_s == pytest.approx(0.020 + 3 * 0.008)


@pytest.mark.parametrize("examples", [5, 7, 31])
def test_micro_batches_that_are_not_equal_take_what_all_examples_take(examples: int) -> None:
    # As long as a step of one device, but for the pipeline's own waiting: 4 micro-batches in 2 stages of equal layers.
    known = model(layers=True)
    prediction = run(hr.Pipeline(stages=2, micro_batches=4), gpus(1, 2), examples=examples, model=known)
    alone_s = run(hr.OneDevice(), gpus(1), examples=examples, model=known).step_s - 0.002
    crossing_s = 2 * 4e6 * examples / 8 / 4 / 10e9
    assert prediction.step_s == pytest.approx(alone_s / 2 * 5 / 4 + crossing_s + 0.001, rel=1e-6)
    # What is held is that of the largest.
    largest = run(hr.Pipeline(stages=2, micro_batches=4), gpus(1, 2), examples=4 * -(-examples // 4), model=known)
    assert prediction.memory_bytes == largest.memory_bytes


def test_micro_batches_of_a_share_exchange_as_many_bytes_as_the_share() -> None:
    known, cluster = model(layers=True), gpus(1, 4)
    whole = Scene(known, cluster, cluster.hosts * 4, (), 8, Assumptions(), Behaviour(division=Slices(4)))
    whole_s, *others_s = [sliced_steps(replace(whole, accumulate=count))[0].forward_s for count in (1, 2, 8)]
    assert others_s == pytest.approx([whole_s, whole_s])


def test_a_ranks_update_takes_its_part_of_the_parameters() -> None:
    found = model(layers=True)
    assert found.compute
    slow = replace(found, compute=replace(found.compute, optimizer_s=found.compute.optimizer_s + 0.008))
    # The first of two stages has 3 of 4 equal layers, and ends last.
    uneven = hr.Pipeline(stages=2, micro_batches=4, partition=(3, 1))
    quick_s, slow_s = (run(uneven, model=each).step_s for each in (found, slow))
    assert slow_s - quick_s == pytest.approx(0.008 * 3 / 4)


IN_PARTS = (
    hr.Pipeline(stages=4, micro_batches=4),
    hr.TensorParallel(4),
    hr.Hybrid(hr.Mirrored(2), hr.Pipeline(stages=2, micro_batches=4)),
    hr.Hybrid(hr.ParameterAveraging(2, 2), hr.Pipeline(stages=2, micro_batches=4)),
    hr.Hybrid(hr.Mirrored(2), hr.TensorParallel(2)),
)


@pytest.mark.parametrize("strategy", IN_PARTS)
def test_a_slow_device_slows_those_that_hold_the_other_parts(strategy: hr.Strategy) -> None:
    def step_s(*speeds: float) -> float:
        quick = gpus(4, gigabytes_per_s=1e6)
        hosts = tuple(replace(host, speed=speed) for host, speed in zip(quick.hosts, speeds, strict=True))
        return run(strategy, replace(quick, hosts=hosts), model=model(layers=True)).step_s

    all_slow_s = step_s(0.1, 0.1, 0.1, 0.1)
    assert step_s(1, 1, 1, 1) == pytest.approx(all_slow_s / 10, rel=0.01)
    for place in range(4):
        assert all_slow_s / 2 < step_s(*(0.1 if rank == place else 1.0 for rank in range(4))) <= all_slow_s


@pytest.mark.parametrize("inner", [hr.Pipeline(stages=2, micro_batches=4), hr.TensorParallel(2)])
def test_a_slow_link_inside_any_replica_slows_all(inner: hr.Strategy) -> None:
    def step_s(*ends: str) -> float:
        links = (Link(*ends, 1e7), Link(*ends[::-1], 1e7)) if ends else ()
        strategy = hr.Hybrid(hr.Mirrored(2), inner)
        return run(strategy, replace(gpus(4), links=links), model=model(1, layers=True)).step_s

    assert step_s("h0", "h1") > 10 * step_s()
    assert step_s("h2", "h3") > 10 * step_s()


def test_devices_that_divide_each_layer_all_count_towards_one_replica() -> None:
    known = model(100, layers=True)

    def step_s(strategy: hr.Strategy) -> float:
        return simulate(known, gpus(1, 4), strategy, global_batch_size=8, assumptions=QUICK).step_s

    def crossing_s(devices: int) -> float:
        # Two all-reduces of 4 MB forward, two backward, over a bus of 10 GB/s.
        return 4 * 2 * (devices - 1) / devices * 4e6 / 10e9

    assert step_s(hr.TensorParallel(4)) == pytest.approx(0.030 / 4 + crossing_s(4) + 0.002 / 4)
    # Of 8 examples 4 on each replica, and half of 100 MB to exchange for each device.
    halves = 0.015 / 2 + crossing_s(2) / 2 + 0.002 / 2 + 100e6 / 2 / 10e9
    assert step_s(hr.Hybrid(hr.Mirrored(2), hr.TensorParallel(2))) == pytest.approx(halves)
