"""A conversation goes on over other links: nothing that was acknowledged is lost, nothing is done twice."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
import torch

from comm.ways import SECRET, WAYS
from headrace.comm.local_link import LocalLink
from headrace.comm.local_port import LocalPort
from headrace.comm.port import Link, Port
from headrace.comm.remote_link import RemoteLink
from headrace.comm.remote_port import RemotePort
from headrace.errors import PeerLost, Replaced
from headrace.policies.staleness import Anytime, Combination, Each, FirstOf
from headrace.ps.applier import Applier
from headrace.ps.client import Client
from headrace.ps.form import Form, Piece
from headrace.ps.leases import Leases
from headrace.ps.messages import Kind, Message
from headrace.ps.server import Server
from headrace.ps.session import Connection
from headrace.ps.shard import Shard
from headrace.spec.model import ParameterSpec

WIDTH = 64
PATIENCE_S = 20.0


class Stand:
    """A server of one parameter of `WIDTH` numbers, in a thread of its own, and clients of it.

    Args:
        way: "local" or "remote".
        workers: members.
        combination: of the shard.
        codec: of what is pushed.
    """

    def __init__(
        self, way: str, workers: int = 1, combination: Combination | None = None, codec: str = "plain"
    ) -> None:
        self.form = Form([Piece("weight", 0, (WIDTH,))], codec)
        slots = (self.form.slots, self.form.push_slots, self.form.reply_slots)
        self.port: Port = LocalPort(*slots) if way == "local" else RemotePort(*slots, secret=SECRET)
        applier = Applier(self.form, partial(torch.optim.SGD, lr=1.0), [ParameterSpec("weight", (WIDTH,))])
        machines = [Shard(range(workers), Anytime(), combination or Each())]
        self.server = Server(self.port, self.form, applier, machines, Leases(workers, 1000), grace_s=PATIENCE_S)
        self.machine = machines[0]
        self._way = way
        self._stop = threading.Event()
        self._between: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._clients: list[Client] = []
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._stop.is_set():
            self.server.turn(0.01)
            while not self._between.empty():
                self._between.get()()

    def link(self) -> Link:
        """Opens a link to it."""
        slots = (self.form.slots, self.form.push_slots, self.form.reply_slots)
        if self._way == "local":
            return LocalLink(self.port.address, *slots)
        return RemoteLink(self.port.address, *slots, secret=SECRET)

    def client(self, worker: int = 0, incarnation: int = 0, lasts: bool = True) -> tuple[Client, torch.Tensor]:
        """Returns a client and the copy that it pulls to; one that opens other links, if it `lasts`."""
        copy = torch.zeros(WIDTH)
        reopen = self.link if lasts else None
        connection = Connection(self.link(), self.form, [copy], 7, "there", reopen, PATIENCE_S, 0.2)
        client = Client([connection], worker, incarnation)
        self._clients.append(client)
        return client, copy

    def cut(self, worker: int = 0) -> None:
        """Ends the link of a worker, whatever it has asked."""
        done = threading.Event()

        def cut() -> None:
            for peer, member in list(self.server._members._at.items()):
                if member.worker == worker and not member.away:
                    self.port.drop(peer)
                    self.server._end(peer)
            done.set()

        self._between.put(cut)
        assert done.wait(PATIENCE_S)

    def close(self) -> None:
        for client in self._clients:
            client.close()
        self._stop.set()
        self._thread.join()
        self.server.close()


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextmanager
def standing(*arguments: object, **others: object) -> Iterator[Stand]:
    stand = Stand(*arguments, **others)  # type: ignore[arg-type]
    with ExitStack() as closing:
        closing.callback(stand.close)
        yield stand


def one_hot(coordinate: int) -> list[list[torch.Tensor]]:
    """Returns the gradient that makes a coordinate one more."""
    gradient = torch.zeros(WIDTH)
    gradient[coordinate] = -1.0
    return [[gradient]]


def counted(pushes: int) -> torch.Tensor:
    expected = torch.zeros(WIDTH)
    expected[:pushes] = 1.0
    return expected


def test_pushes_go_on_over_another_link(way: str) -> None:
    with standing(way) as stand:
        client, copy = stand.client()
        client.pull()
        for lease in range(20):
            if lease % 3 == 0:
                stand.cut()
            assert client.push(one_hot(lease), lease, pull=True) is None
        assert torch.equal(copy, counted(20))
        assert stand.machine.clocks == {0: 20}


def test_without_another_link_the_end_of_one_is_the_end(way: str) -> None:
    with standing(way) as stand:
        client, _ = stand.client(lasts=False)
        client.pull()
        stand.cut()
        with pytest.raises(PeerLost, match="rank 7 on there was lost: the link to it has ended"):
            client.push(one_hot(0), 0)


@pytest.mark.parametrize("codec", ["plain", "int8"])
def test_what_waits_for_others_is_asked_again_and_counts_once(way: str, codec: str) -> None:
    with standing(way, 2, FirstOf(2), codec) as stand:
        (first, copy), (second, other) = (stand.client(worker) for worker in range(2))
        first.pull()
        second.pull()
        results: list[object] = []
        for round_ in range(3):
            thread = threading.Thread(
                target=lambda lease=2 * round_: results.append(first.push(one_hot(lease), lease, pull=True))  # type: ignore[misc]
            )
            thread.start()
            while not stand.machine._contributed:
                pass
            stand.cut(0)
            lease = 2 * round_ + 1
            assert second.push(one_hot(lease), lease, pull=True) is None
            thread.join()
        assert results == [None] * 3
        assert torch.equal(copy, other)
        torch.testing.assert_close(copy, counted(6) / 2, atol=0.02, rtol=0.0)
        assert stand.machine.clocks == {0: 3, 1: 3}


def test_what_is_said_about_data_is_done_once_and_answered_again(way: str) -> None:
    with standing(way) as stand:
        client, _ = stand.client()
        client.tell(Message(Kind.ASK))
        granted = [client.lease().lease]
        for _ in range(5):
            stand.cut()
            client.tell(Message(Kind.ASK, lease=granted[-1]))
            stand.cut()
            granted.append(client.lease().lease)
        assert granted == list(range(6))


def test_what_is_administered_is_done_once(way: str) -> None:
    done: list[int] = []
    with standing(way) as stand:
        client, _ = stand.client()
        settle = stand.server._applier.settle

        def slowly(round_: int) -> None:
            settle(round_)
            done.append(round_)
            # The answer has nowhere to go.
            for peer in list(stand.server._members._at):
                stand.port.drop(peer)
                stand.server._end(peer)

        stand.server._applier.settle = slowly  # type: ignore[method-assign]
        for round_ in range(3):
            client.ask(0, Message(Kind.SETTLE, lease=round_))
    assert done == [0, 1, 2]


def test_who_wakes_up_late_is_told_that_it_was_replaced(way: str) -> None:
    with standing(way) as stand:
        old, _ = stand.client()
        old.pull()
        new, copy = stand.client(incarnation=1)
        new.pull()
        for _ in range(2):
            with pytest.raises(Replaced, match="rank 0 was replaced by its incarnation 1") as caught:
                old.push(one_hot(0), 0)
            assert (caught.value.rank, caught.value.incarnation) == (0, 1)
        with pytest.raises(Replaced):
            stand.client(incarnation=0)
        assert new.push(one_hot(1), 1, pull=True) is None
        assert torch.equal(copy, counted(2) - counted(1))


def lease_of(client: Client) -> int:
    client.tell(Message(Kind.ASK))
    return client.lease().lease


def test_a_worker_that_comes_again_in_time_keeps_its_portion(way: str) -> None:
    with standing(way, 2) as stand:
        (first, _), (second, _) = (stand.client(worker) for worker in range(2))
        assert [lease_of(first), lease_of(second)] == [0, 1]
        stand.cut(0)
        second.tell(Message(Kind.ASK, lease=1))
        assert second.lease().lease == 2, "portion 0 is not free"
        assert first.push(one_hot(0), 0) is None
        first.tell(Message(Kind.ASK, lease=0))
        assert first.lease().lease == 3
