"""A server's process: what it tells its server while it serves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import headrace as hr
from headrace.shared_memory.control_page import ControlPage
from headrace.spec.cluster import Cluster, Host
from headrace.spec.model import ModelSpec, ParameterSpec
from headrace.worker import server as module
from headrace.worker.run_spec import RunSpec
from headrace.worker.server import serve


class Served:
    """A server that is asked by nobody, and that a worker is lost to meanwhile."""

    address, moved_bytes, replicated = "tcp://127.0.0.1:1", 0, None

    def __init__(self, page: ControlPage) -> None:
        self._page = page
        self.lost: list[tuple[int, int]] = []

    def serve(self, look: Callable[[], None]) -> None:
        look()
        self._page.ranks[1].restarts = 2
        for _ in range(3):
            look()

    def lose(self, worker: int, incarnation: int) -> None:
        self.lost.append((worker, incarnation))

    def memory(self) -> tuple[int, int]:
        return 32, 0

    def close(self) -> None:
        """It holds nothing."""


@pytest.mark.parametrize(("address", "lost"), [("127.0.0.1", [(1, 2)]), ("", [])], ids=["hosts", "one host"])
def test_it_is_told_once_of_a_worker_that_was_declared_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, lost: list[tuple[int, int]]
) -> None:
    plan = hr.ParameterServer(2).plan(
        ModelSpec((ParameterSpec("weight", (8,)),)), Cluster((Host("a", 2, 1 << 30, ranks=(0, 1, 2)),), ranks=3)
    )
    page = ControlPage.create(3)
    served = Served(page)
    for name in ("context_of", "_tell"):
        monkeypatch.setattr(module, name, lambda *_: None)
    monkeypatch.setattr(module, "replace", lambda *_, **__: None)
    monkeypatch.setattr(hr.ParameterServer, "server", lambda *_: served)
    run: Any = SimpleNamespace(
        strategy=hr.ParameterServer(2),
        plan=plan,
        run_dir=tmp_path,
        started=0.0,
        timeout_s=60.0,
        resume=None,
        caller=None,
    )
    run.snapshots_every_s = None
    serve(cast("RunSpec", run), 2, page, lambda: None, address)
    assert served.lost == lost
