"""Workers of one process, with a watchdog beside each, whose collectives are written down and never made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headrace.collectives.watchdog import watchdog as module
from headrace.collectives.watchdog.call_log import CallLog
from headrace.collectives.watchdog.flight_record import FlightRecord
from headrace.collectives.watchdog.telling import note_remembered, note_summary, remembered, summary
from headrace.collectives.watchdog.watchdog import Watchdog
from headrace.errors import PeerLost
from headrace.shared_memory.control_page import ControlPage
from headrace.shared_memory.ends import FinishedRanks

LIMIT_S = 30.0


class Worker:
    """A worker that calls what a test says, and whose watchdog looks when the test says so."""

    def __init__(self, page: ControlPage, rank: int, check: Callable[[], None], record: FlightRecord) -> None:
        self.said: list[str] = []
        self.records = records = page.ranks
        ends = FinishedRanks([record.heartbeat for record in records])
        self.watchdog = Watchdog(records, rank, check, ends, LIMIT_S, self.said.append, record)
        self.log: CallLog = self.watchdog.log(range(len(records)))
        self.heartbeat = records[rank].heartbeat

    def call(self, name: bytes = b"all_reduce", nbytes: int = 4096, ended: bool = True) -> None:
        self.log.begin(name, nbytes)
        self.log.has_ended = lambda: ended


class Endless:
    """A call that is recorded, and does not end by itself."""

    def is_completed(self) -> bool:
        return False


class Done:
    """A call whose result torch tells."""

    def __init__(self, result: torch.futures.Future[int]) -> None:
        self._result = result

    def get_future_result(self) -> torch.futures.Future[int]:
        return self._result


class Run:
    """Some workers, on a clock of their own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.lost = ""
        self.folder = folder
        # Watchdogs look when the test says so.
        monkeypatch.setattr(module, "_LOOK_EVERY_S", 1e9)
        monkeypatch.setattr(module, "monotonic", lambda: self.now)
        self.workers: list[Worker] = []

    def begin(self, world: int, hosts: int = 1) -> list[Worker]:
        """Where there are two hosts, each worker has a page of its own."""
        pages = [ControlPage.create(world, "watched")] * world
        if hosts > 1:
            pages = [ControlPage.create(world, "watched") for _ in range(world)]
        self.workers = [
            Worker(page, rank, self.check, FlightRecord(self.folder, rank, "gloo")) for rank, page in enumerate(pages)
        ]
        return self.workers

    def tell(self) -> None:
        """Does what heartbeats do."""
        for rank, worker in enumerate(self.workers):
            own = worker.records[rank]
            for other in self.workers:
                if other.records is not worker.records:
                    copy = other.records[rank]
                    note_summary(copy.board, summary(own.board))
                    if own.board.seeks:
                        note_remembered(copy.board, remembered(own.board))
                    copy.heartbeat = own.heartbeat

    def check(self) -> None:
        if self.lost:
            raise PeerLost(1, "here", self.lost)

    def pass_s(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            self.tell()
            for worker in self.workers:
                worker.watchdog.look()
