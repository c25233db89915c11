"""Faults by number: what a seed says happens, and nothing else."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from headrace.transport.base import ClientTransport
from transport.faulty import Faults, FaultyLink, Odds

NOTHING = memoryview(b"")


class Echo(ClientTransport):
    """Sends everything back."""

    def __init__(self) -> None:
        self.moved_bytes = 0
        self.sent: list[int] = []
        self.closed = False
        self._waiting: deque[bytes] = deque()

    def push_slot(self, slot: int) -> Tensor:
        return torch.zeros(1)

    def send(self, message: bytes, slots: Sequence[int] = (), blob: bytes = b"") -> None:
        self.sent.append(message[0])
        self._waiting.append(message)

    def receive(self, timeout_s: float) -> tuple[bytes, memoryview] | None:
        return (self._waiting.popleft(), NOTHING) if self._waiting else None

    def fetch(self, slot: int, into: Tensor) -> int:
        return slot

    def reply_slot(self, slot: int) -> Tensor:
        return torch.zeros(1)

    def close(self) -> None:
        self.closed = True


def talk(
    requests: Odds, replies: Odds, seed: int = 1, messages: int = 100
) -> tuple[list[int], list[int], Faults, bool]:
    """Returns what came to the other end and back, the faults, and whether the link was cut."""
    echo, faults = Echo(), Faults(seed, requests, replies)
    link, back = FaultyLink(echo, faults), []
    try:
        for number in range(messages):
            link.send(bytes([number]))
            while (received := link.receive(0.0)) is not None:
                back.append(received[0][0])
    except ConnectionResetError:
        with pytest.raises(ConnectionResetError):
            link.receive(0.0)
        with pytest.raises(ConnectionResetError):
            link.send(b"more")
        assert echo.closed
        return echo.sent, back, faults, True
    return echo.sent, back, faults, False


def test_without_odds_nothing_happens() -> None:
    sent, back, faults, cut = talk(Odds(), Odds())
    assert sent == back == list(range(100))
    assert not faults.happened
    assert not cut


def test_what_is_lost_is_lost_one_way() -> None:
    sent, back, faults, _ = talk(Odds(lost=0.2), Odds())
    assert sent == back
    assert 100 - len(sent) == faults.happened["request lost"] == faults.happened.total() > 10
    sent, back, faults, _ = talk(Odds(), Odds(lost=0.2))
    assert len(sent) == 100
    assert 100 - len(back) == faults.happened["reply lost"] > 10


def test_what_is_doubled_comes_again_later() -> None:
    sent, back, faults, _ = talk(Odds(doubled=0.2), Odds())
    assert sent == back
    assert set(sent) == set(range(100))
    again = [number for place, number in enumerate(sent) if number in sent[:place]]
    assert faults.happened["request doubled"] - len(again) in range(4), "the last ones may not have come again yet"
    assert all(sent.count(number) == 2 for number in again)


def test_what_is_late_is_overtaken_and_comes() -> None:
    sent, _, faults, _ = talk(Odds(late=0.2), Odds())
    assert sent != sorted(sent)
    assert len(sent) >= 97
    assert faults.happened["request late"] > 10
    sent, back, _, _ = talk(Odds(late=0.0), Odds(late=0.5))
    assert sorted(back) == sent == list(range(100))


def test_a_cut_is_the_end_and_the_last_request_may_have_come() -> None:
    last = set()
    for seed in range(20):
        sent, back, faults, cut = talk(Odds(cut=0.1), Odds(), seed)
        assert cut
        assert faults.happened == {"request cut": 1}
        assert sent[: len(back)] == back
        last.add(len(sent) - len(back))
    assert last == {0, 1}


def test_who_is_silent_says_nothing_and_does_not_end() -> None:
    sent, back, faults, cut = talk(Odds(silent=0.05), Odds())
    assert sent == back == list(range(len(sent)))
    assert len(sent) < 100
    assert faults.happened == {"request silent": 1}
    assert not cut
    sent, back, _, _ = talk(Odds(), Odds(silent=0.05))
    assert sent == [*back, len(back)]


def test_the_same_seed_says_the_same() -> None:
    odds = Odds(0.1, 0.1, 0.1, 0.0, 0.0)
    assert talk(odds, odds, 3)[:2] == talk(odds, odds, 3)[:2] != talk(odds, odds, 4)[:2]
