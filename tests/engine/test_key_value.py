"""The store of a launcher's processes: what it keeps, whom it hears, and how its end is noticed."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import zmq

from engine.conftest import until
from headrace.engine.torchrun import key_value
from headrace.engine.torchrun.key_value import Failure, NotOfThisRun, StoreClient, decode, encode
from headrace.engine.torchrun.store_server import StoreServer
from headrace.errors import UsageError, WorkerFailed
from headrace.transport.frames import PART_BYTES
from headrace.transport.zeromq import ConnectionEvents, Keys, connect, make_socket

SECRET, OTHER = b"the secret of this run", b"the secret of another run"
WITHIN_S = 20.0


class Served:
    """A store, and the addresses that it has named."""

    def __init__(self) -> None:
        self.strangers: list[str] = []
        self.server = StoreServer("tcp://127.0.0.1:0", SECRET, self.strangers.append)
        self.port = int(self.server.address.rpartition(":")[2])


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.server.close()


@pytest.fixture
def client(served: Served) -> Iterator[StoreClient]:
    client = StoreClient(served.server.address, SECRET, WITHIN_S)
    yield client
    client.close()


def test_what_one_sets_another_gets(client: StoreClient) -> None:
    other = client.clone()
    client.set("text", "größer")
    client.set("empty", b"")
    client.set("long", bytes(range(256)) * 4096)
    assert other.multi_get(["long", "empty", "text"]) == [bytes(range(256)) * 4096, b"", "größer".encode()]
    assert (client.add("count", 2), other.add("count", -5)) == (2, -3)
    other.close()


def test_who_asks_first_waits(client: StoreClient) -> None:
    other = client.clone()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(other.multi_get, ["first", "second"])
        client.set("first", b"1")
        assert not asked.done()
        client.set("second", b"2")
        assert asked.result(WITHIN_S) == [b"1", b"2"]
    other.close()


def test_what_never_comes_is_not_waited_for_longer(served: Served) -> None:
    client = StoreClient(served.server.address, SECRET, 0.3)
    with pytest.raises(TimeoutError, match=r"has not answered for 0\.3 s"):
        client.get("nothing")
    client.set("late", b"1")
    assert client.get("late") == b"1", "the answer to the request before is left aside"
    client.close()


def test_why_a_start_fails_is_told_by_the_first_that_has_said_it(served: Served, client: StoreClient) -> None:
    first, second, leader = (
        Failure(rank=rank, host="a", cause=cause, code=1, lost=-1)
        for rank, cause in ((1, "first"), (2, "second"), (0, "last"))
    )
    others = [client.clone() for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        waiting = []
        for other, why in zip(others, (first, second), strict=True):
            waiting.append(pool.submit(other.end, why, False, WITHIN_S))
            assert until(lambda: len(served.server._ending) == len(waiting), WITHIN_S)
            with pytest.raises(WorkerFailed, match="rank 1 on a failed: first"):
                client.get("what never comes")
        assert client.end(leader, True, WITHIN_S) == (leader, leader)
        assert [each.result(WITHIN_S) for each in waiting] == [(leader, leader)] * 2
    for other in others:
        other.close()


class GivenUpError(Exception):
    """Ends a request."""


def test_the_answer_to_a_request_that_was_given_up_is_dropped(client: StoreClient) -> None:
    def give_up() -> None:
        raise GivenUpError

    with pytest.raises(GivenUpError):
        client.meet("first", "a", b"1", ["a", "b"], give_up)
    other = client.clone()
    assert other.meet("first", "b", b"2", ["a", "b"], bool) == [b"1", b"2"]
    assert client.meet("second", "a", b"3", ["a"], bool) == [b"3"]
    other.close()


def test_the_end_of_the_store_is_noticed() -> None:
    served = Served()
    client = StoreClient(served.server.address, SECRET, WITHIN_S)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.get, "nothing")
        served.server.close()
        with pytest.raises(ConnectionError, match=r"is lost: the connection was closed"):
            asked.result(WITHIN_S)
    client.close()


def test_another_secret_is_refused_and_named(served: Served, client: StoreClient) -> None:
    with pytest.raises(NotOfThisRun, match=rf"127\.0\.0\.1:{served.port} is lost"):
        StoreClient(served.server.address, OTHER, WITHIN_S)
    assert until(lambda: "127.0.0.1" in served.strangers, WITHIN_S)
    client.set("still", b"served")
    assert client.get("still") == b"served"


def test_a_server_with_another_secret_is_not_believed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an agent's store was told a wrong address."""
    monkeypatch.setattr(key_value, "_SHOWN_S", 0.01)
    foreign = StoreServer("tcp://127.0.0.1:0", OTHER, served.strangers.append)
    with pytest.raises(NotOfThisRun):
        StoreClient(foreign.address, SECRET, WITHIN_S)
    foreign.close()


def test_garbage_is_not_heard(served: Served, client: StoreClient) -> None:
    dice = random.Random(0)
    for size in (0, 1, 10, 64, 200, 5000):
        with socket.create_connection(("127.0.0.1", served.port)) as stranger:
            stranger.sendall(dice.randbytes(size))
    with zmq.Context() as context, make_socket(context, zmq.DEALER) as plain:
        connect(plain, served.server.address)
        # The server may have ended the connection already, and then there is nowhere to send to.
        with suppress(zmq.Again):
            plain.send_multipart(encode(b"s", 1, [b"key", b"of a stranger"]), zmq.NOBLOCK)
        client.set("key", b"of the run")
        assert until(lambda: len(served.strangers) > 0, WITHIN_S)
        assert client.get("key") == b"of the run"


WRONG = [
    [b""],
    [b"s"],
    [b"s\1\0\0\0\1"],
    encode(b"x", 1, []),
    encode(b"s", 1, [b"key"]),
    encode(b"a", 1, [b"key", b"1"]),
    [*encode(b"s", 1, [b"key", b"value"]), b"more"],
    encode(b"s", 1, [b"key", b"value"])[:1],
]


@pytest.mark.parametrize("frames", WRONG, ids=str)
def test_a_member_that_sends_what_is_no_request_is_ended_alone(
    served: Served, client: StoreClient, frames: list[bytes]
) -> None:
    with zmq.Context() as context, make_socket(context, zmq.DEALER) as member:
        Keys(SECRET).protect_client(member)
        events = ConnectionEvents(member, zmq.EVENT_DISCONNECTED)
        connect(member, served.server.address)
        member.send_multipart(frames)
        assert events.socket.poll(WITHIN_S * 1000)
        events.close()
    client.set("still", b"served")
    assert client.multi_get(["still"]) == [b"served"]
    assert served.strangers == []


def test_messages_come_back_as_they_were() -> None:
    dice = random.Random(1)
    for _ in range(50):
        fields = [
            dice.randbytes(dice.choice([0, 1, 50, PART_BYTES, 3 * PART_BYTES + 1])) for _ in range(dice.randrange(4))
        ]
        frames = encode(b"g", dice.getrandbits(32), fields)
        assert max(map(len, frames)) <= PART_BYTES
        assert decode(frames) == (b"g", int.from_bytes(frames[0][1:5], "little"), fields)


def test_a_port_in_use_is_refused(served: Served) -> None:
    with pytest.raises(UsageError, match=rf"cannot listen on {served.server.address}: Address already in use"):
        StoreServer(served.server.address, SECRET, served.strangers.append)
