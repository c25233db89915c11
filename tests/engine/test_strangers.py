"""A run on two hosts, and a process on a third one, which reaches every port and has no secret, or another one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace as hr
from engine.networks import MASTER, RUN_SECRET, at, network
from engine.ranks import TESTS, Ended, launcher, run_ranks, total
from engine.victims import make_job
from headrace.engine.local.fork_server import ForkServer

pytestmark = [pytest.mark.slow, pytest.mark.net]

SCRIPT = TESTS / "engine" / "strangers_script.py"
HANDSHAKE_BYTES = 512
"""More than a server says to one that it does not know: its greeting, and its answer to a first message."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[str]:
    with network(3, kind="x") as name:
        yield name


def ranks(hosts: str) -> list[dict[str, str]]:
    return [{**said, **at(hosts, rank)} for rank, said in enumerate(launcher(2, MASTER))]


def start(
    fork_server: ForkServer, folder: Path, environments: list[dict[str, str]], awaited: int, encrypt: str = "yes"
) -> Ended:
    return run_ranks(fork_server, folder, SCRIPT, [str(folder), encrypt], environments, awaited)


@pytest.mark.parametrize("encrypt", ["yes", "no"])
def test_a_stranger_reads_nothing_and_changes_nothing(
    hosts: str, fork_server: ForkServer, tmp_path: Path, encrypt: str
) -> None:
    first, second = ranks(hosts)
    master = {name: first[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
    ended = start(fork_server, tmp_path, [first, second, {**at(hosts, 2), **master}], 3, encrypt)
    assert ended.codes == {0: 0, 1: 0, 2: 0}, ended.logs
    undisturbed = hr.fit(make_job(), hr.Mirrored(2), engine=hr.ThreadEngine())
    for rank in range(2):
        assert ended.one(rank, "status")["status"] == "ok"
        assert ended.one(rank, "total")["total"] == pytest.approx(total(undisturbed.model), abs=1e-6)
    assert ("encrypt=False: gradients" in ended.logs[0]) is (encrypt == "no")
    attacked = [line for line in ended.said[2] if "place" in line]
    store = f"{MASTER}:{first['MASTER_PORT']}"
    assert store in [line["place"] for line in attacked]
    assert {line["place"].rpartition(":")[0] for line in attacked} <= {MASTER, "10.97.0.2"}, "nowhere but where reached"
    assert max(count for line in attacked for count in line["heard"]) < HANDSHAKE_BYTES
    assert ended.one(2, "recorded")["recorded"] > HANDSHAKE_BYTES
    assert store in ended.one(2, "refused")["refused"]
    named = [line for line in ended.logs[0].splitlines() if "without its secret" in line]
    assert sum("a process at 10.97.0.3 wanted to join the run" in line for line in named) == 1
    assert len(named) <= 2, "one line for an address, and one for those that were gone too soon"


def test_a_secret_that_differs_is_told_on_both_hosts(hosts: str, fork_server: ForkServer, tmp_path: Path) -> None:
    first, second = ranks(hosts)
    ended = start(fork_server, tmp_path, [first, {**second, "HEADRACE_SECRET": RUN_SECRET[::-1]}], 1)
    assert ended.codes == {1: 2}, ended.logs
    said = ended.one(1, "error")
    assert said["error"] == "UsageError"
    assert said["message"].startswith(f"rank 1 on host-1 cannot join the run: the store at tcp://{MASTER}:")
    assert "what rank 0 prints says which addresses it has refused" in said["message"]
    assert "a process at 10.97.0.2 wanted to join the run without its secret" in ended.logs[0]


def test_several_hosts_without_a_secret_are_refused(hosts: str, fork_server: ForkServer, tmp_path: Path) -> None:
    environments = [{**said, "LOCAL_WORLD_SIZE": "1"} for said in ranks(hosts)]
    for environment in environments:
        del environment["HEADRACE_SECRET"]
    ended = start(fork_server, tmp_path, environments, 2)
    assert ended.codes == {0: 2, 1: 2}, ended.logs
    for rank in range(2):
        message = ended.one(rank, "error")["message"]
        assert message.startswith(
            f"rank {rank} on host-{rank}: the launcher's processes are on several hosts, and have"
        )
        assert "token_hex(32)" in message
