"""While a backup is filled: no push is handled that it does not hold, and clients wait for it, but not for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from headrace.errors import PeerLost
from headrace.parameter_server.client import client
from headrace.parameter_server.client.client import Client
from headrace.parameter_server.client.session import ServerConnection
from headrace.parameter_server.replication import feed
from headrace.parameter_server.replication.machine import View
from headrace.parameter_server.replication.transport import ReplicatedTransport
from headrace.parameter_server.server.server import Server
from headrace.parameter_server.wire import Kind, Message, decode, encode
from headrace.shared_memory.segment import SharedSegment
from headrace.transport.base import Slots
from parameter_server.pairs import Group, Scribe, digest, until
from parameter_server.twins import Recipe
from transport.ways import DEADLINE_S, filled, next_of, open_link

SLOTS = Slots([40, 1_000])
PATIENCE_S = 0.4
LONG_S = 4 * PATIENCE_S
"""Longer than a client waits for an answer, and then for another connection."""


class Hold:
    """Lets a state be "copied" or "loaded" only when it may: `begun` when it is about to."""

    def __init__(self, what: str = "loaded") -> None:
        self.what = what
        self.begun, self.may = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.may.wait(DEADLINE_S)


class Held:
    """A server that copies its state, or loads what it is filled with, when it may."""

    def __init__(self, server: Server, hold: Hold) -> None:
        self.turn = server.turn
        self._server, self._hold = server, hold

    def share(self) -> SharedSegment:
        if self._hold.what == "copied":
            self._hold()
        return self._server.share()

    def restore(self, snapshot: memoryview) -> None:
        if self._hold.what == "loaded":
            self._hold()
        self._server.restore(snapshot)


@pytest.fixture
def hold(request: pytest.FixtureRequest) -> Iterator[Hold]:
    hold = Hold(getattr(request, "param", "loaded"))
    yield hold
    hold.may.set()


def begin_to_fill(group: Group, hold: Hold) -> ReplicatedTransport:
    """Gives a group of one its backup, and waits until that has got the state, and not loaded it."""
    group.spawn()
    group.view = View(2, 0, 1)
    until(hold.begun.is_set, "the state has come to the backup")
    return group.runners[0].replicated


def push(link: Any, seed: int) -> None:
    for slot, length in enumerate(SLOTS.lengths):
        link.push_slot(slot).copy_(filled(length, seed + slot))
    link.send(encode(Message(Kind.PUSH, 0, 1, seed, 1.0, 1.0, (0, 0))), (0, 1))


def test_pushes_wait_while_a_backup_is_filled_and_then_nothing_is_to_be_caught_up_with(way: str, hold: Hold) -> None:
    with Group(way, (SLOTS, SLOTS, None), lambda replicated: Scribe(replicated.transport, hold)).running() as group:
        group.spawn()
        group.see(1, 0)
        link = open_link(way, group.runners[0].address, SLOTS, SLOTS)
        push(link, 1)
        assert next_of(link)[0] == b"1"
        replicated = begin_to_fill(group, hold)
        push(link, 2)
        assert link.receive(0.3) is None
        assert (len(group.runners[0].server.book), replicated.ready) == (1, 0)
        hold.may.set()
        assert next_of(link)[0] == b"2"
        assert replicated.ready == 2
        until(lambda: group.runners[0].server.book == group.runners[1].server.book, "the backup has got both")
        link.close()


def test_pushes_go_on_when_a_backup_is_lost_while_it_is_filled(way: str, hold: Hold) -> None:
    with Group(way, (SLOTS, SLOTS, None), lambda replicated: Scribe(replicated.transport, hold)).running() as group:
        group.spawn()
        group.see(1, 0)
        link = open_link(way, group.runners[0].address, SLOTS, SLOTS)
        begin_to_fill(group, hold)
        push(link, 1)
        assert link.receive(0.1) is None
        group.see(3, 0)
        assert next_of(link)[0] == b"1"
        hold.may.set()
        link.close()


def test_a_client_that_ends_while_the_state_is_copied_has_pushed(way: str, hold: Hold) -> None:
    def scribe(replicated: ReplicatedTransport) -> Scribe:
        return Scribe(replicated.transport, copies=hold)

    with Group(way, (SLOTS, SLOTS, None), scribe).running() as group:
        group.spawn()
        group.see(1, 0)
        link = open_link(way, group.runners[0].address, SLOTS, SLOTS)
        push(link, 1)
        assert next_of(link)[0] == b"1"
        replicated = begin_to_fill(group, hold)
        push(link, 2)
        link.close()
        for _ in range(2):
            # The server answers after it has read what came before, and knows the end of that connection.
            open_link(way, group.runners[0].address, SLOTS, SLOTS).close()
        hold.may.set()
        until(lambda: replicated.ready == 2, "the backup has the state")
        until(lambda: all(len(each.server.book) >= 3 for each in group.runners), "both have the push and the end")
        sent = [digest(filled(length, 2 + slot).numpy()) for slot, length in enumerate(SLOTS.lengths)]
        assert [runner.server.book[1][3] for runner in group.runners] == [sent, sent]


@pytest.mark.parametrize("hold", ["copied"], indirect=True)
def test_what_a_client_asks_again_and_again_while_the_state_is_copied_is_not_kept(way: str, hold: Hold) -> None:
    with Group(
        way, (SLOTS, SLOTS, None), lambda replicated: Scribe(replicated.transport, copies=hold)
    ).running() as group:
        group.spawn()
        group.see(1, 0)
        link = open_link(way, group.runners[0].address, SLOTS, SLOTS)
        replicated = begin_to_fill(group, hold)
        for _ in range(20):
            link.send(encode(Message(Kind.ALIVE, number=7)))
            assert decode(next_of(link)[0]).kind == Kind.OPEN
        assert len(replicated._inbox) <= 1, "that the backup has come"
        hold.may.set()
        until(lambda: replicated.ready == 2, "the backup has the state")
        link.close()


class Trainer:
    """One client of a group's primary, of little patience; `links` counts its connections."""

    def __init__(self, way: str, recipe: Recipe, group: Group, number: int) -> None:
        self.links = 0
        self.layout = recipe.layout()
        self.places = [torch.zeros(piece.shape, dtype=getattr(torch, piece.dtype)) for piece in self.layout.pieces]

        def link() -> Any:
            self.links += 1
            address = group.runners[0].address
            return open_link(way, address, self.layout.slots, self.layout.push_slots, self.layout.reply_slots)

        connection = ServerConnection(
            link(), self.layout, self.places, reopen=link, patience_s=PATIENCE_S, probe_s=PATIENCE_S / 4
        )
        self.client = Client([connection], number)

    def push(self) -> None:
        self.client.servers[0].tell(Message(Kind.ASK, lease=-1))
        self.client.push([[torch.ones_like(place) for place in self.places]], self.client.lease().lease, pull=True)


@pytest.fixture
def group(way: str, hold: Hold) -> Iterator[Group]:
    recipe = Recipe()
    with Group(way, recipe.slots, lambda replicated: Held(recipe.server(replicated), hold)).running() as group:
        group.spawn()
        group.see(1, 0)
        yield group
        hold.may.set()


either = pytest.mark.parametrize("hold", ["copied", "loaded"], indirect=True)
"""What takes long."""


@either
@pytest.mark.slow
def test_clients_outlast_a_backup_that_is_filled_for_longer_than_they_wait_for_a_server(
    way: str, group: Group, hold: Hold
) -> None:
    make = partial(Trainer, way, Recipe(), group)
    trainer = make(0)
    trainer.push()
    replicated = begin_to_fill(group, hold)
    timer = threading.Timer(LONG_S, hold.may.set)
    timer.start()
    trainer.push()
    assert (trainer.links, replicated.ready) == (1, 2)
    timer.join()
    trainer.client.close()


@either
@pytest.mark.slow
def test_a_question_waits_for_a_backup_for_longer_than_a_server_may_take_to_answer(
    way: str, group: Group, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_ANSWER_S", 2 * PATIENCE_S)
    trainer = Trainer(way, Recipe(), group, 0)
    begin_to_fill(group, hold)
    timer = threading.Timer(LONG_S, hold.may.set)
    timer.start()
    assert trainer.client.ask(0, Message(Kind.STATE))
    assert (trainer.links, hold.may.is_set()) == (1, True)
    timer.join()
    trainer.client.close()


@either
@pytest.mark.slow
def test_a_client_that_comes_while_a_backup_is_filled_waits_too(way: str, group: Group, hold: Hold) -> None:
    begin_to_fill(group, hold)
    # It answers, though it has no time for what is asked.
    open_link(way, group.runners[0].address, *Recipe().slots).close()
    assert not hold.may.is_set()
    timer = threading.Timer(LONG_S, hold.may.set)
    timer.start()
    trainer = Trainer(way, Recipe(), group, 0)
    assert (trainer.links, hold.may.is_set()) == (1, True)
    timer.join()
    trainer.push()
    trainer.client.close()


@pytest.mark.slow
def test_clients_do_not_wait_for_ever_for_a_backup(
    way: str, group: Group, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "_SILENT_S", 2 * PATIENCE_S)
    trainer = Trainer(way, Recipe(), group, 0)
    begin_to_fill(group, hold)
    with pytest.raises(PeerLost, match=rf"no other could be opened for {PATIENCE_S:g} s"):
        trainer.push()


@pytest.mark.slow
def test_clients_outlast_a_backup_that_has_stopped(
    way: str, group: Group, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold.may.set()
    group.spawn()
    group.see(2, 0, 1)
    trainer = Trainer(way, Recipe(), group, 0)
    trainer.push()
    stops, backup = Hold(), group.runners[1].server
    turn = backup.turn
    monkeypatch.setattr(backup, "turn", lambda timeout_s: (stops(), turn(timeout_s)))
    until(stops.begun.is_set, "the backup has stopped")
    timer = threading.Timer(LONG_S, stops.may.set)
    timer.start()
    trainer.push()
    assert (trainer.links, stops.may.is_set()) == (1, True)
    timer.join()
    trainer.client.close()
