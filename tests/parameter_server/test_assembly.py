"""Workers that look for their servers while these are lost."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch

from headrace.parameter_server.client.client import Client
from headrace.parameter_server.connecting import connect
from headrace.spec.plan import Role
from parameter_server.stands import WIDTH, Stand, standing

NOWHERE = "local:headrace-no-port-is-here"


def connected(stand: Stand, closing: ExitStack, **others: object) -> Client:
    role = Role(1, "server", "here", "cpu", 1, -1)
    places = [[torch.zeros(WIDTH)]]
    return connect([NOWHERE], [stand.layout], places, (0, 0), lambda: None, [role], closing, **others)  # type: ignore[arg-type]


def test_a_server_that_has_died_before_a_worker_began_is_found_in_its_place() -> None:
    asked: list[int] = []

    def find(index: int) -> str:
        asked.append(index)
        if len(asked) < 3:
            raise ConnectionError("no server is in its place yet")
        return stand.port.address

    with standing("local") as stand, ExitStack() as closing:
        client = connected(stand, closing, find=find)
        client.pull()
    assert asked == [0, 0, 0]


def test_where_no_server_can_say_more_the_first_error_is_the_answer() -> None:
    with standing("local") as stand, ExitStack() as closing, pytest.raises(ConnectionError, match="no link to the"):
        connected(stand, closing)


def test_the_run_may_be_over_meanwhile() -> None:
    def find(index: int) -> str:
        raise ConnectionError("no server is in its place")

    def check() -> None:
        raise InterruptedError("the run is over")

    role = Role(1, "server", "here", "cpu", 1, -1)
    with standing("local") as stand, ExitStack() as closing, pytest.raises(InterruptedError, match="the run is over"):
        connect([NOWHERE], [stand.layout], [[torch.zeros(WIDTH)]], (0, 0), check, [role], closing, find=find)
