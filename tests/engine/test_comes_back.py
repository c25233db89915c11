"""A process that takes the place of a lost one: who answers it, and what it does not decide."""

from __future__ import annotations

from time import monotonic
from types import SimpleNamespace
from typing import cast

import pytest

from headrace.engine.base import LivenessProbe
from headrace.engine.torchrun import group
from headrace.engine.torchrun.elastic_workers.returning import admit, come_back
from headrace.engine.torchrun.group import LaunchedGroup
from headrace.engine.torchrun.key_value import StoreClient
from headrace.engine.torchrun.peers import LivenessWatch
from headrace.errors import RunFailed


class Store:
    """A store in this process."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.values: dict[str, bytes] = {}
        self.get = self.values.__getitem__

    def add(self, key: str, number: int) -> int:
        self.numbers[key] = self.numbers.get(key, 0) + number
        return self.numbers[key]

    def set(self, key: str, value: str | bytes) -> None:
        self.values[key] = value.encode() if isinstance(value, str) else value


def came_back(incarnation: int) -> tuple[int, float]:
    """Lets a process come back, which rank 0 answers while it waits."""
    store = cast("StoreClient", Store())
    return come_back(store, "run", 1, 0.2, lambda: admit(store, "run", 1, incarnation, 5.5))


def test_it_is_told_which_process_of_its_rank_it_is() -> None:
    assert came_back(3) == (3, 5.5)


def test_it_is_told_when_all_is_done() -> None:
    with pytest.raises(RunFailed, match=r"another process has begun as rank 1 .*: the run comes to its end"):
        came_back(0)


def test_it_does_not_change_what_was_agreed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    monkeypatch.setattr(group, "launched_store", lambda: store)
    for incarnation, said in ((0, "first"), (1, "another")):
        member = SimpleNamespace(rank=0, incarnation=incarnation, _prefix="run", hosts=["a"])
        assert LaunchedGroup._say(cast("LaunchedGroup", member), "agreed/1", said, 0) == "first"


def test_others_are_not_silent_while_the_store_does_not_answer() -> None:
    now_s = [0.0]
    probe = LivenessProbe(0, lambda: now_s[0])
    watch = SimpleNamespace(
        _page=SimpleNamespace(ranks={1: SimpleNamespace(heartbeat=SimpleNamespace(pid=7, count=1))}),
        _rank=0,
        _hosts=["a", "b"],
        _timeout_s=10.0,
        _probes={1: probe},
        _relay=SimpleNamespace(told_s=monotonic() - 4.0, severed=set(), left=set()),
    )
    for _ in range(9):
        silent_s = LivenessWatch._look_at(cast("LivenessWatch", watch), 1)
        now_s[0] += 0.5
    assert -1.0 < silent_s < 0.5
    watch._relay.told_s = monotonic()
    assert LivenessWatch._look_at(cast("LivenessWatch", watch), 1) > 4.0
