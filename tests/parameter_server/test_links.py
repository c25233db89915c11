"""A host that does not answer is told from one whose process computes for long, and from a process that is lost."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from engine.conftest import until
from headrace.parameter_server.replication.links import LinkProbe
from headrace.shared_memory.control_page import ControlPage
from headrace.shared_memory.segment import SharedSegment

pytestmark = pytest.mark.slow


@pytest.fixture
def page() -> Iterator[ControlPage]:
    segment = SharedSegment.create(ControlPage.nbytes(2), "control")
    yield ControlPage(segment, 2)
    segment.close()


def looks(probe: LinkProbe, page: ControlPage, address: str, *, beats: bool = True) -> Callable[[], bool]:
    def look() -> bool:
        page.ranks[1].heartbeat.count += beats
        return probe.is_cut(1, address, 60.0)

    return look


def test_a_host_that_drops_packets_is_cut_while_the_heartbeat_goes_on(page: ControlPage) -> None:
    with ExitStack() as closing:
        # Its queue is full, so that the system drops what wants to connect.
        deaf = closing.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        place = deaf.getsockname()
        closing.enter_context(socket.create_connection(place))
        address = f"tcp://127.0.0.1:{place[1]}#00"
        probe = LinkProbe(page, 2.0)
        assert not probe.is_cut(1, address, 0.1), "nothing has been silent for long"
        lost = LinkProbe(page, 2.0)
        assert not until(looks(lost, page, address, beats=False), 2.0), "a lost process is no broken link"
        assert until(looks(probe, page, address), 10.0)
        probe.close()
        lost.close()


def test_hosts_that_answer_are_not_cut(page: ControlPage) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        for address in (f"tcp://127.0.0.1:{port}", "local:somewhere"):
            assert not until(looks(LinkProbe(page, 2.0), page, address), 0.2)
    # Now it refuses.
    assert not until(looks(LinkProbe(page, 2.0), page, f"tcp://127.0.0.1:{port}"), 0.2)
