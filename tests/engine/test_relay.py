"""Marks of one page come to another, through a store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from engine.conftest import until
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
        self._store = store

    def multi_get(self, keys: list[str]) -> list[bytes]:
        if self.gone:
            raise RuntimeError("connection reset")
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


def soon(condition: Callable[[], bool]) -> None:
    assert until(condition, WITHIN_S)


@pytest.mark.slow
def test_what_one_writes_the_other_sees(pages: Pages, relays: list[HeartbeatRelay]) -> None:
    here, there = pages
    here.digests[0][:] = bytes(range(32))
    here.losses[0][0] = 0.25
    here.beats[0][1], here.beats[0][2] = 5, 2**40
    here.counters[0][0] = 2**31 - 1
    here.saves[0][1], here.saves[0][2] = 12, -1
    here.saves[0][0] = 9
    soon(lambda: there.saves[0][0] == 9)
    assert list(there.saves[0]) == [9, 12, -1]
    assert bytes(there.digests[0]) == bytes(range(32))
    assert there.losses[0][0] == 0.25
    assert list(there.beats[0][1:3]) == [5, 2**40]
    assert there.counters[0][0] == 2**31 - 1
    there.ends[1][0] = 6
    soon(lambda: here.ends[1][0] == 6)
    # Nobody has written what is the other's.
    assert (here.ends[0][0], there.ends[0][0], there.saves[1][0]) == (0, 0, 0)


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
    seen = pages[1].beats[0][0]
    soon(lambda: pages[1].beats[0][0] > seen + 1)
    stores[0].gone = True
    soon(lambda: relays[0].broken == "connection reset")
    assert relays[1].broken == ""


@pytest.mark.slow
def test_the_last_words_are_told_at_the_end(pages: Pages, relays: list[HeartbeatRelay]) -> None:
    pages[1].abort = 2
    relays[1].close()
    soon(lambda: pages[0].abort == 2)
