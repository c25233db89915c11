"""Simulated runs: what they take is what a sum on paper says, and the rules of the runtime hold in virtual time."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import headrace as hr
from headrace.errors import InfeasiblePlan, UnfitMachine, UsageError
from headrace.prediction.assumptions import Assumptions
from headrace.prediction.simulation.memory import device_bytes
from headrace.prediction.simulation.simulate import scene_of
from headrace.report.model.summary import summarize
from headrace.spec.cluster import Cluster, Host, Link
from headrace.spec.compute import ExpertTraffic, Traffic
from headrace.spec.model import ModelSpec
from headrace.strategies import STRATEGIES
from prediction.simulation.scenes import QUICK, gpus, model, run


def _of_memory(*device: int, host: tuple[int, int] = (64_000_000_000, 64_000_000_000)) -> Cluster:
    """Two hosts with so many bytes, and devices with so many."""
    hosts = [
        replace(each, device_memory_bytes=of_device, memory_bytes=own)
        for each, of_device, own in zip(gpus(2).hosts, device, host, strict=True)
    ]
    return Cluster(tuple(hosts), device="cuda")


def test_one_device_takes_what_the_profile_says() -> None:
    prediction = run(hr.OneDevice(), examples=8)
    assert prediction.step_s == pytest.approx(0.032)
    assert (prediction.efficiency, prediction.bottleneck) == (pytest.approx(1.0), "computing")
    assert prediction.shares == pytest.approx({"computing": 30 / 32, "update": 2 / 32})


def test_mirrored_without_overlap_waits_for_the_whole_ring() -> None:
    # 100 MB at 1 GB/s, 2 * 3 / 4 of them.
    prediction = run(hr.Mirrored(workers=4, overlap=False))
    assert prediction.step_s == pytest.approx(0.030 + 0.150 + 0.002)
    assert prediction.bottleneck.startswith("network")
    assert prediction.moved_bytes == pytest.approx(2 * 1.5 * 100e6)


def test_buckets_leave_while_backward_runs() -> None:
    # Four buckets of 25 MB come every 5 ms, and take 37.5 ms each: all but the first wait for the one before.
    assumptions = replace(QUICK, bucket_bytes=25_000_000)
    prediction = run(hr.Mirrored(workers=4), assumptions=assumptions)
    assert prediction.step_s == pytest.approx(0.010 + 0.005 + 4 * 0.0375 + 0.002)
    assert run(hr.Mirrored(workers=4), model=model(layers=True), assumptions=assumptions).step_s == pytest.approx(
        prediction.step_s
    )


def test_efficiency_is_over_what_the_devices_do_alone_each_at_its_speed() -> None:
    for speeds in ((0.5, 1.0), (1.0, 0.5)):
        hosts = tuple(replace(host, speed=speed) for host, speed in zip(gpus(2).hosts, speeds, strict=True))
        cluster = replace(gpus(2, gigabytes_per_s=1e9), hosts=hosts)
        prediction = run(hr.Mirrored(2, overlap=False), cluster, examples=16)
        # Alone they would do 1.5 shares in the time of one; together they wait for the slower.
        assert prediction.efficiency == pytest.approx(2 * 0.5 / 1.5)


def test_efficiency_is_over_what_each_worker_does_alone_with_its_share() -> None:
    # Three workers have 2 examples and one has 1; all wait for the three.
    cluster = Cluster(tuple(replace(host, bus_bytes_per_s=1e18) for host in gpus(1, 4).hosts), device="cuda")
    two_s, one_s = 0.030 * 2 / 8 + 0.002, 0.030 / 8 + 0.002
    expected = 7 / two_s / (3 * 2 / two_s + 1 / one_s)
    assert run(hr.Mirrored(workers=4), cluster, examples=7).efficiency == pytest.approx(expected)


def test_a_slow_link_to_one_host_does_not_slow_a_servers_others() -> None:
    def rate(*links: Link) -> float:
        cluster = replace(gpus(4), links=links)
        return run(hr.ParameterServer(workers=2, servers=1), cluster, examples=16).examples_per_s

    # Two workers on h0 and h1, the server on h2, and h3 has nothing to do.
    assert rate(Link("h2", "h3", 1e6), Link("h3", "h2", 1e6)) == rate()
    assert rate(Link("h2", "h0", 1e8), Link("h0", "h2", 1e8)) > 2 * rate(*(
        Link(*pair, 1e8) for one in ("h0", "h1", "h3") for pair in ((one, "h2"), ("h2", one))
    ))  # fmt: skip


def test_hosts_of_processors_have_the_runtimes_buckets_and_packets_with_headers() -> None:
    # Four gradients of 25 MB, each above its bucket; of a packet's 1514 bytes 1448 are the gradient's.
    cluster = Cluster(tuple(Host(name, 1, 64_000_000_000) for name in "ab"), link_bytes_per_s=1e9)
    packets_s = 0.025 * 1514 / 1448
    step_s = run(hr.Mirrored(workers=2), cluster, examples=16, model=model(layers=True)).step_s
    assert step_s == pytest.approx(0.010 + 0.005 + 4 * packets_s + 0.002)


def test_workers_of_a_host_slow_each_other_down_as_the_profile_says() -> None:
    found = model()
    assert found.compute
    crowded = replace(found, compute=replace(found.compute, threads=1, crowd=4, crowding=1.6))
    hosts = Cluster((Host("a", 4, 64_000_000_000, bus_bytes_per_s=1e12),))
    for workers, factor in ((1, 1.0), (2, 1.2), (4, 1.6)):
        prediction = run(hr.Unconnected(workers), hosts, examples=8 * workers, model=crowded)
        assert prediction.step_s == pytest.approx(factor * 0.032)


def test_a_round_waits_for_its_slowest_worker() -> None:
    slow = replace(QUICK, slow_share=1.0, slow_factor=2.0)
    assert run(hr.Mirrored(workers=2, overlap=False), assumptions=slow).step_s == pytest.approx(0.060 * 2 + 0.1 + 0.002)
    cluster = gpus(2)
    cluster = replace(cluster, hosts=(cluster.hosts[0], replace(cluster.hosts[1], speed=0.5)))
    prediction = run(hr.Mirrored(workers=2, overlap=False), cluster, examples=16)
    assert prediction.step_s == pytest.approx(0.060 + 0.1 + 0.004)
    assert prediction.shares["waiting for others"] == pytest.approx(0.5 * 0.030 / 0.164)


def test_a_server_carries_the_bytes_of_all_workers() -> None:
    many = replace(QUICK, steps=50)
    prediction = run(hr.ParameterServer(workers=4, servers=1), gpus(5), assumptions=many)
    # A round is 4 pushes of 0.1 s through one card.
    assert prediction.step_s == pytest.approx(0.4, rel=0.03)
    assert prediction.bottleneck.startswith("the server's network card")
    assert run(hr.ParameterServer(workers=4, servers=4), gpus(8), assumptions=many).step_s < 0.26
    half = run(hr.ParameterServer(workers=4, push_codec="bf16", pull_codec="bf16"), gpus(5), assumptions=many)
    assert half.step_s == pytest.approx(0.2, rel=0.1)


def test_a_codec_of_a_module_is_known_to_a_simulation() -> None:
    place = "headrace.transport.codec:BFloat16"
    new, half = (run(hr.ParameterServer(workers=4, push_codec=name), gpus(5)) for name in (place, "bf16"))
    assert (new.step_s, new.moved_bytes) == (half.step_s, half.moved_bytes)


def test_staleness_is_what_the_policies_allow() -> None:
    varied = {"model": model(1, spread=0.5), "assumptions": replace(QUICK, steps=40)}
    assert run(hr.ParameterServer(workers=4, staleness_bound=0), gpus(5), **varied).staleness == 0
    asynchronous = run(hr.ParameterServer(workers=4), gpus(5), **varied)
    assert asynchronous.staleness == pytest.approx(3, abs=0.3)
    bounded = run(hr.ParameterServer(workers=4, staleness_bound=2), gpus(5), **varied)
    lead = 0
    done = [0] * 4
    for worker in bounded.timeline.worker[np.argsort(bounded.timeline.ended_s, kind="stable")]:
        done[worker] += 1
        lead = max(lead, done[worker] - min(done))
    assert 1 < lead <= 3
    assert bounded.step_s >= asynchronous.step_s


def test_a_late_gradient_of_backup_workers_is_computed_again() -> None:
    slow = {"model": model(1), "assumptions": replace(QUICK, steps=40, slow_share=0.1, slow_factor=10)}
    waits = run(hr.ParameterServer(workers=8, staleness_bound=0), gpus(9), examples=64, **slow)
    spare = run(hr.ParameterServer(workers=8, backup_workers=2), gpus(9), examples=64, **slow)
    assert spare.step_s < 0.8 * waits.step_s
    # Gradients that come too late count for nothing.
    assert (sum(spare.timeline.staleness.values()), spare.timeline.rounds) == (40, 40)
    assert len(spare.timeline.step) > 40 * 6
    assert spare.examples_per_s == pytest.approx(64 * 40 / spare.timeline.seconds, rel=0.02)


def test_copies_that_are_fetched_meanwhile_are_held_beside_those_that_are_trained() -> None:
    held = {}
    for overlap in (True, False):
        strategy = hr.Downpour(workers=2, push_every=4, fetch_every=4, overlap=overlap)
        scene = scene_of(model(100), gpus(3), strategy, 32, QUICK)
        held[overlap] = device_bytes(scene)
    assert held[True] - held[False] == 2 * 100_000_000


def test_downpour_hides_its_exchange() -> None:
    many = replace(QUICK, steps=100)
    hidden = run(hr.Downpour(workers=4, push_every=20, fetch_every=20), gpus(5), assumptions=many)
    waiting = hr.Downpour(workers=4, push_every=20, fetch_every=20, overlap=False)
    assert hidden.efficiency > 0.9 > run(waiting, gpus(5), assumptions=many).efficiency


@pytest.mark.parametrize("period", [1, 5, 20])
def test_pushes_behind_the_steps_still_pass_the_servers_card(period: int) -> None:
    """A run of few pushes each: none of the first is waited for, and the last ones queue when all have computed."""
    few = replace(QUICK, steps=4 * period)
    many = hr.Downpour(workers=16, push_every=period, fetch_every=period)
    crowded = run(many, gpus(17), model=model(2000), examples=16, assumptions=few)
    # One of the 64 pushes may be hidden behind the steps of a longer run.
    assert 0.9 < max(crowded.timeline.server_busy.values()) < 1 + 1 / 60


def test_averaging_pays_for_the_ring_once_a_period() -> None:
    local, ring = 0.032, 0.150
    for period, syncs in ((1, 10), (5, 2), (10, 1)):
        prediction = run(hr.ParameterAveraging(workers=4, period=period))
        assert prediction.timeline.seconds == pytest.approx(10 * local + syncs * ring)
    post_local = run(hr.ParameterAveraging(workers=4, period=5, post_local=5))
    assert post_local.timeline.seconds == pytest.approx(10 * local + 6 * ring)
    automatic = run(hr.ParameterAveraging(workers=4, period="auto"), assumptions=replace(QUICK, steps=2000))
    # Not above 5 %, once the period has grown.
    assert automatic.shares["network"] < 0.07


def test_an_average_through_servers_waits_for_all() -> None:
    prediction = run(hr.ParameterAveraging(workers=4, period=5, via="server", servers=1), gpus(5))
    # First all push at once, 0.1 s each; then the worker that got the average last pushes when all others have.
    assert prediction.timeline.seconds == pytest.approx(10 * 0.032 + (0.4 + 0.02 + 0.4) + (0.1 + 0.02 + 0.4))
    assert prediction.staleness == 0


@pytest.mark.parametrize("strategy", [hr.Mirrored(8), hr.ParameterServer(8), hr.LocalSGD(8), hr.Gossip(8)])
def test_the_seed_decides(strategy: hr.Strategy) -> None:
    varied = {"model": model(1, spread=0.2), "examples": 64, "cluster": gpus(9)}
    one, again, other = (run(strategy, assumptions=replace(QUICK, seed=seed), **varied) for seed in (1, 1, 2))
    assert one.timeline.seconds == again.timeline.seconds != other.timeline.seconds


def test_every_strategy_can_be_simulated() -> None:
    """But for those that say why: how often a line search computes the loss depends on data."""
    for name in (refused := ("ad_psgd", "aggregated", "hogwild", "sandblaster", "tpu")):
        with pytest.raises(UsageError, match=f"{name} cannot be simulated"):
            run(STRATEGIES[name](), gpus(1, 4) if STRATEGIES[name].one_host else None)
    for strategy in (hr.ContextParallel(4), hr.ExpertParallel(4)):
        with pytest.raises(UsageError, match=r"the model's file does not say what goes to .*; profile the model"):
            run(strategy)
    chosen = {
        **{name: kind() for name, kind in STRATEGIES.items() if name not in ("hybrid", *refused)},
        "hybrid": hr.Hybrid(hr.Mirrored(workers=2), hr.Pipeline(stages=2)),
        "sharded replicas": hr.Hybrid(hr.Mirrored(2), hr.FullySharded(2)),
        "sharded stages": hr.Hybrid(hr.FullySharded(2), hr.Pipeline(stages=2)),
        "sliced stages": hr.Hybrid(hr.Pipeline(stages=2), hr.TensorParallel(2)),
        "rings": hr.Hybrid(hr.FullySharded(2), hr.ContextParallel(2)),
        "mirrored experts": hr.Hybrid(hr.Mirrored(2), hr.ExpertParallel(2)),
    }
    known = replace(model(1, layers=True), traffic=Traffic(0, 1e6, (ExpertTraffic(8, 2, 10.0, 4096, 500_000),)))
    for name, strategy in chosen.items():
        cluster = gpus(1, 4) if strategy.one_host else gpus(4)
        if name in ("parameter_server", "downpour"):
            strategy = replace(strategy, workers=3)
        prediction = run(strategy, cluster, model=known)
        assert prediction.examples_per_s > 0, name
        assert sum(prediction.shares.values()) == pytest.approx(1, abs=0.02), name


def test_tokens_go_to_experts_of_other_workers_and_come_back() -> None:
    # 80 of 100 MB belong to 8 experts; with 13 of 28 pairs of them a row goes to any of 3 others.
    known = replace(model(), traffic=Traffic(experts=(ExpertTraffic(8, 2, 1000.0, 4096, 80_000_000),)))
    prediction = run(hr.ExpertParallel(4), model=known, examples=32)
    assert prediction.moved_bytes == pytest.approx(2 * 1.5 * 20e6 + 2 * 8 * 1000 * 3 * 13 / 28 * 4096)
    assert prediction.memory_bytes < run(hr.Mirrored(4), model=known, examples=32).memory_bytes
    assert any("each expert as often as to the others" in note for note in prediction.notes)


def test_keys_and_values_go_around_a_ring() -> None:
    prediction = run(hr.ContextParallel(4), model=replace(model(), traffic=Traffic(attended_bytes=4e6)), examples=8)
    assert prediction.moved_bytes == pytest.approx(2 * 1.5 * 100e6 + 2 * (3 + 3 + 4) * 8 * 1e6)
    assert prediction.step_s == pytest.approx(0.030 / 4 + 0.080 + 0.150 + 0.002)


def test_threads_that_a_host_lacks_make_cpu_workers_slower() -> None:
    known = model()
    assert known.compute is not None
    known = replace(known, compute=replace(known.compute, threads=4))
    cluster = Cluster((Host("a", 8, 64_000_000_000),))
    assert run(hr.Unconnected(workers=2), cluster, model=known, examples=16).step_s == pytest.approx(0.032)
    assert run(hr.Unconnected(workers=4), cluster, model=known, examples=32).step_s == pytest.approx(0.064)
    # Two on each core take turns.
    assert run(hr.Unconnected(workers=16), cluster, model=known, examples=128).step_s == pytest.approx(8 * 0.032)


def test_operations_and_a_devices_speed_are_enough() -> None:
    known = ModelSpec(model().parameters, flops_per_example=1e9)
    cluster = replace(gpus(1), hosts=(replace(gpus(1).hosts[0], device_flops=1e12),))
    assert run(
        hr.OneDevice(), cluster, model=known, examples=10, assumptions=replace(QUICK, spread=0.0)
    ).step_s == pytest.approx(0.030)
    with pytest.raises(UsageError, match=r"host h0 does not say device_tflops"):
        run(hr.OneDevice(), gpus(1), model=known, examples=10)


def test_a_simulated_run_says_when_parameters_were_averaged_and_why() -> None:
    def averages(strategy: hr.Strategy) -> list[tuple[int, int, int, str]]:
        found = run(strategy, gpus(1, 4), assumptions=Assumptions(steps=10)).timeline.averaged
        return [(each.step, each.rounds, each.period, each.why) for each in found]

    fixed = "as asked for"
    periodic = hr.ParameterAveraging(4, 4, via="all_reduce")
    assert averages(periodic) == [(4, 4, 4, fixed), (8, 4, 4, fixed), (10, 2, 4, fixed)]
    assert averages(replace(periodic, post_local=2))[:2] == [(1, 1, 1, "post_local=2"), (2, 1, 4, fixed)]
    # Workers that never communicate average nothing.
    assert averages(hr.Unconnected(4)) == []


def test_a_real_runs_report_draws_a_simulated_run(tmp_path: Path) -> None:
    for strategy in (hr.Mirrored(4), hr.ParameterServer(3), hr.LocalSGD(4), hr.Pipeline(4, schedule="zb_h1")):
        prediction = run(strategy, run_dir=tmp_path / strategy.name, model=model(1), assumptions=Assumptions(steps=30))
        summary = summarize(tmp_path / strategy.name)
        assert (summary.strategy, summary.status) == (strategy.name, "ok")
        assert summary.examples_per_s == pytest.approx(prediction.examples_per_s, rel=0.05)
        assert "simulated: nothing was trained, and all times are virtual" in summary.outcome.notices
    assert summary.passed is not None
    with pytest.raises(UsageError, match="holds the events of another run"):
        run(hr.Mirrored(4), run_dir=tmp_path / "mirrored")


@pytest.mark.parametrize(
    ("strategy", "cluster", "says"),
    [
        (hr.Mirrored(9), gpus(4, 2), "9 workers need as many devices, and the cluster has 8 on 4 hosts"),
        (hr.CentralStorage(4), gpus(4), "4 workers need as many devices, and the cluster has 1 on 1 host;"),
        (
            hr.Mirrored(4),
            gpus(4, memory=250_000_000),
            r"mirrored needs 4\d\d,000,000 bytes on each device, and a device of host h0 has 250,000,000: "
            r"\d+,000,000 too few; a pipeline of 2 stages or more",
        ),
        # The memory of the other host's device is not known.
        (hr.Mirrored(2), _of_memory(1_000, 0), "a device of host h0 has 1,000"),
        # Two workers share the memory of the first host.
        (
            hr.Mirrored(3),
            replace(_of_memory(0, 0, host=(1_000, 900)), device="cpu"),
            "a worker of host h0 has 500",
        ),
    ],
)
def test_what_fits_nowhere_is_refused_with_numbers(strategy: hr.Strategy, cluster: Cluster, says: str) -> None:
    with pytest.raises(InfeasiblePlan, match=says):
        run(strategy, cluster)


def test_a_run_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnfitMachine, match=r"cannot write to the run directory .*file: Not a directory; name another"):
        run(hr.Mirrored(2), run_dir=tmp_path / "file")


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"spread": math.nan}, "spread must be a number of at least 0, got nan"),
        ({"steps": 2.5}, "steps must be a whole number of at least 0, got 2.5"),
        ({"steps": None}, "steps must be a whole number of at least 0, got None"),
        ({"network_share": "0.5"}, "network_share must be a number of at least 0, got '0.5'"),
        ({"spread": 1e300}, r"spread is a part of the mean, at most 10, got 1e\+300"),
        ({"slow_share": 2.0}, "slow_share is a part of the whole, at most 1, got 2.0"),
        ({"network_share": 0.0}, "network_share must be above 0"),
        ({"algorithm": "star"}, "all-reduce algorithm 'star'"),
    ],
)
def test_assumptions_that_are_refused(values: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        Assumptions(**values)  # type: ignore[arg-type]


def test_too_few_examples_and_unknown_layers_are_refused() -> None:
    with pytest.raises(UsageError, match="a global batch of 3 examples leaves some of 4 replicas without one"):
        run(hr.Mirrored(4), examples=3)
    with pytest.raises(UsageError, match="16 micro-batches of 8 examples would be empty"):
        run(hr.Pipeline(4), examples=8)
    with pytest.raises(UsageError, match="the model's file has no layers"):
        run(hr.TensorParallel(4))


def test_what_nobody_has_said_is_assumed_and_named() -> None:
    known = replace(model(), compute=replace(model().compute, spread=None))
    prediction = run(hr.Mirrored(8), gpus(2, 4), model=known, assumptions=Assumptions(steps=10))
    assert "assumed: steps that vary by 3.0 % (spread)" in prediction.notes[-1]
    assert "a latency of 9.6 us (latency_ms)" in prediction.notes[-1]
    plain = replace(gpus(2), link_bytes_per_s=Cluster.link_bytes_per_s)
    assert "1 Gbit/s between hosts, which [network] changes" in run(hr.Mirrored(2), plain).notes[-1]
    # All wait for the slowest of eight.
    exact = run(hr.Mirrored(8), gpus(1, 8), examples=64, model=model(1)).step_s
    varied = run(hr.Mirrored(8), gpus(1, 8), examples=64, model=replace(known, parameters=model(1).parameters)).step_s
    assert 1.02 < varied / exact < 1.06


def test_a_network_without_rdma_carries_what_tcp_can() -> None:
    assumed = replace(QUICK, tcp_bytes_per_s=4e9)
    fast = gpus(2, gigabytes_per_s=10)
    quick, slow, said = (
        run(hr.Mirrored(2, overlap=False), cluster, assumptions=assumed).step_s
        for cluster in (gpus(2, gigabytes_per_s=20), fast, replace(fast, rdma=True))
    )
    assert slow - said == pytest.approx(0.1 / 4 - 0.1 / 10)
    assert quick < said


def test_gradients_leave_while_the_last_micro_batch_runs() -> None:
    assumed = replace(QUICK, bucket_bytes=25_000_000)
    one, four = (run(hr.Mirrored(4), assumptions=assumed, accumulate=count).step_s for count in (1, 4))
    # The first bucket is there 1.25 ms before the end, where it was 15 ms before.
    assert four - one == pytest.approx(0.015 - 0.015 / 4)


def test_speed_up_is_over_one_device_with_the_whole_batch() -> None:
    prediction = run(hr.Mirrored(4, overlap=False))
    assert prediction.speed_up == pytest.approx((4 * 0.030 + 0.002) / prediction.step_s)
    assert prediction.efficiency == pytest.approx(0.032 / prediction.step_s)


def test_a_profile_of_a_busy_machine_widens_the_band() -> None:
    calm, busy = (
        run(hr.Mirrored(2), model=replace(model(), origin=origin)).band for origin in ({}, {"disturbed": "load 3"})
    )
    assert 1 - busy.low == pytest.approx(2 * (1 - calm.low))
    assert "not idle" in str(busy)
