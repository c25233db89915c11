"""What comes to a primary comes to its backup, in the same order, whichever way; and nothing is answered before."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress

import pytest

from headrace.parameter_server.replication.machine import View
from headrace.parameter_server.wire import Kind, Message, encode
from headrace.transport.base import LARGEST_MESSAGE, ClientTransport, Slots
from parameter_server.pairs import Group, Scribe, digest, until
from transport.ways import DEADLINE_S, filled, next_of, open_link

SLOTS = Slots([40, 1_000, 0, 3_000_001])
SMALL, LARGE = (0, 1), (1, 2, 3)


@pytest.fixture
def group(way: str) -> Iterator[Group]:
    with Group(way, (SLOTS, SLOTS, None), lambda replicated: Scribe(replicated.transport)).running() as group:
        yield group


def push(link: ClientTransport, slots: tuple[int, ...], seed: int) -> None:
    for slot in slots:
        link.push_slot(slot).copy_(filled(SLOTS.lengths[slot], seed + slot))
    numbers = tuple(0 if slot in slots else ~0 for slot in range(len(SLOTS)))
    link.send(encode(Message(Kind.PUSH, 0, 1, seed, 1.0, 1.0, numbers)), slots)


def answered(link: ClientTransport) -> int:
    message, _ = next_of(link)
    return int(message)


def book_of(group: Group, number: int) -> list[tuple[int, str, str, list[str]]]:
    return list(group.runners[number].server.book)


def opened(way: str, group: Group, number: int) -> ClientTransport:
    return open_link(way, group.runners[number].address, SLOTS, SLOTS)


def test_the_backup_has_all_before_it_is_answered(way: str, group: Group) -> None:
    group.spawn()
    group.spawn()
    group.see(1, 0, 1)
    links = [opened(way, group, 0) for _ in range(2)]
    chance = random.Random(0)
    for seed in range(40):
        link = chance.choice(links)
        if chance.random() < 0.3:
            link.send(encode(Message(Kind.LOAD)), blob=filled(chance.choice((1, 70_000)), seed).numpy().tobytes())
        else:
            push(link, chance.choice((SMALL, LARGE)), seed)
        count = answered(link)
        assert count == seed + 1
    until(lambda: book_of(group, 0) == book_of(group, 1), "the backup deals with all that it holds")
    expected = digest(filled(40, 7).numpy())
    push(links[0], SMALL, 7)
    answered(links[0])
    until(lambda: book_of(group, 1)[-1][3][0:1] == [expected], "the gradient as it was pushed")
    for link in links:
        link.close()
    # Ends are told twice: at once, and when no worker has come again.
    until(lambda: len(book_of(group, 0)) == len(book_of(group, 1)) == 45, "ends are written down")
    assert book_of(group, 0) == book_of(group, 1)
    assert [entry[1] for entry in book_of(group, 1)[-4:]] == [""] * 4


def test_the_backup_lets_go_of_the_memory_of_clients_that_are_gone() -> None:
    with Group("local", (SLOTS, SLOTS, None), lambda replicated: Scribe(replicated.transport)).running() as group:
        group.spawn()
        group.spawn()
        group.see(1, 0, 1)
        primary, places = group.runners[0].replicated, group.runners[1].replicated._backup_link._places
        links = [opened("local", group, 0) for _ in range(3)]
        for seed, link in enumerate(links):
            push(link, LARGE, seed)
            answered(link)
        assert len(places) == 3
        # One ends; one is ended by the server, so that its end is not in the log, where its last push may be.
        links[0].close()
        links[1].send(encode(Message(Kind.LOST)))
        with suppress(ConnectionError):
            push(links[1], SMALL, 5)
        until(lambda: len(places) == 1, "the memory of two is let go")
        links[1].close()
        push(links[2], SMALL, 6)
        answered(links[2])
        until(lambda: book_of(group, 0) == book_of(group, 1), "the backup deals with all that it holds")
        assert len(primary._feed._shared) == 1
        links[2].close()
        until(lambda: not places and not primary._feed._shared, "the memory of the last is let go")


def test_a_backup_is_filled_while_pushes_go_on(way: str, group: Group) -> None:
    group.spawn()
    group.see(1, 0)
    link = opened(way, group, 0)
    for seed in range(3):
        push(link, LARGE, seed)
        answered(link)
    group.spawn()
    group.view = View(2, 0, 1)
    replicated = group.runners[0].replicated
    for seed in range(3, 10_000):
        push(link, LARGE, seed)
        answered(link)
        if replicated.ready == 2:
            break
    push(link, LARGE, 3)
    answered(link)
    assert replicated.ready == 2
    until(lambda: book_of(group, 0) == book_of(group, 1), "the backup has caught up")
    link.close()


def test_the_promoted_one_goes_on_and_fills_another(way: str, group: Group) -> None:
    for _ in range(3):
        group.spawn()
    group.see(1, 0, 1)
    gone, link = opened(way, group, 0), opened(way, group, 0)
    for seed in range(5):
        push(link, SMALL, seed)
        push(gone, LARGE, seed)
        answered(link)
        answered(gone)
    group.runners[0].end()
    before = book_of(group, 0)
    until(lambda: group.runners[1].replicated.severed, "the end of the link is noticed")
    until(lambda: book_of(group, 1) == before, "whatever was answered is held")
    group.see(2, 1, 2)
    with pytest.raises(ConnectionError):
        link.receive(DEADLINE_S)
    again = opened(way, group, 1)
    push(again, LARGE, 9)
    # The ends of both links are told to the new ones, and written down: at least once by now.
    assert answered(again) >= 13
    until(lambda: len(book_of(group, 2)) == len(book_of(group, 1)) == 15, "ends are told twice")
    assert book_of(group, 1) == book_of(group, 2)
    assert book_of(group, 1)[:10] == before
    assert {entry[0] for entry in before} == {0, 1}
    assert [entry[0] for entry in book_of(group, 2) if entry[3]][-1] == 2, "no number of a link is used twice"
    for each in (link, gone, again):
        each.close()


def test_without_its_backup_a_primary_waits_until_it_is_told(way: str, group: Group) -> None:
    group.spawn()
    group.spawn()
    group.see(1, 0, 1)
    link = opened(way, group, 0)
    push(link, SMALL, 0)
    answered(link)
    group.runners[1].end()
    until(lambda: group.runners[0].replicated.severed, "the end of the link is noticed")
    push(link, SMALL, 1)
    assert link.receive(0.3) is None
    group.see(2, 0)
    assert answered(link) == 2
    link.close()


def test_a_replaced_server_does_not_answer(way: str, group: Group) -> None:
    group.spawn()
    group.spawn()
    group.see(1, 0, 1)
    link = opened(way, group, 0)
    push(link, SMALL, 0)
    answered(link)
    old, group.runners[0]._group = group.runners[0], Group(way, (SLOTS, SLOTS, None), lambda _: None)
    group.see(2, 1)
    # It has not heard of that, and lives on.
    push(link, SMALL, 1)
    assert link.receive(0.3) is None
    assert len(old.server.book) == 1
    old._group = group
    with pytest.raises(ConnectionError):
        link.receive(DEADLINE_S)
    link.close()


def test_a_message_that_is_too_long_to_be_written_down_harms_its_sender_alone(way: str, group: Group) -> None:
    group.spawn()
    group.spawn()
    group.see(1, 0, 1)
    link = opened(way, group, 0)
    link.send(bytes([2, Kind.STATE]) + bytes(LARGEST_MESSAGE - 10))
    answered(link)
    push(link, SMALL, 0)
    answered(link)
    until(lambda: book_of(group, 0) == book_of(group, 1), "the backup has got the same")
    link.close()


def test_a_false_backup_hears_nothing(way: str, group: Group) -> None:
    group.spawn()
    group.spawn()
    group.see(1, 0, 1)
    strangers = [opened(way, group, 0) for _ in range(3)]
    strangers[0].send(encode(Message(Kind.FOLLOW, numbers=(1, 7))))
    strangers[0].send(encode(Message(Kind.HELD, numbers=(1, 999))))
    strangers[1].send(encode(Message(Kind.FOLLOW, numbers=(0, 1))))
    strangers[2].send(encode(Message(Kind.FOLLOW, numbers=(1,))))
    for stranger in strangers[1:]:
        with pytest.raises(ConnectionError):
            stranger.receive(DEADLINE_S)
    link = opened(way, group, 0)
    push(link, SMALL, 0)
    assert answered(link) == 1
    assert strangers[0].receive(0.1) is None
    until(lambda: book_of(group, 0) == book_of(group, 1), "the backup has got the same")
    for each in (*strangers, link):
        each.close()


def test_a_primary_does_not_wait_for_a_backup_whose_connection_has_ended(way: str, group: Group) -> None:
    group.spawn()
    group.see(1, 0)
    early, link = (opened(way, group, 0) for _ in range(2))
    early.send(encode(Message(Kind.FOLLOW, numbers=(2, 1))))
    replicated = group.runners[0].replicated
    until(lambda: replicated._feed.callers, "the call has arrived")
    early.close()
    until(lambda: not replicated._feed.callers, "its end is noticed")
    push(link, SMALL, 0)
    answered(link)
    group.view = View(2, 0, 1)
    until(lambda: replicated._machine.epoch == 2, "the view is taken")
    push(link, SMALL, 1)
    assert answered(link) == 2
    link.close()


def test_a_backup_calls_once(way: str, group: Group) -> None:
    group.spawn()
    group.see(1, 0)
    stranger = opened(way, group, 0)
    for process in (7, 8):
        stranger.send(encode(Message(Kind.FOLLOW, numbers=(5, process))))
    with pytest.raises(ConnectionError):
        stranger.receive(DEADLINE_S)
    assert not group.runners[0].replicated._machine._callers
    stranger.close()
