"""Processes that a launcher has started on several hosts: one model, one end, a lost rank is named."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import headrace as hr
from engine.networks import Start, hosts_script, network, starts
from engine.ranks import TESTS, total
from engine.victims import INPUTS, NOTICED_S, TARGETS, make_job, make_job_in_turns, split_model
from headrace.engine.local.fork_server import ForkServer

pytestmark = [pytest.mark.slow, pytest.mark.net]

SCRIPT = TESTS / "engine" / "hosts_script.py"


@pytest.fixture(scope="module")
def hosts() -> Iterator[str]:
    """Four of them; the name of their network."""
    with network(4) as name:
        yield name


@pytest.fixture
def start(fork_server: ForkServer, hosts: str, tmp_path: Path) -> Start:
    return starts(fork_server, hosts, SCRIPT, tmp_path)


def on_one(workers: int, **changes: object) -> float:
    run = hr.fit(make_job(**changes), hr.Mirrored(workers), engine=hr.ThreadEngine())
    return total(run.model)


@pytest.mark.parametrize("on", [(0, 1, 2, 3), (0, 0, 1, 1)])
def test_a_run_on_several_hosts_is_that_on_one(start: Start, on: tuple[int, ...]) -> None:
    ended = start("fit", on=on)
    assert set(ended.codes.values()) == {0}, ended.logs
    expected = on_one(len(on), epochs=2)
    names = [f"host-{host}" for host in on]
    for said in ended.said:
        assert [line["hosts"] for line in said] == [names] * 2
        assert [line["status"] for line in said] == ["ok"] * 2
        assert [line["total"] for line in said] == pytest.approx([expected] * 2, abs=1e-6)
        assert [line["total"] for line in said] == [line["total"] for line in ended.said[0]]
        assert "checkpoints" in said[0]["files"]
        assert {"events", "model.safetensors"} <= set(said[1]["files"])
        assert said[1]["examples"] == 2 * 64 // len(on)


def test_averaging_on_several_hosts_is_that_on_one(start: Start) -> None:
    ended = start("average", on=(0, 1, 2))
    assert set(ended.codes.values()) == {0}, ended.logs
    diloco = hr.fit(make_job(epochs=2), hr.DiLoCo(3, period=5), engine=hr.ThreadEngine())
    for said in ended.said:
        every, apart, coded = (line["total"] for line in said)
        assert every == pytest.approx(on_one(3, epochs=2), abs=1e-6)
        assert apart == pytest.approx(total(diloco.model), abs=1e-6)
        assert [every, apart, coded] == [line["total"] for line in ended.said[0]]


def test_gossip_on_several_hosts_is_that_on_one(start: Start) -> None:
    ended = start("gossip", on=(0, 0, 1, 2))
    assert set(ended.codes.values()) == {0}, ended.logs
    expected = [
        total(hr.fit(make_job(epochs=2), hr.Gossip(4, topology), engine=hr.ThreadEngine()).model)
        for topology in ("random", "ring")
    ]
    for said in ended.said:
        assert [line["total"] for line in said] == pytest.approx(expected, abs=1e-6)


def test_replicas_of_several_hosts_are_one_device(start: Start) -> None:
    ended = start("hybrid", on=(0, 1, 2, 3))
    assert set(ended.codes.values()) == {0}, ended.logs
    job = make_job(model=split_model, epochs=2, options=hr.Options(clip_norm=0.1))
    expected = total(hr.fit(job, engine=hr.ThreadEngine()).model)
    for said in ended.said:
        first, then = (line["total"] for line in said)
        assert then == pytest.approx(expected, abs=1e-6)
        assert (first, then) == (ended.said[0][0]["total"], ended.said[0][1]["total"])


def test_fully_sharded_on_several_hosts_is_one_device(start: Start) -> None:
    ended = start("fully sharded", on=(0, 0, 1, 1))
    assert set(ended.codes.values()) == {0}, ended.logs
    job = make_job(model=split_model, epochs=4, global_batch_size=7)
    expected = total(hr.fit(job, engine=hr.ThreadEngine()).model)
    for said in ended.said:
        assert said[-1]["total"] == pytest.approx(expected, abs=1e-6)
        assert [line["total"] for line in said] == [line["total"] for line in ended.said[0]]


def test_a_run_goes_on_over_hosts(start: Start) -> None:
    ended = start("resume")
    assert set(ended.codes.values()) == {0}, ended.logs
    for said in ended.said:
        once, twice, coded, interrupted = (line["total"] for line in said)
        assert (once, twice) == pytest.approx((on_one(2), on_one(2, epochs=2)), abs=1e-6)
        # Bit for bit, with what the codec has rounded.
        assert interrupted == coded


def test_sets_of_parameters_take_turns_over_hosts(start: Start) -> None:
    ended = start("turns", on=(0, 1, 1))
    assert set(ended.codes.values()) == {0}, ended.logs
    one = hr.fit(make_job_in_turns(epochs=2), engine=hr.ThreadEngine())
    for said in ended.said:
        overlapped, after, coded, interrupted = (line["total"] for line in said)
        assert (overlapped, after) == pytest.approx([total(one.model)] * 2, abs=1e-5)
        assert interrupted == coded


def test_every_host_has_data_of_its_own(start: Start) -> None:
    ended = start("own data")
    assert set(ended.codes.values()) == {0}, ended.logs
    # In one round of everything nothing depends on the order.
    expected = total(hr.fit(make_job(global_batch_size=64, epochs=5), engine=hr.ThreadEngine()).model)
    for rank, said in enumerate(ended.said):
        assert said[0]["total"] == pytest.approx(expected, abs=1e-5)
        assert said[1]["total"] == ended.said[0][1]["total"]
        assert [line["examples"] for line in said] == [5 * (48, 16)[rank], (48, 16)[rank]]
        assert [line["of"] for line in said] == [64, 64]


def test_a_plain_script(start: Start) -> None:
    ended = start("plain script", "open")
    assert set(ended.codes.values()) == {0}, ended.logs
    assert ["encrypt=False: gradients" in log for log in ended.logs] == [True, False]
    model = torch.nn.Linear(4, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
        # The bias that rank 0 began with.
        torch.manual_seed(0)
        model.bias.copy_(torch.nn.Linear(4, 1).bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for start_ in range(0, 64, 16):
        optimizer.zero_grad()
        output = model(INPUTS[start_ : start_ + 16])
        torch.nn.functional.mse_loss(output, TARGETS[start_ : start_ + 16]).backward()
        optimizer.step()
    assert [said[0]["total"] for said in ended.said] == pytest.approx([total(model)] * 2, abs=1e-6)


def test_one_copy_for_all_cannot_be_on_several_hosts(start: Start) -> None:
    ended = start("one memory")
    assert ended.codes == {0: 2, 1: 2}, ended.logs
    for rank in range(2):
        said = ended.one(rank, "error")
        assert said["error"] == "InfeasiblePlan"
        assert "central_storage keeps one copy in one host's memory, and this cluster has 2: host-0" in said["message"]


def test_a_host_that_does_not_see_the_run_directory_is_named(start: Start) -> None:
    ended = start("apart")
    assert ended.codes == {0: 2, 1: 1}, ended.logs
    first, second = (ended.one(rank, "error") for rank in range(2))
    assert first["error"] == "UsageError"
    assert "run is not the same directory on host-1 as on host-0, and" in first["message"]
    assert second["message"] == "rank 0 on host-0 failed: what it prints says why"


@pytest.mark.parametrize(
    ("deed", "victim", "code", "reason"),
    [
        ("kill", 1, -signal.SIGKILL, "has ended, or its connection to the launcher's store has"),
        ("kill", 0, -signal.SIGKILL, "the launcher's store on its host cannot be reached"),
        ("raise", 0, 1, "its part of the run has failed"),
        ("stop", 2, None, "gave no sign of life for "),
    ],
)
def test_a_rank_that_is_lost(start: Start, deed: str, victim: int, code: int | None, reason: str) -> None:
    ended = start(deed, str(victim), str(time.monotonic() + 200), on=(0, 1, 2), awaited=2 if code is None else 3)
    others = [rank for rank in range(3) if rank != victim]
    assert ended.codes == {**dict.fromkeys(others, 4), **({} if code is None else {victim: code})}, ended.logs
    heard = [ended.one(other, "error") for other in others]
    for said in heard:
        assert said["error"] == "PeerLost"
        assert said["message"].startswith(f"rank {victim} on host-{victim} was lost: ")
        assert said["at"] - ended.one(victim, "deed")["at"] < NOTICED_S
    # The first rank that detects it tells the other.
    assert any(reason in said["message"] for said in heard)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_link_that_is_cut_ends_the_run_on_both_sides(start: Start, hosts: str, victim: int) -> None:
    try:
        ended = start("cut", str(victim), on=(0, 1, 2))
    finally:
        assert hosts_script(hosts, "exec", str(victim), "ip", "link", "set", "eth0", "up").returncode == 0
    assert ended.codes == dict.fromkeys(range(3), 4), ended.logs
    for other in {0, 1, 2} - {victim}:
        said = ended.one(other, "error")
        assert said["message"].startswith(f"rank {victim} on host-{victim} was lost: ")
        assert said["at"] - ended.one(victim, "deed")["at"] < NOTICED_S


def test_an_interrupt_in_one_rank_ends_all_in_the_same_round(start: Start) -> None:
    ended = start("interrupt", "1", on=(0, 1, 2))
    assert ended.codes == {0: 0, 1: 0, 2: 0}, ended.logs
    assert [ended.one(rank, "status")["status"] for rank in range(3)] == ["interrupted"] * 3
    assert len({ended.one(rank, "total")["total"] for rank in range(3)}) == 1


def test_a_rank_that_is_terminated_ends_all_with_a_checkpoint(start: Start, tmp_path: Path) -> None:
    ended = start("terminate", "1")
    assert ended.codes == {0: 0, 1: -signal.SIGTERM}, ended.logs
    assert ended.one(0, "status")["status"] == "interrupted"
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    # A part of each rank.
    assert len(list(checkpoint.glob("rank-*.safetensors"))) == 2


def test_hosts_are_made_and_leave_nothing(hosts: str) -> None:
    here = hosts_script(hosts, "exec", "2", "sh", "-c", "echo $HEADRACE_HOST; ip -4 -o address show eth0")
    assert here.stdout.startswith("host-2\n")
    assert "inet 10.97.0.3/24" in here.stdout
    assert "there is no host 4" in hosts_script(hosts, "exec", "4", "true").stderr
    assert hosts_script(hosts, "exec", "1", "sh", "-c", "exit 7").returncode == 7


def test_rank_0_says_which_two_hosts_do_not_reach_each_other(
    fork_server: ForkServer, hosts: str, tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text("from engine.victims import make_job as job\n")
    route = ["sh", "-c", 'ip route "$0" blackhole 10.97.0.3/32']
    assert hosts_script(hosts, "exec", "1", *route, "add").returncode == 0
    try:
        start = starts(fork_server, hosts, TESTS / "engine" / "refused_script.py", tmp_path)
        ended = start("train", "job.py", "--strategy", "mirrored", "--timeout-s", "2", on=(0, 1, 2))
    finally:
        assert hosts_script(hosts, "exec", "1", *route, "delete").returncode == 0
    assert not {0, None} & set(ended.codes.values()), ended.logs
    first, second, third = (log.splitlines()[-1] for log in ended.logs)
    assert first.startswith(
        "error: rank 1 on host-1 failed: rank 1 on host-1 and rank 2 on host-2 live and do not reach each other "
        "(tcp://10.97.0.3:"
    )
    assert [second, third] == ["error: rank 0 on host-0 failed: what it prints says why"] * 2
