"""No byte that comes from a socket, from shared memory or from a checkpoint is run: Python's audit hooks see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent.parent / "src"

SHIPPING = "headrace/engine/shipping.py:unpack"
"""The job, from its launcher through an inherited pipe: the one thing that is unpickled."""

SHIPPED = {"pickle.find_class", "code.__new__", "function.__new__"}
ALLOWED = {
    # Annotations are text in the source, and typing makes types of them.
    ("compile", "/typing.py:__init__"),
    ("exec", "/typing.py:_evaluate"),
    # How a process begins: python -m headrace.engine.local.fork_server_main, and the script itself.
    ("exec", "<frozen runpy>:_run_code"),
    ("compile", ""),
    ("exec", ""),
}
"""What runs code, and where."""


def watched(way: str, tmp_path: Path) -> list[dict[str, Any]]:
    """Returns what ran code in any process of two runs."""
    log = tmp_path / "audit"
    log.mkdir()
    path = os.pathsep.join(map(str, [HERE / "audited", SOURCE, HERE.parent]))
    command = [sys.executable, str(HERE / "audited_script.py"), way, str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": path, "HEADRACE_AUDIT": str(log)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    events = [json.loads(line) for file in log.iterdir() for line in file.read_text().splitlines()]
    # All of them were watched: launcher, fork server and workers of both runs.
    assert len(list(log.iterdir())) >= 5
    return events


def allowed(event: dict[str, Any]) -> bool:
    frames = event["frames"] or [""]
    if event["event"] in SHIPPED and any(frame.endswith(SHIPPING) for frame in frames):
        return True
    here = [place for kind, place in ALLOWED if kind == event["event"]]
    return any(frames[0].endswith(place) if place else not frames[0] for place in here)


@pytest.mark.usefixtures("real_python")
@pytest.mark.slow
@pytest.mark.parametrize("way", [pytest.param("shared_memory", marks=pytest.mark.full), "tcp"])
def test_nothing_that_came_as_bytes_is_run(way: str, tmp_path: Path) -> None:
    events = watched(way, tmp_path)
    assert [event for event in events if not allowed(event)] == []
    assert {event["event"] for event in events} >= {"pickle.find_class"}


@pytest.mark.usefixtures("real_python")
@pytest.mark.slow
def test_what_would_be_run_is_noticed(tmp_path: Path) -> None:
    strange = [event["event"] for event in watched("planted", tmp_path) if not allowed(event)]
    assert set(strange) == {"pickle.find_class", "exec", "compile"}
