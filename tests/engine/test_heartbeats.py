"""Marks of one page come to another, through a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from time import monotonic

import pytest
from torch.distributed import HashStore

from engine.conftest import until
from headrace.collectives.watchdog.boards import LEFT, calls_of
from headrace.collectives.watchdog.call_log import CallLog
from headrace.engine.base import RunProgress
from headrace.engine.torchrun.heartbeats import HeartbeatRelay
from headrace.shared_memory.control_page import ControlPage
from headrace.shared_memory.segment import SharedSegment

WITHIN_S = 10.0


class BreakingStore:
    """Does what a store does, until its host has gone.

    Args:
        store: that it is.
    """

    def __init__(self, store: HashStore) -> None:
        self.gone = False
        self.set = store.set
        self.add = store.add
        self.closed = False
        self._store = store

    def close(self) -> None:
        self.closed = True

    def leave(self, key: str, value: bytes) -> None:
        """It sees no connection end."""

    def lose(self, name: str) -> None:
        """No members meet in it."""

    def multi_get(self, keys: list[str]) -> list[bytes]:
        if self.gone:
            raise ConnectionResetError("connection reset")
        return self._store.multi_get(keys)


Pages = list[ControlPage]


@pytest.fixture
def pages() -> Pages:
    segments = [SharedSegment.create(ControlPage.nbytes(2), "control") for _ in range(2)]
    return [ControlPage(segment, 2) for segment in segments]


@pytest.fixture
def stores() -> list[BreakingStore]:
    store = HashStore()
    return [BreakingStore(store), BreakingStore(store)]


@pytest.fixture
def relays(pages: Pages, stores: list[BreakingStore]) -> Iterator[list[HeartbeatRelay]]:
    with ThreadPoolExecutor(2) as pool:
        # Each waits for the other.
        made = list(pool.map(lambda rank: HeartbeatRelay(stores[rank], "run", pages[rank], rank), range(2)))
    yield made
    for relay in made:
        relay.close()
    assert all(store.closed for store in stores)


def soon(condition: Callable[[], bool]) -> None:
    assert until(condition, WITHIN_S)


@pytest.mark.slow
def test_what_one_writes_the_other_sees(pages: Pages, relays: list[HeartbeatRelay]) -> None:
    here, there = pages
    here.ranks[0].saved.digest[:] = list(range(32))
    here.ranks[0].heartbeat.loss = 0.25
    here.ranks[0].heartbeat.step, here.ranks[0].heartbeat.examples = 5, 2**40
    here.ranks[0].barrier_counter = 2**31 - 1
    here.ranks[0].saved.nbytes, here.ranks[0].saved.error = 12, -1
    here.ranks[0].saved.step_plus_1 = 9
    soon(lambda: there.ranks[0].saved.step_plus_1 == 9)
    heard, saved = there.ranks[0], there.ranks[0].saved
    assert (saved.step_plus_1, saved.nbytes, saved.error) == (9, 12, -1)
    assert bytes(saved.digest) == bytes(range(32))
    assert heard.heartbeat.loss == 0.25
    assert (heard.heartbeat.step, heard.heartbeat.examples) == (5, 2**40)
    assert heard.barrier_counter == 2**31 - 1
    there.ranks[1].heartbeat.finished = 6
    soon(lambda: here.ranks[1].heartbeat.finished == 6)
    # No process has written to the other's fields.
    assert (here.ranks[0].heartbeat.finished, there.ranks[0].heartbeat.finished, there.ranks[1].saved.step_plus_1) == (
        0,
        0,
        0,
    )


@pytest.mark.slow
def test_what_one_calls_of_its_devices_the_other_sees(pages: Pages, relays: list[HeartbeatRelay]) -> None:
    here, there = (page.ranks[0].board for page in pages)
    log = CallLog((0, 1), 0, 7, here.groups[3], pages[0].ranks[0].heartbeat)
    for number in range(5):
        log.begin(b"all_reduce", number)
    here.activity = b"is in forward"
    soon(lambda: there.groups[3].number == 5)
    assert (there.activity, there.groups[3].key) == (b"is in forward", 7)
    assert [call.nbytes for call in calls_of(there.groups[3])][-1] == 4
    # While it waits, or is waited for, all; and again when more have come.
    here.seeks = 1
    soon(lambda: [call.nbytes for call in calls_of(there.groups[3])] == [0, 1, 2, 3, 4])
    for number in range(5, 9):
        log.begin(b"all_reduce", number)
    soon(lambda: [call.nbytes for call in calls_of(there.groups[3])] == list(range(9)))
    log.leave()
    soon(lambda: there.groups[3].number == LEFT)
    assert not any(group.key for group in pages[1].ranks[1].board.groups)


@pytest.mark.slow
def test_a_wish_to_stop_and_the_first_loss_are_everybodys(pages: Pages, relays: list[HeartbeatRelay]) -> None:
    here, there = pages
    there.stop = 1
    soon(lambda: here.stop == 1)
    here.abort = 2
    soon(lambda: there.abort == 2)
    assert there.stop == 1


@pytest.mark.slow
def test_beats_go_on_and_a_store_that_is_gone_is_told(
    pages: Pages, stores: list[BreakingStore], relays: list[HeartbeatRelay]
) -> None:
    seen = pages[1].ranks[0].heartbeat.count
    soon(lambda: pages[1].ranks[0].heartbeat.count > seen + 1)
    stores[0].gone = True
    soon(lambda: relays[0].broken == "connection reset")
    assert relays[1].broken == ""


def test_an_older_decision_undoes_no_newer_one(pages: Pages, relays: list[HeartbeatRelay]) -> None:
    for relay in relays:
        relay.close()
    decides, follows = relays
    for told, there, then in ((2, 1, 2), (2, 3, 3), (4, 3, 4)):
        pages[0].ranks[0].restarts, pages[1].ranks[0].restarts = told, there
        follows.take_marks(0, decides.own_marks())
        assert pages[1].ranks[0].restarts == then


@pytest.mark.slow
def test_the_last_words_are_told_at_the_end(pages: Pages, relays: list[HeartbeatRelay]) -> None:
    pages[1].abort = 2
    relays[1].close()
    soon(lambda: pages[0].abort == 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leader", "comes"), [((2, 0), (0, 1)), ((2, 1), (0, 3)), ((0, 2), (1, 1)), ((1, 0), (2, 4))], ids=str
)
def test_a_process_that_comes_back_learns_what_was_decided(leader: tuple[int, int], comes: tuple[int, int]) -> None:
    store, restarts = HashStore(), {0: 1, 1: 5, 2: 4} | dict([leader, comes])
    there, here = (ControlPage.create(3) for _ in range(2))
    # The leader's store holds what that of the first rank 0 held.
    page = ControlPage.create(3)
    HeartbeatRelay(BreakingStore(store), "run", page, 0, serves=True).close()
    for rank, count in restarts.items():
        there.ranks[rank].restarts = count
    serving = HeartbeatRelay(BreakingStore(store), "run", there, *leader, lambda _: False, serves=True)
    # As a process follows where the run has lost its first rank 0.
    first = iter([True])
    coming = HeartbeatRelay(BreakingStore(store), "run", here, *comes, lambda _: next(first, False))
    assert [record.restarts for record in here.ranks] == [restarts[rank] for rank in range(3)]
    coming.close()
    serving.close()


class HeldStore(BreakingStore):
    """Answers a question only when it is let."""

    def __init__(self, store: HashStore) -> None:
        super().__init__(store)
        self.asked, self.may_answer = Event(), Event()
        self.may_answer.set()

    def multi_get(self, keys: list[str]) -> list[bytes]:
        answer = super().multi_get(keys)
        self.asked.set()
        assert self.may_answer.wait(WITHIN_S)
        return answer


def test_an_answer_counts_from_when_it_was_asked_for(pages: Pages) -> None:
    """A process that has ended may have said why after that."""
    stores = [HeldStore(HashStore())] * 2
    with ThreadPoolExecutor(2) as pool:
        here, there = pool.map(lambda rank: HeartbeatRelay(stores[rank], "run", pages[rank], rank), range(2))
    stores[0].may_answer.clear()
    stores[0].asked.clear()
    assert stores[0].asked.wait(WITHIN_S)
    after_s = monotonic()
    stores[0].may_answer.set()
    soon(lambda: min(here.asked_s, there.asked_s) > after_s)
    for relay in (here, there):
        assert relay.told_s > relay.asked_s
        relay.close()


def test_what_a_lost_process_has_told_does_not_count_for_the_next_one(pages: Pages) -> None:
    store = HashStore()
    held = HeldStore(store)
    stores = [BreakingStore(store), held]
    with ThreadPoolExecutor(2) as pool:
        lost, there = pool.map(lambda rank: HeartbeatRelay(stores[rank], "run", pages[rank], rank), range(2))
    lost.close()
    held.may_answer.clear()
    held.asked.clear()
    assert held.asked.wait(WITHIN_S)
    # The answer that is on its way has the lost process's last word.
    there.follow_next(0)
    before_s = there.told_s
    held.may_answer.set()
    soon(lambda: there.told_s > before_s)
    assert there.left == set()
    there.close()


def test_progress_has_no_loss_before_a_rank_has_one(pages: Pages) -> None:
    heartbeat = pages[0].ranks[1].heartbeat
    heartbeat.step = 1
    assert RunProgress.read(pages[0]) == RunProgress(1, None, 0)
    heartbeat.loss = 2.5
    assert RunProgress.read(pages[0]) == RunProgress(1, 2.5, 0)
    pages[0].ranks[0].heartbeat.loss = 1.5
    assert RunProgress.read(pages[0]) == RunProgress(1, 2.0, 0)
