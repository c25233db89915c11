"""What a client may send that knows the secret: it ends its own connection, and fills no server's memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from headrace.checkpoint.forms import pack
from headrace.errors import ServerRefused
from headrace.parameter_server.server import coordinator
from headrace.parameter_server.server.coordinator import Membership
from headrace.parameter_server.wire import Kind, Message
from parameter_server.stands import Stand, one_hot, standing


@pytest.fixture
def stand() -> Iterator[Stand]:
    with standing("local", workers=2) as stand:
        yield stand


@pytest.mark.parametrize("name", ["weight/exp_avg@0", "weight/average@0"])
def test_state_of_a_wrong_shape_ends_the_connection_of_its_sender_alone(stand: Stand, name: str) -> None:
    (hostile, _), (other, _) = stand.client(0, lasts=False), stand.client(1)
    blob = pack({name: torch.zeros(3, 3)})
    with pytest.raises(ServerRefused, match="no state of a shard: "):
        hostile.ask(0, Message(Kind.LOAD, 0, 1), blob)
    assert other.push(one_hot(0), 0) is None


def test_a_server_remembers_a_limited_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "_MOST_WORKERS", 3)
    members = Membership()
    for worker in range(3):
        members.join(worker, worker, 0, worker, False)
        members.leave(worker, for_good=True)
    with pytest.raises(ValueError, match="3 workers have joined, which is the most, and worker 7 is another one"):
        members.join(7, 7, 0, 7, False)
    members.join(8, 2, 1, 8, False)
    assert [len(each) for each in (members.state().newest, members.state().linked)] == [3, 1]


def test_a_server_remembers_a_limited_number_of_clients_that_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "_MOST_CLIENTS", 3)
    members = Membership()
    stays, _ = members.join(0, 0, 0, 100, False)
    for number in range(1, 10):
        members.join(number, 0, 0, 100 + number, True)
        members.leave(number)
    assert [each.session for each in members.state().known] == [100, 108, 109]
    stays.done = 5
    again, _ = members.join(20, 0, 0, 100, False)
    assert again.done == 5
