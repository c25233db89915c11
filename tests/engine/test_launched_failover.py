"""Rank 0 decides on a server that was killed only by what its backup told after that."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

import headrace as hr
from engine.ranks import free_port
from headrace.engine.torchrun.failover import LaunchedFailover
from headrace.report.model.events import read_events
from headrace.shared_memory.control_page import ControlPage
from headrace.spec.cluster import Cluster, Host
from headrace.spec.events import Lost, Notice
from headrace.spec.model import ModelSpec, ParameterSpec

PLAN = hr.ParameterServer(1, servers=1, backups=1).plan(
    ModelSpec((ParameterSpec("weight", (8,)),)),
    Cluster((Host("a", 2, 1 << 30, ranks=(0, 1)), Host("b", 2, 1 << 30, ranks=(2,))), ranks=3),
)
(PRIMARY,), (BACKUP,), WORKER = PLAN.servers, PLAN.backups, 0


@dataclass
class Relay:
    """What rank 0 hears of the connections to it: nothing happens to them."""

    left: set[int] = field(default_factory=set)
    severed: set[int] = field(default_factory=set)

    prefix: str = "run"
    store: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(add=lambda *_: 0))

    def follow_next(self, rank: int) -> None:
        """No process comes next."""


@pytest.fixture
def page() -> ControlPage:
    page = ControlPage.create(len(PLAN.roles))
    for record in page.ranks:
        record.heartbeat.pid = 1
    return page


@pytest.fixture
def failover(page: ControlPage, tmp_path: Path) -> LaunchedFailover:
    (tmp_path / "events").mkdir()
    spec = SimpleNamespace(plan=PLAN, run_dir=tmp_path, started=0.0, timeout_s=60.0)
    made = LaunchedFailover(spec, page, Relay())
    # Refuses connections, as the address of a killed process does.
    page.ranks[PRIMARY].address.publish(f"tcp://127.0.0.1:{free_port()}")
    page.ranks[WORKER].suspicion.raise_against(PRIMARY)
    return made


def primary(page: ControlPage) -> int:
    return page.ranks[PRIMARY].server_view.read()[1] % len(page.ranks)


def test_a_backup_that_has_become_ready_just_before_takes_over(failover: LaunchedFailover, page: ControlPage) -> None:
    failover.look()
    page.ranks[BACKUP].heartbeat.count += 1
    failover.look()
    # What is on its way may be from before: nothing is decided.
    assert (page.abort, primary(page)) == (0, PRIMARY)
    page.ranks[BACKUP].heartbeat.promotable_epoch = page.ranks[PRIMARY].server_view.read()[0]
    failover.look()
    assert (page.abort, primary(page)) == (0, BACKUP)


def test_a_backup_that_is_not_ready_ends_the_run(failover: LaunchedFailover, page: ControlPage, tmp_path: Path) -> None:
    for _ in range(3):
        failover.look()
        assert page.abort == 0
    page.ranks[BACKUP].heartbeat.count += 2
    failover.look()
    assert page.abort == PRIMARY + 1
    (told,) = [event.text for event in read_events(tmp_path) if isinstance(event, Notice)]
    said = r"no backup holds yet all that it held, \d+\.\d s after the servers began; resume=True goes on from a "
    assert re.search(said + "checkpoint", told)


def test_a_ready_backup_takes_over_at_once(failover: LaunchedFailover, page: ControlPage, tmp_path: Path) -> None:
    page.ranks[BACKUP].heartbeat.promotable_epoch = page.ranks[PRIMARY].server_view.read()[0]
    failover.look()
    assert (page.abort, primary(page)) == (0, BACKUP)
    (lost,) = [event for event in read_events(tmp_path) if isinstance(event, Lost)]
    assert (lost.lost, lost.host, lost.cause) == (PRIMARY, PLAN.role(PRIMARY).host, "its process has ended")
