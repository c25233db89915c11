"""hr.summary(job, strategy) with servers: each of them, and a worker, with bytes that can be added up by hand."""

from __future__ import annotations

import pytest

import headrace as hr
from api.memory.stacks import PARAMETERS, WIDTH, job, near
from headrace.api.memory.planning import plan_memory

_BUCKET = (1 << 20) + WIDTH * WIDTH * 4
"""The longest: it ends with the shard that makes it a megabyte."""


@pytest.mark.parametrize("servers", [1, 2])
def test_workers_and_servers_map_what_the_other_writes(servers: int) -> None:
    plan = plan_memory(job(), hr.ParameterServer(3, servers), choices=False)
    assert plan.roles.keys() == {"worker 0", *(f"server {number}" for number in range(servers))}
    worker, server = plan.roles["worker 0"], plan.roles["server 0"]
    # Its push slots and the servers' parameters; layers this small write gradients that are copied.
    assert worker.parameters == PARAMETERS
    assert worker.state == 0
    assert near(worker.exchange, 2 * PARAMETERS)
    assert PARAMETERS <= worker.activations <= 1.5 * PARAMETERS
    # The slots of three workers.
    assert near(server.parameters, PARAMETERS // servers)
    assert near(server.state, 2 * PARAMETERS // servers)
    assert near(server.exchange, 3 * PARAMETERS // servers)
    assert plan.peak == max(each.peak for each in plan.roles.values())


def test_a_server_that_waits_for_a_round_has_its_mean() -> None:
    apart, together = (
        plan_memory(job(), hr.ParameterServer(2, staleness_bound=bound, sharding="whole"), choices=False)
        for bound in (None, 0)
    )
    more = together.roles["server 0"].activations - apart.roles["server 0"].activations
    assert near(more, WIDTH * WIDTH * 4)


def test_encoded_gradients_and_parameters_take_half() -> None:
    memory = plan_memory(job(), hr.ParameterServer(2, push_codec="bf16", pull_codec="bf16"), choices=False).memory
    assert near(memory.exchange, PARAMETERS // 2 * 4)


def test_a_worker_of_downpour_has_sums_and_what_it_fetches_beside_its_parameters() -> None:
    strategies = {
        "waits": hr.Downpour(2, push_every=2, fetch_every=2, overlap=False),
        "overlaps": hr.Downpour(2, push_every=2, fetch_every=2),
        "moves": hr.Downpour(2, push_every=1, fetch_every=1, local="optimizer"),
        "seldom": hr.Downpour(2, push_every=500, fetch_every=100),
    }
    found = {name: plan_memory(job(), each, choices=False).roles["worker 0"] for name, each in strategies.items()}
    assert near(found["waits"].exchange, 2 * PARAMETERS)
    # A sum, and the gradients that are added to it.
    assert 2 * PARAMETERS <= found["waits"].activations <= 2.5 * PARAMETERS
    # Three connections see the server's parameters; another sum is pushed meanwhile, and what is fetched is there.
    assert near(found["overlaps"].exchange, 4 * PARAMETERS)
    assert 4 * PARAMETERS <= found["overlaps"].activations <= 4.5 * PARAMETERS
    assert near(found["moves"].state, 2 * PARAMETERS)
    assert near(found["seldom"].peak, found["overlaps"].peak)


@pytest.mark.parametrize("strategy", [hr.ParameterServer, hr.Downpour])
def test_what_is_sent_is_in_memory_of_ones_own(strategy: type[hr.ParameterServer] | type[hr.Downpour]) -> None:
    shared, sent = (plan_memory(job(), strategy(2, transport=way), choices=False) for way in ("shared_memory", "tcp"))
    before, worker = shared.roles["worker 0"], sent.roles["worker 0"]
    assert worker.parameters == PARAMETERS
    # Push slots, but none of the server's parameters: of these, at most two buckets that have come.
    assert PARAMETERS <= worker.exchange <= 2.02 * PARAMETERS
    assert worker.peak <= before.peak + 0.02 * PARAMETERS
    there, server = shared.roles["server 0"], sent.roles["server 0"]
    assert near(server.parameters + server.state, there.parameters + there.state)
    # Two buckets of each worker, and a shard for each that leaves.
    assert 0 < server.exchange <= 2 * 2 * _BUCKET + 2 * WIDTH * WIDTH * 4


def test_a_backup_sees_its_servers_parameters_besides() -> None:
    plain, doubled = (plan_memory(job(), hr.ParameterServer(2, 2, backups=number), choices=False) for number in (0, 1))
    assert doubled.roles.keys() == plain.roles.keys() | {"backup 0", "backup 1"}
    for number in range(2):
        server = doubled.roles[f"server {number}"]
        assert server == plain.roles[f"server {number}"]
        assert near(doubled.roles[f"backup {number}"].exchange - server.exchange, server.parameters)
    assert doubled.roles["worker 0"] == plain.roles["worker 0"]
