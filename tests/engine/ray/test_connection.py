"""Why a process cannot connect to a Ray cluster, in one line."""

from __future__ import annotations

import socket
from contextlib import ExitStack

import pytest

from engine.ray.stand_in import Reference, StandIn
from headrace.engine.ray.connection import answers, connect
from headrace.engine.ray.engine import RayEngine
from headrace.errors import UnfitMachine, UsageError


def test_an_address_where_nothing_listens_is_named_at_once() -> None:
    pytest.importorskip("ray")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(UnfitMachine, match=rf"no Ray cluster at 127\.0\.0\.1:{port} .*refused.*ray start --head"):
            connect(f"127.0.0.1:{port}", None, ExitStack())


def test_ray_address_is_what_auto_means(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(UnfitMachine, match=r"no Ray cluster at 127\.0\.0\.1:1 "):
        connect("ray://auto", None, ExitStack())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"placement": "CLOSE"}, "placement is one of PACK, SPREAD"),
        ({"gpus_per_worker": 2}, "a part of one, gpus_per_worker is from 0 to 1, got 2"),
        ({"cpus_per_worker": 0}, "cpus_per_worker must be at least 1, got 0"),
    ],
)
def test_an_engine_refuses_what_it_cannot_do(arguments: dict[str, int | str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        RayEngine(**arguments)  # type: ignore[arg-type]


def test_another_version_of_ray_on_the_cluster_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def mismatch(*_: object, **__: object) -> None:
        # As Ray says it, in lines.
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.1.0\n    Python: 3.9.1")

    monkeypatch.setattr(ray, "init", mismatch)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UnfitMachine) as refused:
        connect("auto", None, ExitStack())
    assert "has another version of Ray or Python than this process" in str(refused.value)
    assert "The cluster was started with: Ray: 2.1.0 Python: 3.9.1; install the same on both" in str(refused.value)


def test_a_runtime_environment_that_ray_does_not_take_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("directory /nowhere must be an existing directory")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(UsageError, match=r"does not take the runtime environment .*: directory /nowhere must be"):
        connect("auto", {"working_dir": "/nowhere"}, ExitStack())
    with pytest.raises(UsageError, match=r"has no field 'pups'; it has .*env_vars, .*pip, "):
        connect("auto", {"pups": 1}, ExitStack())
    with pytest.raises(ValueError, match="an existing directory"):
        connect("auto", None, ExitStack())


def test_the_address_of_the_cluster_as_that_of_its_client_server_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def no_answer(*_: object, **__: object) -> None:
        raise ConnectionError("ray client connection timeout")

    monkeypatch.setattr(ray, "init", no_answer)
    with socket.socket() as listens:
        listens.bind(("127.0.0.1", 0))
        listens.listen()
        own = f"127.0.0.1:{listens.getsockname()[1]}"
        with pytest.raises(
            UnfitMachine, match=rf"client server, port 10001 by default; .* RAY_ADDRESS={own} with --cl"
        ):
            connect(f"ray://{own}", None, ExitStack())


def test_an_actor_that_does_not_answer_before_the_run_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    StandIn.replace(monkeypatch)
    with pytest.raises(UnfitMachine, match=r"an actor of the run has not answered: it has not answered; `ray list"):
        answers(Reference(None), 1.0)
    with pytest.raises(UnfitMachine, match=r"an actor of the run has not answered: its node is lost; `ray list"):
        answers(Reference(StandIn.fail), 1.0)
    assert answers(Reference(lambda: 5), 1.0) == 5
