"""No byte that comes from a socket, from shared memory or from a checkpoint is run: Python's audit hooks see."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from warm.programs import PYTHON

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent.parent / "src"

SHIPPING = "headrace/engine/shipping.py:unpack"
"""The job, from its launcher through an inherited pipe: the one thing that is unpickled."""

SHIPPED = {"pickle.find_class", "code.__new__", "function.__new__"}
TRACED = {"compile", "code.__new__"}
ZMQ = "'zmq/backend/cython/_zmq.py'"
"""With Python 3.12 pyzmq makes code objects of its own names, for the tracebacks of its errors, such as EAGAIN."""
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


Events = list[dict[str, Any]]


@pytest.fixture(scope="module", params=[pytest.param("shared_memory", marks=pytest.mark.full), "tcp"])
def watched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Events, Events]:
    """What ran code in any process of two runs over this way, and of a third one that was made to run bytes."""
    folder = tmp_path_factory.mktemp("audited")
    log = folder / "audit"
    log.mkdir()
    path = os.pathsep.join(map(str, [HERE / "audited", SOURCE, HERE.parent]))
    # Not a warm program: what a process imports and runs from its beginning on is watched.
    command = [PYTHON, str(HERE / "audited_script.py"), request.param, str(folder)]
    environment = {**os.environ, "PYTHONPATH": path, "HEADRACE_AUDIT": str(log)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    (line,) = (line for line in ended.stdout.splitlines() if line.startswith("{"))
    sizes: dict[str, int] = json.loads(line)
    # All of them were watched: launcher, fork server, workers and servers of both runs.
    assert len(sizes) >= 5
    sound, planted = Events(), Events()
    for file in log.iterdir():
        content, size = file.read_bytes(), sizes.get(file.name, 0)
        for part, events in ((content[:size], sound), (content[size:], planted)):
            events += map(json.loads, part.splitlines())
    return sound, planted


def allowed(event: dict[str, Any]) -> bool:
    frames = event["frames"] or [""]
    if event["event"] in TRACED and ZMQ in event["about"]:
        return True
    if event["event"] in SHIPPED and any(frame.endswith(SHIPPING) for frame in frames):
        return True
    here = [place for kind, place in ALLOWED if kind == event["event"]]
    return any(frames[0].endswith(place) if place else not frames[0] for place in here)


@pytest.mark.full
@pytest.mark.slow
def test_nothing_that_came_as_bytes_is_run(watched: tuple[Events, Events]) -> None:
    sound, _ = watched
    assert [event for event in sound if not allowed(event)] == []
    assert {event["event"] for event in sound} >= {"pickle.find_class"}


@pytest.mark.slow
def test_what_would_be_run_is_noticed(watched: tuple[Events, Events]) -> None:
    _, planted = watched
    assert {event["event"] for event in planted if not allowed(event)} == {"pickle.find_class", "exec", "compile"}
