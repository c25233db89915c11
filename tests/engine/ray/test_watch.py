"""What the process that follows a run on Ray does of what its ranks tell; no cluster is started."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest

from engine.ray.stand_in import RayError, RayTaskError, Reference, StandIn, remote
from headrace.engine.ray.watch import RankWatch
from headrace.errors import PeerLost, WorkerFailed
from headrace.machine.identity import installed_versions
from headrace.worker.run_spec import events_path

Told = dict[str, Any]

TRAINS: Told = {"progress": [3, 0.5, 48], "trains": True, "store": ""}
KILLED: Told = {"code": -9, "log": ""}
DONE: Told = {"code": 0, "log": "", "status": "ok"}
NO_MODULE: Told = {
    "code": 1, "log": "", "error": "JobError", "message": "No module named 'x'", "traceback": "", "unpacked": False
}  # fmt: skip
ACCUSES_1: Told = {
    "code": 1, "log": "", "error": "PeerLost", "message": "", "traceback": "",
    "lost": {"rank": 1, "host": "h1", "cause": "its part of the run has failed"},
}  # fmt: skip


class Ranks:
    """Elastic workers on nodes of their own, `h0` and so on: for each of a rank's processes, what it tells in turn.

    Ray restarts every agent on another node, `spare`.
    """

    def __init__(self, ray: StandIn, folder: Path) -> None:
        self.told: list[list[Iterator[Told]]] = []
        self.started: list[tuple[int, str, str]] = []
        self.stopped: list[int] = []
        self.flag = SimpleNamespace(stop=0)
        self.node = {"node": "spare-id", "versions": installed_versions(), "gpus": []}
        self.hosts: dict[str, str] = {}
        self._folder = folder
        self._now: dict[int, Iterator[Told]] = {}
        ray.known_nodes = [
            {"NodeID": "spare-id", "NodeName": "spare", "NodeManagerAddress": "10.0.0.9", "NodeManagerHostname": "vm"}
        ]

    def follow(self) -> str:
        ranks = range(len(self.told))
        roles = [SimpleNamespace(rank=rank, host=f"h{rank}", computes=True) for rank in ranks]
        plan = SimpleNamespace(
            min_workers=1, workers=len(roles), roles=roles, role=roles.__getitem__, part_of=lambda _: "",
            replaces=False, servers=(), backups=(),
        )  # fmt: skip
        spec: Any = SimpleNamespace(plan=plan, run_dir=self._folder, started=0.0)
        agents = [
            SimpleNamespace(
                watch=SimpleNamespace(remote=lambda rank=rank: self._next(rank)),
                describe=remote(lambda: self.node),
                stop=SimpleNamespace(remote=lambda _, rank=rank: self.stopped.append(rank)),
            )
            for rank in ranks
        ]
        watch = RankWatch(spec, agents, self.flag, self._start, lambda _: None, lambda *_: None, self.hosts)
        watch.follow()
        return watch.status

    def notices(self) -> str:
        path = events_path(self._folder, -1)
        return path.read_text() if path.exists() else ""

    def _start(self, rank: int, store: str, node: str, gpus: str) -> Reference:
        self.started.append((rank, store, node))
        self._now[rank] = self.told[rank].pop(0)
        return self._next(rank)

    def _next(self, rank: int) -> Reference:
        told = next(self._now[rank])
        return Reference(lambda: told)


def trains(until: Callable[[], object], then: Told = DONE, **more: Any) -> Iterator[Told]:
    while not until():
        sleep(0.01)
        yield {**TRAINS, **more}
    yield then


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ranks:
    monkeypatch.setattr("headrace.engine.ray.watch._LOOK_EVERY_S", 0.0)
    return Ranks(StandIn.replace(monkeypatch), tmp_path)


def test_a_lost_worker_is_started_on_the_node_where_ray_has_restarted_its_agent(ranks: Ranks) -> None:
    def again() -> bool:
        return len(ranks.started) == 3

    ranks.told = [[trains(again)], [iter([TRAINS, KILLED]), iter([TRAINS, DONE])]]
    assert ranks.follow() == "ok"
    assert ranks.started[2] == (1, "", "spare")
    assert "rank 1 was on h1 and is started again on spare" in ranks.notices()


def test_rank_0_waits_for_the_store_of_the_rank_that_leads(ranks: Ranks) -> None:
    rounds = iter(range(10**6))

    def led() -> Iterator[Told]:
        while next(rounds) < 20:
            yield TRAINS
        assert len(ranks.started) == 2
        yield from trains(lambda: len(ranks.started) == 3, store="tcp://10.0.0.2:1")

    ranks.told = [[iter([TRAINS, KILLED]), iter([TRAINS, DONE])], [led()]]
    assert ranks.follow() == "ok"
    assert ranks.started[2] == (0, "tcp://10.0.0.2:1", "spare")


def test_a_node_that_lacks_a_module_does_not_end_the_others(ranks: Ranks) -> None:
    ranks.told = [[trains(lambda: "cannot come back" in ranks.notices())], [iter([TRAINS, KILLED]), iter([NO_MODULE])]]
    assert ranks.follow() == "ok"
    assert "rank 1 cannot come back: JobError: No module named 'x'" in ranks.notices()


def test_if_it_did_end_the_others_its_error_is_the_cause(ranks: Ranks) -> None:
    others = trains(lambda: "cannot come back" in ranks.notices(), then=ACCUSES_1)
    ranks.told = [[others], [iter([TRAINS, KILLED]), iter([NO_MODULE])]]
    with pytest.raises(WorkerFailed, match=r"rank 1 on h1 failed: JobError: No module named 'x'"):
        ranks.follow()


def test_a_first_process_that_cannot_unpack_the_job_ends_the_run(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.ray.watch._GRACE_S", 0.1)
    ranks.told = [[trains(lambda: False)], [iter([NO_MODULE])]]
    with pytest.raises(WorkerFailed, match="rank 1 on h1 failed: JobError: No module named 'x'"):
        ranks.follow()


def test_a_node_with_another_version_is_named_and_gets_no_process(ranks: Ranks) -> None:
    ranks.node["versions"] = {**installed_versions(), "torch": "1.0"}
    ranks.told = [[trains(lambda: "is not started again" in ranks.notices())], [iter([TRAINS, KILLED])]]
    assert ranks.follow() == "ok"
    assert len(ranks.started) == 2
    assert "rank 1 is not started again: spare has torch 1.0, and this process " in ranks.notices()


def test_no_worker_is_started_again_when_the_run_comes_to_its_end(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[int] = []
    ended: list[int] = []
    looks, asked = iter(range(10**6)), iter(range(10**6))

    def node(_: Ranks) -> dict[str, Any]:
        # That rank 0 has ended may be told after the first look.
        if not ended or next(asked) < 2:
            raise RayError("Ray has not restarted it yet")
        return {"node": "spare-id", "versions": installed_versions(), "gpus": []}

    def killed() -> Iterator[Told]:
        yield TRAINS
        lost.append(1)
        yield KILLED

    def ends() -> Iterator[Told]:
        yield from trains(lambda: lost and next(looks) > 5, then=TRAINS)
        ended.append(0)
        yield DONE

    monkeypatch.setattr(Ranks, "node", property(node), raising=False)
    ranks.told = [[ends()], [killed(), iter([TRAINS, DONE])], [trains(lambda: ended and next(looks) > 20)]]
    assert ranks.follow() == "ok"
    assert [rank for rank, _, _ in ranks.started] == [0, 1, 2]


def test_an_interrupt_that_a_lost_rank_was_told_is_told_to_another(ranks: Ranks) -> None:
    ranks.flag.stop = 1
    ranks.told = [
        [iter([TRAINS, KILLED]), trains(lambda: True)],
        [trains(lambda: len(ranks.stopped) == 2, store="tcp://10.0.0.2:1")],
    ]
    assert ranks.follow() == "ok"
    assert ranks.stopped == [0, 1]


def test_a_node_keeps_its_name_when_a_dead_one_has_the_same(ranks: Ranks) -> None:
    """As a node that was started again on a machine, or a second one on it, while the run goes on."""
    for key in ("dead-id", "h1-id"):
        node = {"NodeID": key, "NodeName": "h1", "NodeManagerAddress": "10.0.0.1", "NodeManagerHostname": "vm"}
        sys.modules["ray"].known_nodes.append(node)
    ranks.hosts, ranks.node["node"] = {"h1-id": "h1"}, "h1-id"
    ranks.told = [[trains(lambda: len(ranks.started) == 3)], [iter([TRAINS, KILLED]), iter([TRAINS, DONE])]]
    assert ranks.follow() == "ok"
    assert ranks.started[2] == (1, "", "")
    assert ranks.notices() == ""


def test_what_an_agent_has_raised_is_the_cause(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.engine.ray.watch._GRACE_S", 0.1)

    def full() -> Told:
        raise RayTaskError(OSError(28, "No space left on device"))

    monkeypatch.setattr(ranks, "_start", lambda *_: Reference(full))
    ranks.told = [[]]
    with pytest.raises(PeerLost, match=r"its actor has raised OSError\(28, 'No space left on device'\)"):
        ranks.follow()
