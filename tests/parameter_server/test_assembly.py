"""Workers that look for their servers while these are lost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast

import pytest
import torch

from headrace.errors import InfeasiblePlan
from headrace.parameter_server.client.client import Client
from headrace.parameter_server.client.session import ServerConnection
from headrace.parameter_server.connecting import connect, open_client_transport, open_server_transport
from headrace.parameter_server.planning import layout_of
from headrace.parameter_server.replication.directory import ServerDirectory
from headrace.parameter_server.replication.log import LogEntry, LogPayload, encode_entry
from headrace.parameter_server.sparse.messages import encode_push
from headrace.parameter_server.wire import Kind, Message, ShardLayout, ShardSpec, encode
from headrace.spec.cluster import Cluster, Host
from headrace.spec.embedding import TableSpec
from headrace.spec.model import ModelSpec, ParameterSpec
from headrace.spec.plan import Role
from headrace.strategies.parameter_server import ParameterServer
from headrace.transport import base
from headrace.transport.base import ReceivedMessage
from parameter_server.stands import WIDTH, Stand, standing
from transport.ways import join, mail_of

NOWHERE = "local:headrace-no-port-is-here"


@dataclass
class Directory:
    """A directory of one server, at no place but where `find` says."""

    find: Callable[[int], str]
    roles: tuple[Role, ...] = (Role(1, "server", "here", "cpu", 1, -1),)
    worker: int = 0
    incarnation: int = 0
    open: None = None

    def addresses(self) -> tuple[str, ...]:
        return (NOWHERE,)

    def suspect(self, index: int) -> None: ...

    def require(self, index: int, silent_s: float) -> None: ...


def connected(
    stand: Stand, closing: ExitStack, find: Callable[[int], str], check: Callable[[], None] = lambda: None
) -> Client:
    servers = cast(ServerDirectory, Directory(find))
    return connect(servers, [stand.layout], [[torch.zeros(WIDTH)]], check, closing)


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


def test_the_run_may_be_over_meanwhile() -> None:
    def find(index: int) -> str:
        raise ConnectionError("no server is in its place")

    def check() -> None:
        raise InterruptedError("the run is over")

    with standing("local") as stand, ExitStack() as closing, pytest.raises(InterruptedError, match="the run is over"):
        connected(stand, closing, find, check)


@pytest.mark.parametrize(("together", "most"), [(True, 7_487), (False, 65_536)])
def test_more_shards_than_a_message_has_room_for_are_refused(together: bool, most: int) -> None:
    one = ShardSpec("weight", 0, (1,))
    numbers = tuple(range(most if together else 4_096))
    entry = LogEntry(ReceivedMessage(0, encode(Message(Kind.PUSH, numbers=numbers))))
    assert len(encode_entry(1, 1, entry, LogPayload.NONE)) <= base.LARGEST_MESSAGE
    connection = ServerConnection(None, ShardLayout([one] * (most + 1)), [], 5)  # type: ignore[arg-type]
    with pytest.raises(InfeasiblePlan, match=f"of rank 5 has {most + 1:,} shards, and a message has room for {most:,}"):
        Client([connection], 0, together=together)


@pytest.mark.parametrize("way", ["shared_memory", "tcp"])
def test_a_push_of_all_rows_comes_and_what_would_end_the_connection_is_not_sent(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "_LEAST_BLOB_BYTES", 0)
    monkeypatch.setattr(base, "_BLOB_FACTOR", 0)
    model = ModelSpec((ParameterSpec("weight", (4,)),), tables=(TableSpec("item", 5_000, 4), TableSpec("user", 7, 2)))
    plan = ParameterServer(workers=1, transport=way).plan(model, Cluster((Host("a", 2, 1 << 30),)))
    layout = layout_of(plan, model, plan.servers[0])
    blob = encode_push(
        model.tables, [(torch.arange(each.rows), torch.ones(each.rows, each.width)) for each in model.tables]
    )
    with ExitStack() as closing:
        port = open_server_transport(layout, way)
        closing.callback(port.close)
        link = join(port, lambda: open_client_transport(port.address, layout, layout.push_slots, 10.0))
        closing.callback(link.close)
        with pytest.raises(ValueError, match=f"a server takes at most 60,000 and {len(blob):,}"):
            link.send(b"push", blob=blob + b"1")
        with pytest.raises(ValueError, match="a message of 60,001 bytes"):
            link.send(bytes(60_001))
        link.send(b"push", blob=blob)
        (mail,) = mail_of(port, 1)
        assert (mail.message, bytes(mail.blob)) == (b"push", blob)
