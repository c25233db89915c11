"""The file that says where a run goes on without its rank 0: what a process that begins takes from it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from headrace.engine.torchrun.elastic_workers.leader_file import STORE, TRAINS, find_leader, forget_leader, tell_leader
from headrace.engine.torchrun.key_value import StoreClient
from headrace.engine.torchrun.secret import given_secret
from headrace.engine.torchrun.store_server import StoreServer

WITHIN_S = 600.0
"""Longer than a test may take: who waits for a second look fails."""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreServer]:
    monkeypatch.setenv("HEADRACE_SECRET", "5a" * 32)
    monkeypatch.delenv(STORE, raising=False)
    secret = given_secret()
    assert secret is not None
    with closing(StoreServer("tcp://127.0.0.1:0", secret, lambda _: None)) as server:
        yield server
    os.environ.pop(STORE, None)


def test_a_process_that_begins_joins_the_run_that_trains(tmp_path: Path, store: StoreServer) -> None:
    tell_leader(tmp_path, store.address, 1)
    secret = given_secret()
    assert secret is not None
    with closing(StoreClient(store.address, secret, 5.0)) as client:
        client.add(TRAINS, 1)
    find_leader(tmp_path, WITHIN_S)
    assert os.environ[STORE] == store.address


def test_a_file_that_was_left_does_not_lead_to_the_run_that_begins(tmp_path: Path, store: StoreServer) -> None:
    # Found by scripts/storm, seed 2016: rank 0 serves its store again where the killed run had it, and waits for the
    # others, which waited to be let in.
    tell_leader(tmp_path, store.address, 0, beat=3)
    find_leader(tmp_path, WITHIN_S)
    assert STORE not in os.environ


def test_a_disk_that_takes_no_file_ends_nothing(tmp_path: Path) -> None:
    # Found by scripts/storm, seed 2016: the thread of the leader ended with a traceback.
    run_dir = tmp_path / "run"
    tell_leader(run_dir, "tcp://127.0.0.1:1", 0, beat=1)
    forget_leader(run_dir)
    run_dir.mkdir()
    tell_leader(run_dir, "tcp://127.0.0.1:1", 0, beat=2)
    assert json.loads((run_dir / "leader.json").read_text())["beat"] == 2
    forget_leader(run_dir)
    assert list(run_dir.iterdir()) == []
