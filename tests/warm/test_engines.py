"""Engines of tests begin warm; in a file of its own, of which the usual run takes the first slow test."""

from __future__ import annotations

import pytest

from headrace.engine.local.engine import LocalEngine
from headrace.engine.local.fork_server import environment_of_workers
from warm.programs import programs, real
from warm.test_programs import start


@pytest.mark.slow
def test_an_engine_is_warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is new in workers must not send each engine to a cold Python: five seconds of a core."""
    code = "import sys; sys.exit(5 if 'torch' in sys.modules else 6)"
    process = start("-P", "-c", code, env=environment_of_workers())
    process.communicate(timeout=30)
    assert process.returncode == 5
    monkeypatch.setattr("sys.executable", str(programs() / "python"))
    with LocalEngine() as engine:
        engine._fork_server.import_modules(["headrace.worker.main"])
        server = engine._fork_server._process.pid
        assert real(server) != server
