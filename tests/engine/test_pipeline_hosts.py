"""Pipelines whose stages are on several hosts: the numbers of one device, and a lost stage is named."""

from __future__ import annotations

import dataclasses
import json
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import headrace as hr
from engine.networks import MASTER, Start, at, join_again, network, starts
from engine.ranks import TESTS, Ended, launcher, run_ranks
from engine.victims import NOTICED_S
from headrace.engine.local.fork_server import ForkServer
from strategies.contract_runs import Outcome, distance, train
from strategies.hosts_models import CASES, FEATURES, MICRO_BATCH, job

pytestmark = [pytest.mark.slow, pytest.mark.net]

SCRIPT = TESTS / "engine" / "pipeline_hosts_script.py"


@pytest.fixture(scope="module")
def hosts() -> Iterator[str]:
    """Three of them; the name of their network."""
    with network(3) as name:
        yield name


@pytest.fixture
def start(fork_server: ForkServer, hosts: str, tmp_path: Path) -> Start:
    return starts(fork_server, hosts, SCRIPT, tmp_path)


def ran(start: Start, runs: Sequence[tuple[str, str, str, dict[str, Any]]], on: Sequence[int]) -> Ended:
    """Lets the ranks do runs: directory, case, strategy, changes of the job."""
    ended = start("train", json.dumps(runs), on=on)
    assert set(ended.codes.values()) == {0}, ended.logs
    return ended


def alone(case: str, **changes: Any) -> Outcome:
    return train(dataclasses.replace(job(CASES[case]), **changes), hr.OneDevice())


SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1")


@pytest.mark.parametrize(
    "on", [*(pytest.param(on, marks=pytest.mark.full) for on in ((0, 1), (0, 0, 1, 1))), (0, 1, 0, 1)]
)
def test_every_schedule_is_one_device_and_two_runs_alike(start: Start, tmp_path: Path, on: tuple[int, ...]) -> None:
    names = [(schedule, f"{schedule}-{again}") for schedule in SCHEDULES for again in range(2)]
    ran(start, [(name, "deep", f"pipeline(micro_batches=4, schedule='{how}')", {}) for how, name in names], on)
    one = alone("deep").tensors
    for schedule in SCHEDULES:
        first, second = (load_file(tmp_path / f"{schedule}-{again}" / "model.safetensors") for again in range(2))
        assert distance(first, one) <= 1e-9
        assert distance(first, second) == 0.0


def test_a_plan_of_one_s_own_is_followed_or_refused_on_every_rank(start: Start, tmp_path: Path) -> None:
    ended = ran(start, [("run", "deep", "pipeline(micro_batches=3, partition=[1, 7])", {})], (0, 1))
    assert [len(part) for part in ended.one(0, "partition")["partition"]] == [1, 7]
    assert distance(load_file(tmp_path / "run" / "model.safetensors"), alone("deep").tensors) <= 1e-9
    for partition, message in (
        ("[4, 5]", "partition has 4 + 5 = 9 layers, and the model has 8"),
        ("[2, 3, 3]", "partition has 3 stages, and stages=2"),
    ):
        ended = start("train", json.dumps([("no", "deep", f"pipeline(partition={partition})", {})]))
        assert ended.codes == {0: 2, 1: 2}, ended.logs
        assert all(message in ended.said[rank][-1]["message"] for rank in range(2))


def test_what_there_is_to_sum_and_to_follow_is_that_of_one_host(start: Start, tmp_path: Path) -> None:
    cases = ("clipped-tied", "tokens")
    ended = ran(start, [(case, case, "pipeline(micro_batches=4)", {}) for case in cases], (0, 1))
    for case, *said in zip(cases, *([line for line in each] for each in ended.said), strict=True):
        one = alone(case)
        assert distance(load_file(tmp_path / case / "model.safetensors"), one.tensors) <= 1e-9
        for rank in said:
            assert rank["hosts"] == ["host-0", "host-1"]
            assert rank["metrics"] == pytest.approx(one.metrics, rel=1e-9)


def test_what_is_drawn_and_averaged_is_that_of_two_processes(start: Start, tmp_path: Path) -> None:
    """Dropout and BatchNorm: the same as on one host, for they are not those of one device."""
    how = "pipeline(micro_batches=4, recompute='always'{})"
    # Who draws what depends on the cut.
    runs = [("normalised", how.format("")), ("dropping", how.format(", partition=[3, 3]"))]
    ran(start, [(case, case, strategy, {}) for case, strategy in runs], (0, 1))
    ran(start, [(f"{case}-near", case, strategy, {}) for case, strategy in runs], (0, 0))
    for case, _ in runs:
        far, near = (load_file(tmp_path / name / "model.safetensors") for name in (case, f"{case}-near"))
        assert distance(far, near) == 0.0


def test_it_goes_on_on_one_host_and_with_more_stages(start: Start, tmp_path: Path) -> None:
    where = "run"
    ran(start, [(where, "tied", "pipeline(micro_batches=4)", {"epochs": 1})], (0, 1))
    ran(start, [(where, "tied", "pipeline(micro_batches=2)", {"epochs": 2, "resume": True})], (0, 1, 1))
    resumed = hr.fit(
        dataclasses.replace(job(CASES["tied"]), epochs=3), device="cpu", run_dir=tmp_path / where, resume=True,
        engine=hr.ThreadEngine(),
    )  # fmt: skip
    assert distance(resumed.model.state_dict(), alone("tied").tensors) <= 1e-9


@pytest.mark.parametrize("on", [(0, 0, 1, 1), (0, 1, 0, 1)])
def test_replicas_inside_a_host_and_across_hosts_are_one_device(
    start: Start, tmp_path: Path, on: tuple[int, ...]
) -> None:
    how = "hybrid(outer='mirrored(workers=2)', inner='pipeline(stages=2, micro_batches=2)')"
    cases = ("deep", "clipped", "tied") if on == (0, 1, 0, 1) else ("clipped", "tied")
    ran(start, [(case, case, how, {}) for case in cases], on)
    for case in cases:
        assert distance(load_file(tmp_path / case / "model.safetensors"), alone(case).tensors) <= 1e-9


def test_pipelines_over_hosts_that_average_are_workers_that_average(start: Start, tmp_path: Path) -> None:
    outer = "parameter_averaging(workers=2, period=3)"
    how = f"hybrid(outer='{outer}', inner='pipeline(stages=2, micro_batches=2)')"
    ran(start, [("run", "deep", how, {})], (0, 1, 0, 1))
    whole = train(job(CASES["deep"]), hr.ParameterAveraging(workers=2, period=3))
    assert distance(load_file(tmp_path / "run" / "model.safetensors"), whole.tensors) <= 1e-9


@pytest.mark.parametrize(
    ("deed", "victim", "code", "reason"),
    [
        ("kill", 1, -signal.SIGKILL, "has ended, or its connection to the launcher's store has"),
        # Of a process on its own host a rank sees that it has ended.
        ("kill", 2, -signal.SIGKILL, "has ended"),
        ("kill", 0, -signal.SIGKILL, "the launcher's store on its host cannot be reached"),
        ("stop", 2, None, "gave no sign of life for "),
    ],
)
def test_a_stage_that_is_lost_is_named(start: Start, deed: str, victim: int, code: int | None, reason: str) -> None:
    ended = start(deed, str(victim), "pipeline(micro_batches=2)", on=(0, 1, 0), awaited=2 if code is None else 3)
    others = [rank for rank in range(3) if rank != victim]
    assert ended.codes == {**dict.fromkeys(others, 4), **({} if code is None else {victim: code})}, ended.logs
    heard = [ended.one(other, "error") for other in others]
    for said in heard:
        assert said["error"] == "PeerLost"
        assert said["message"].startswith(f"rank {victim} (stage {victim} of 3) on host-{victim % 2} was lost: ")
        assert said["at"] - ended.one(victim, "deed")["at"] < NOTICED_S
    assert any(reason in said["message"] for said in heard), heard


@pytest.mark.parametrize("strategy", ["pipeline(micro_batches=2)", "mirrored"])
def test_two_hosts_that_do_not_reach_each_other_are_named(hosts: str, start: Start, strategy: str) -> None:
    try:
        # Rank 0 sees both of them, and the others' signs of life come by it.
        ended = start("part", "0", strategy, on=(0, 1, 2))
    finally:
        join_again(hosts, 1, 2)
    assert ended.codes[0] == 4, ended.logs
    heard = [ended.one(rank, "error") for rank in (1, 2)]
    for said in heard:
        assert said["at"] - ended.one(0, "deed")["at"] < NOTICED_S + 5
    # The first that notices it may have told the other.
    named = [said["message"] for said in heard if said["error"] == "PeersApart"]
    assert named, heard
    assert all("rank 1" in message and "rank 2" in message for message in named)
    assert all("live and do not reach each other" in message for message in named)


def test_a_stage_that_leaves_early_is_named(start: Start) -> None:
    ended = start("leave", "1", "pipeline(micro_batches=2)")
    said = ended.one(0, "error")
    assert said["message"].startswith(
        "the loop on rank 1 (stage 1 of 2) ended after 3 rounds and rank 0 (stage 0 of 2) "
    )
    assert said["at"] - ended.one(1, "deed")["at"] < NOTICED_S


def test_a_stage_that_is_terminated_ends_all_with_a_checkpoint(start: Start, tmp_path: Path) -> None:
    ended = start("terminate", "1", "pipeline(micro_batches=2)")
    assert ended.codes == {0: 0, 1: -signal.SIGTERM}, ended.logs
    assert ended.one(0, "status")["status"] == "interrupted"
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    # A part of each rank.
    assert len(list(checkpoint.glob("rank-*.safetensors"))) == 2


@pytest.fixture(scope="module")
def slow_hosts() -> Iterator[str]:
    """Two of them behind links of 100 Mbit/s."""
    with network(2, "--rate", "100mbit", kind="s") as name:
        yield name


def test_a_link_carries_what_crosses_the_cut_while_stages_compute(
    fork_server: ForkServer, slow_hosts: str, tmp_path: Path
) -> None:
    environments = [{**said, **at(slow_hosts, rank)} for rank, said in enumerate(launcher(2, MASTER))]
    ended = run_ranks(fork_server, tmp_path, SCRIPT, ["count"], environments, 2)
    assert set(ended.codes.values()) == {0}, ended.logs
    crossing = 4 * MICRO_BATCH * FEATURES
    # Activations one way, their gradients the other, of each of four micro-batches.
    for rank in range(2):
        assert ended.one(rank, "sent")["sent"] == pytest.approx(4 * crossing, rel=0.05)
    # When the fourth micro-batch's forward begins three are on their way; if each were waited for, all had arrived.
    # On an idle machine not one has; a busy one may let the rank stand still meanwhile.
    begun = ended.one(0, "begun")["begun"]
    assert len(begun) == 4
    assert begun[3] < 2 * crossing
