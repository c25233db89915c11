"""Ranks as processes, forked from one that has imported torch."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.local.fork_server import ForkServer
from headrace.shared_memory.control_page import ControlPage
from headrace.shared_memory.segment import SharedSegment

TESTS = Path(__file__).resolve().parent.parent
SCRIPT = TESTS / "collectives" / "rank_script.py"

Play = Callable[..., list[Any]]


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    fork_server = ForkServer()
    yield fork_server
    fork_server.close()


@pytest.fixture
def play(fork_server: ForkServer, tmp_path: Path) -> Play:
    """Returns `play(scenario, world, counter=0, **arguments)`: what every rank's part of a scenario returned."""

    def play(scenario: str, world: int, counter: int = 0, **arguments: object) -> list[Any]:
        segment = SharedSegment.create(ControlPage.nbytes(world), "control")
        page = ControlPage(segment, world)
        for record in page.ranks:
            record.barrier_counter = counter
        held, lifeline = os.pipe()
        results = [tmp_path / f"{scenario}-{rank}.json" for rank in range(world)]
        logs = [tmp_path / f"{scenario}-{rank}.log" for rank in range(world)]
        try:
            for rank in range(world):
                order = {
                    "script": str(SCRIPT),
                    "arguments": [
                        *[scenario, str(rank), str(world), str(os.getpid()), str(segment.descriptor)],
                        *[str(results[rank]), json.dumps(arguments)],
                    ],
                    "environment": {},
                    "threads": 1,
                    "directory": str(tmp_path),
                    "path": [str(TESTS), *sys.path],
                    "log": str(logs[rank]),
                }
                fork_server.spawn(rank, order, [held])
            codes: dict[int, int] = {}
            while len(codes) < world:
                codes.update(fork_server.ended(1.0))
                failed = [rank for rank, code in codes.items() if code]
                if failed and not page.abort:
                    page.abort = failed[0] + 1
        finally:
            os.close(held)
            os.close(lifeline)
            segment.close()
        assert set(codes.values()) == {0}, "\n".join(log.read_text() for log in logs)
        return [json.loads(result.read_text()) for result in results]

    return play
