"""Histories of versions, in virtual time and from real servers; and whether the checker sees what is wrong."""

from __future__ import annotations

import threading
from time import monotonic

import pytest
import torch

from headrace.parameter_server.client.client import Client
from headrace.parameter_server.core import shard as module
from headrace.parameter_server.core.events import Reason
from parameter_server.operations import BareBook, Operation, violations
from parameter_server.seeded import MODERATE, SEEDED, found, world
from parameter_server.stands import one_hot, standing
from parameter_server.virtual import Machines, run
from parameter_server.worlds import mutated
from transport.faulty import Faults, Odds
from transport.ways import WAYS


@pytest.mark.slow
def test_histories_in_virtual_time_are_in_order() -> None:
    operations = 0
    for seed in range(40):
        made, bound = world(seed)
        history = run(made)
        assert violations(history.operations, len(made.paces), bound) == []
        operations += len(history.operations)
    assert operations > 40 * MODERATE * 0.7


@pytest.mark.parametrize("bug", SEEDED)
def test_a_seeded_bug_is_found(bug: str) -> None:
    assert found(Machines(mutated(module, "Shard", *SEEDED[bug]), book=BareBook), 60)


def test_parameters_that_are_not_their_version_are_found() -> None:
    pull = Operation(0, 0, False, 1.0, 2.0, version=3, content=3)
    assert violations([pull], 1) == []
    pull.content = 2
    assert violations([pull], 1) == ["shard 0: version 3 holds 2 pushes"]


def recorded(worker: int, client: Client, copy: torch.Tensor, workers: int, rounds: int) -> list[Operation]:
    """Pushes and pulls in turn, and writes down what was seen."""
    operations = []
    for round_ in range(rounds):
        pull = Operation(worker, 0, False, monotonic())
        client.pull()
        pull.ended, pull.version, pull.content = monotonic(), client.versions[0][0], int(copy.sum())
        lease = round_ * workers + worker
        push = Operation(worker, 0, True, monotonic(), lease=lease, made_with=pull.version)
        said = client.push(one_hot(lease % len(copy)), lease)
        push.ended, push.refused = monotonic(), said not in (None, Reason.DUPLICATE)
        operations += [pull, push]
    return operations


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_histories_of_servers_are_in_order_whatever_happens(way: str) -> None:
    workers, rounds, odds = 3, 30, Odds(lost=0.01, doubled=0.02, late=0.01, cut=0.01)
    with standing(way, workers, faults=Faults(11, odds, odds)) as stand:
        clients = [stand.client(worker) for worker in range(workers)]
        made: list[Operation] = []
        threads = [
            threading.Thread(target=lambda w=w, c=c, p=p: made.extend(recorded(w, c, p, workers, rounds)))  # type: ignore[misc]
            for w, (c, p) in enumerate(clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert stand.machine.version == workers * rounds
    assert len(made) == 2 * workers * rounds
    assert violations(made, workers) == []
