"""A conversation goes on over other links: nothing that was acknowledged is lost, nothing is done twice."""

from __future__ import annotations

import threading

import pytest
import torch

from headrace.errors import PeerLost, Replaced
from headrace.parameter_server.client.client import Client
from headrace.parameter_server.core.events import Reason
from headrace.parameter_server.wire import Kind, Message
from headrace.policies.staleness import FirstPushes
from parameter_server.stands import WIDTH, counted, one_hot, standing
from transport.faulty import Faults, Odds


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
    with standing(way, 2, FirstPushes(2), codec) as stand:
        (first, copy), (second, other) = (stand.client(worker) for worker in range(2))
        first.pull()
        second.pull()
        results: list[object] = []
        for round_ in range(3):
            thread = threading.Thread(
                target=lambda lease=2 * round_: results.append(first.push(one_hot(lease), lease, share=0.5, pull=True))  # type: ignore[misc]
            )
            thread.start()
            while not stand.machine._contributed:
                pass
            stand.cut(0)
            lease = 2 * round_ + 1
            assert second.push(one_hot(lease), lease, share=0.5, pull=True) is None
            thread.join()
        assert results == [None] * 3
        assert torch.equal(copy, other)
        torch.testing.assert_close(copy, counted(6) / 2, atol=0.02, rtol=0.0)
        assert stand.machine.clocks == {0: 3, 1: 3}


def test_what_is_said_about_data_is_done_once_and_answered_again(way: str) -> None:
    with standing(way) as stand:
        client, _ = stand.client()
        client.servers[0].tell(Message(Kind.ASK))
        granted = [client.lease().lease]
        for _ in range(5):
            stand.cut()
            client.servers[0].tell(Message(Kind.ASK, lease=granted[-1]))
            stand.cut()
            granted.append(client.lease().lease)
        assert granted == list(range(6))


def test_what_is_administered_is_done_once(way: str) -> None:
    done: list[int] = []
    with standing(way) as stand:
        client, _ = stand.client()
        settle = stand.server._optimizer.settle

        def slowly(round_: int) -> None:
            settle(round_)
            done.append(round_)
            # The answer has nowhere to go.
            for peer in list(stand.server._members._at):
                stand.port.drop(peer)
                stand.server._end(peer)

        stand.server._optimizer.settle = slowly  # type: ignore[method-assign]
        for round_ in range(3):
            client.ask(0, Message(Kind.SETTLE, lease=round_))
    assert done == [0, 1, 2]


def test_who_was_declared_lost_is_told_so_and_holds_nothing(way: str) -> None:
    with standing(way, workers=2) as stand:
        lost, _ = stand.client()
        other, _ = stand.client(1)
        lost.servers[0].tell(Message(Kind.ASK, lease=-1))
        held = lost.lease().lease
        stand.between(lambda: stand.server.lose(0, 1))
        with pytest.raises(Replaced, match="the run goes on without this process"):
            lost.push(one_hot(0), held)
        with pytest.raises(Replaced):
            stand.client()
        other.servers[0].tell(Message(Kind.ASK, lease=-1))
        assert other.lease().lease == held
        stand.client(incarnation=1)[0].pull()


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
    client.servers[0].tell(Message(Kind.ASK))
    return client.lease().lease


def test_a_worker_that_comes_again_in_time_keeps_its_portion(way: str) -> None:
    with standing(way, 2) as stand:
        (first, _), (second, _) = (stand.client(worker) for worker in range(2))
        assert [lease_of(first), lease_of(second)] == [0, 1]
        stand.cut(0)
        second.servers[0].tell(Message(Kind.ASK, lease=1))
        assert second.lease().lease == 2, "portion 0 is not free"
        assert first.push(one_hot(0), 0) is None
        first.servers[0].tell(Message(Kind.ASK, lease=0))
        assert first.lease().lease == 3


ODDS = {
    "lost": (Odds(lost=0.1), Odds(lost=0.1)),
    "request lost": (Odds(lost=0.2), Odds()),
    "reply lost": (Odds(), Odds(lost=0.2)),
    "doubled": (Odds(doubled=0.4), Odds(doubled=0.4)),
    "late": (Odds(late=0.2), Odds(late=0.2)),
    "cut": (Odds(cut=0.1), Odds(cut=0.1)),
    "all": (*[Odds(lost=0.03, doubled=0.1, late=0.03, cut=0.03)] * 2,),
}


@pytest.mark.one
@pytest.mark.slow
@pytest.mark.parametrize("kind", ODDS)
def test_whatever_happens_on_the_way_everything_counts_once(way: str, kind: str) -> None:
    faults = Faults(7, *ODDS[kind])
    with standing(way, faults=faults) as stand:
        client, copy = stand.client()
        client.pull()
        for lease in range(WIDTH // 2):
            client.servers[0].tell(Message(Kind.ASK, lease=lease - 1))
            granted = client.lease()
            assert (granted.kind, granted.lease) == (Kind.GRANT, lease)
            assert client.push(one_hot(lease), lease, pull=lease % 2 == 1) is None
        assert torch.equal(copy, counted(WIDTH // 2))
        assert stand.machine.clocks == {0: WIDTH // 2}
    assert faults.happened.total() >= 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lost", "cut"])
def test_two_who_make_rounds_together_end_them_whatever_happens(way: str, kind: str) -> None:
    with standing(way, 2, FirstPushes(2), faults=Faults(3, *ODDS[kind])) as stand:
        pairs = [stand.client(worker) for worker in range(2)]

        def work(worker: int) -> None:
            for round_ in range(16):
                lease = 2 * round_ + worker
                assert pairs[worker][0].push(one_hot(lease), lease, share=0.5, pull=True) is None
                ended.append(lease)

        ended: list[int] = []
        threads = [threading.Thread(target=work, args=(worker,)) for worker in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(ended) == list(range(32))
        for _, copy in pairs:
            assert torch.equal(copy, counted(32) / 2)


@pytest.mark.slow
def test_a_link_that_has_fallen_silent_is_left(way: str) -> None:
    with standing(way, faults=Faults(5, Odds(silent=0.1), Odds(silent=0.1)), patience_s=1.5) as stand:
        # Another connection gets a quarter of the patience, on a busy machine, too.
        client, copy = stand.client()
        for lease in range(5):
            assert client.push(one_hot(lease), lease, pull=True) is None
        assert torch.equal(copy, counted(5))


def test_a_client_that_closes_leaves_alone(way: str) -> None:
    with standing(way) as stand:
        (pushing, copy), (other, _) = stand.client(), stand.client(observes=True)
        assert pushing.push(one_hot(0), 0, pull=True) is None
        other.pull()
        other.close()
        assert pushing.push(one_hot(1), 1, pull=True) is None
        assert torch.equal(copy, counted(2))
        assert stand.machine.clocks == {0: 2}


def test_whose_data_is_on_its_way_does_not_rest(way: str) -> None:
    with standing(way, workers=2) as stand:
        client, _ = stand.client()
        client.servers[0].tell(Message(Kind.ASK, lease=-1))
        # The server deals with one after the other: it has given out the data when it answers this.
        client.ask(0, Message(Kind.BEGIN))
        client._rest()
        assert not client.rested
        assert client.lease(rests=True).kind == Kind.GRANT
        assert set(stand.machine.clocks) == {0, 1}


def test_of_two_that_push_for_one_lease_the_first_server_says_which_counts(way: str) -> None:
    with standing(way, workers=2) as one, standing(way, workers=2) as two:
        slow, fast = (Client([one.connection(), two.connection()], worker, 0) for worker in range(2))
        # Each is the first at one of the servers.
        fast.servers[1].push(range(1), one_hot(0)[0], Message(Kind.PUSH, 0, True, 0, 1.0, 1.0))
        assert fast.servers[1].finish(pulls=False).reason is None
        assert slow.push(one_hot(0) * 2, 0) == Reason.DUPLICATE
        assert slow.first_reason is None
        assert fast.push(one_hot(0) * 2, 0) == fast.first_reason == Reason.DUPLICATE
        assert slow.push(one_hot(1) * 2, 1) is slow.first_reason is None
        for client in (slow, fast):
            client.close()
