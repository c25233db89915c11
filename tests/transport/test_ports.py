"""What holds for every transport between workers and servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import monotonic

import pytest
import torch

from belongings import belongings, left_since
from engine.conftest import until
from headrace.transport.base import ClientTransport, ReceivedMessage, ServerTransport, Slots
from transport.ways import DEADLINE_S, PORTS, filled, join, mail_of, next_of, open_link, open_port

HERE = Path(__file__).resolve().parent
LENGTHS = (4, 0, 1, 100_000, (1 << 20) + 7, 2 << 20, 64)
SMALL = Slots([8])


@pytest.fixture(params=PORTS)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


class Pair:
    """A port, and links to it."""

    def __init__(self, way: str, *slots: Slots | None) -> None:
        self.way = way
        self.slots = slots
        self.port = open_port(way, *slots)
        self.links: list[ClientTransport] = []

    def link(self) -> ClientTransport:
        link = join(self.port, lambda: open_link(self.way, self.port.address, *self.slots))
        self.links.append(link)
        return link

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.port.close()


@pytest.fixture
def small(way: str) -> Iterator[Pair]:
    pair = Pair(way, SMALL, SMALL)
    yield pair
    pair.close()


def serve(port: ServerTransport, mail: ReceivedMessage) -> None:
    """Makes what a link has pushed the parameters, and sends them all."""
    every = range(len(LENGTHS))
    with port.writing(every):
        for slot in every:
            port.parameters(slot).copy_(port.pushed(mail.peer, slot))
            port.set_version(slot, 7 + slot)
    port.send(mail.peer, b"done", every)


def test_messages_keep_their_order_both_ways(small: Pair) -> None:
    link = small.link()
    for number in range(50):
        link.send(b"%d" % number, blob=b"b" * number if number % 10 == 0 else b"")
    mail = mail_of(small.port, 50)
    assert [each.message for each in mail] == [b"%d" % number for number in range(50)]
    assert [len(each.blob) for each in mail] == [number if number % 10 == 0 else 0 for number in range(50)]
    assert len({each.peer for each in mail}) == 1
    for number in range(50):
        small.port.send(mail[0].peer, b"%d" % number, blob=b"b" * number if number % 10 == 0 else b"")
    answers = join(small.port, lambda: [next_of(link) for _ in range(50)])
    assert [message for message, _ in answers] == [b"%d" % number for number in range(50)]
    assert [len(blob) for _, blob in answers] == [number if number % 10 == 0 else 0 for number in range(50)]


def test_a_link_may_send_much_before_it_reads(small: Pair) -> None:
    """As a client does that pushes a model in many pieces."""
    link = small.link()
    stop = threading.Event()

    def answer() -> None:
        while not stop.is_set():
            for mail in small.port.receive(0.01):
                small.port.send(mail.peer, mail.message)

    answering = threading.Thread(target=answer)
    answering.start()
    numbers = [b"%d" % number for number in range(2_000)]
    for number in numbers:
        link.send(number)
    assert [next_of(link)[0] for _ in numbers] == numbers
    stop.set()
    answering.join()


@pytest.mark.slow
def test_every_slot_goes_both_ways_whatever_its_length(way: str) -> None:
    pair = Pair(way, Slots(LENGTHS), Slots(LENGTHS))
    link = pair.link()
    sent = [filled(length, slot) for slot, length in enumerate(LENGTHS)]
    for turn in range(2):
        for slot, content in enumerate(sent):
            link.push_slot(slot).copy_(content + turn)
        answered = threading.Thread(target=lambda: serve(pair.port, mail_of(pair.port, 1)[0]))
        answered.start()
        link.send(b"push", range(len(LENGTHS)))
        # The answer may be longer than what the network takes at once.
        answered.join()
        reading = join(pair.port, lambda: next_of(link))
        assert reading[0] == b"done"
        for slot, content in enumerate(sent):
            place = torch.zeros_like(content)
            assert link.fetch(slot, place) == 7 + slot
            assert torch.equal(place, content + turn)
    assert link.moved_bytes == 4 * sum(LENGTHS)
    pair.close()


def test_blobs_may_be_large(small: Pair) -> None:
    link = small.link()
    content = filled((5 << 20) + 3, 0).numpy().tobytes()
    sending = threading.Thread(target=lambda: link.send(b"there", blob=content))
    sending.start()
    (mail,) = mail_of(small.port, 1)
    sending.join()
    assert bytes(mail.blob) == content
    small.port.send(mail.peer, b"back", blob=content)
    message, blob = join(small.port, lambda: next_of(link))
    assert (message, bytes(blob)) == (b"back", content)


def test_links_do_not_see_each_other(small: Pair) -> None:
    links = [small.link() for _ in range(3)]
    for number, link in enumerate(links):
        link.push_slot(0).fill_(number)
        link.send(b"%d" % number, [0])
    mail = mail_of(small.port, 3)
    assert len({each.peer for each in mail}) == 3
    for each in mail:
        assert small.port.pushed(each.peer, 0).tolist() == [int(each.message)] * 8
        small.port.release(each.peer, [0])
        small.port.send(each.peer, b"to " + each.message)
    for number, link in enumerate(links):
        assert next_of(link)[0] == b"to %d" % number
        assert link.receive(0.01) is None
    assert small.port.receive(0) == []


def test_replies_have_a_form_of_their_own(way: str) -> None:
    pair = Pair(way, Slots([8, 800]), Slots([4, 5]), Slots([2, 3]))
    link = pair.link()
    for value in (1, 2):
        link.send(b"pull")
        (mail,) = mail_of(pair.port, 1)
        for slot in (0, 1):
            pair.port.reply_slot(mail.peer, slot).fill_(10 * value + slot)
        pair.port.send(mail.peer, b"pulled", [0, 1])
        next_of(link)
        assert [link.reply_slot(slot).tolist() for slot in (0, 1)] == [[10 * value] * 2, [10 * value + 1] * 3]
    pair.close()


@pytest.mark.slow
def test_no_read_is_torn(way: str) -> None:
    lengths = (8 * 1_000, 8 * 200_000)
    pair = Pair(way, Slots(lengths), Slots([8, 8]))
    links = [pair.link() for _ in range(2)]
    stop = threading.Event()
    errors: list[BaseException] = []

    def write() -> None:
        """A server that never rests: every element of a shard is the shard's version."""
        version = 0
        while not stop.is_set():
            version += 1
            with pair.port.writing([0, 1]):
                for slot in (0, 1):
                    pair.port.parameters(slot).view(torch.int64).fill_(version)
                    pair.port.set_version(slot, version)
            for mail in pair.port.receive(0):
                if mail.message:
                    pair.port.send(mail.peer, b"all", [0, 1])

    def read(link: ClientTransport) -> None:
        try:
            seen = [0, 0]
            for _ in range(10):
                link.send(b"pull")
                next_of(link)
                for slot, length in enumerate(lengths):
                    place = torch.empty(length, dtype=torch.uint8)
                    version = link.fetch(slot, place)
                    values = place.view(torch.int64)
                    assert values.min() == values.max() == version >= seen[slot]
                    seen[slot] = version
        except BaseException as error:
            errors.append(error)

    writer = threading.Thread(target=write)
    readers = [threading.Thread(target=read, args=(link,)) for link in links]
    for thread in (writer, *readers):
        thread.start()
    for thread in readers:
        thread.join()
    stop.set()
    writer.join()
    pair.close()
    assert errors == []


def test_what_a_link_said_before_it_went_comes_first(small: Pair) -> None:
    other = small.link()
    link = small.link()
    link.push_slot(0).fill_(5)
    link.send(b"push", [0])
    link.send(b"leave")
    link.close()
    mail: list[ReceivedMessage] = []
    deadline = monotonic() + DEADLINE_S
    while len(mail) < 3:
        assert monotonic() < deadline
        mail += small.port.receive(0.1)
        # A server may deal with it only now.
        assert small.port.pushed(mail[0].peer, 0).tolist() == [5] * 8 if mail else True
    assert [each.message for each in mail] == [b"push", b"leave", b""]
    assert len({each.peer for each in mail}) == 1
    small.port.send(mail[0].peer, b"too late")
    small.port.drop(mail[0].peer)
    other.send(b"here")
    assert [each.message for each in mail_of(small.port, 1)] == [b"here"]


def test_a_dropped_link_gets_the_last_words_and_is_not_heard_again(small: Pair) -> None:
    link, other = small.link(), small.link()
    link.send(b"wrong")
    (mail,) = mail_of(small.port, 1)
    small.port.send(mail.peer, b"why", blob=b"words")
    small.port.drop(mail.peer)
    small.port.drop(mail.peer)
    message, blob = next_of(link)
    assert (message, bytes(blob)) == (b"why", b"words")
    with pytest.raises(ConnectionError):
        next_of(link)
    link.close()
    other.send(b"here")
    assert [each.message for each in mail_of(small.port, 1)] == [b"here"]
    assert small.port.receive(0.05) == []


def test_what_a_port_said_before_it_closed_is_read_first(small: Pair) -> None:
    link = small.link()
    link.send(b"end")
    (mail,) = mail_of(small.port, 1)
    small.port.send(mail.peer, b"done")
    small.port.close()
    assert next_of(link)[0] == b"done"
    with pytest.raises(ConnectionError):
        next_of(link)
    with pytest.raises(ConnectionError):
        link.send(b"still there?")


def test_a_wait_ends(small: Pair) -> None:
    link = small.link()
    began = monotonic()
    assert link.receive(0.02) is None
    assert small.port.receive(0.02) == []
    assert monotonic() - began >= 0.04


@pytest.mark.parametrize("slots", [([8, 8],), ([9],), ([8], [4]), ([8], [8], [8])])
def test_another_layout_is_refused_with_words(small: Pair, slots: tuple[list[int], ...]) -> None:
    other = [Slots(lengths) for lengths in slots]
    parameters, pushes, replies = [*other, *([other[0]] if len(other) == 1 else []), None][:3]
    with pytest.raises(ConnectionError, match=r"the server has 1 shards of 8 bytes.*the worker.*build the same model"):
        join(small.port, lambda: open_link(small.way, small.port.address, parameters, pushes, replies))
    small.link().send(b"here")
    assert [each.message for each in mail_of(small.port, 1)] == [b"here"]


@pytest.mark.parametrize("replies", [None, Slots([4])])
def test_a_link_that_only_pulls_needs_no_place_for_pushes(way: str, replies: Slots | None) -> None:
    port = open_port(way, SMALL, SMALL, replies)
    link = join(port, lambda: open_link(way, port.address, SMALL, Slots(()), replies))
    try:
        link.send(b"give")
        (mail,) = mail_of(port, 1)
        with pytest.raises(ValueError, match=r"place for it|has not been sent"):
            port.pushed(mail.peer, 0)
        content = port.parameters(0) if replies is None else port.reply_slot(mail.peer, 0)
        content.fill_(5)
        port.set_version(0, 1)
        port.send(mail.peer, b"there", [0])
        received = threading.Thread(target=lambda: mail_of(port, 1))
        received.start()
        assert next_of(link)[0] == b"there"
        if replies is None:
            into = torch.zeros(8, dtype=torch.uint8)
            assert link.fetch(0, into) == 1
            assert into.tolist() == [5] * 8
        else:
            assert link.reply_slot(0).tolist() == [5] * 4
        link.send(b"over")
        received.join()
    finally:
        link.close()
        port.close()


@pytest.mark.parametrize(("way", "address"), [("local", "local:nobody"), ("remote", "tcp://127.0.0.1:1")])
def test_where_no_port_listens_there_is_no_link(way: str, address: str) -> None:
    with pytest.raises(ConnectionError):
        open_link(way, address, SMALL, SMALL)


def tasks() -> set[str]:
    """Threads of Python and of libraries."""
    return set(os.listdir("/proc/self/task"))


@pytest.mark.slow
def test_nothing_is_left_behind(way: str) -> None:
    before, running = belongings(), tasks()
    for _ in range(2):
        pair = Pair(way, SMALL, SMALL)
        link = pair.link()
        link.push_slot(0).fill_(1)
        link.send(b"push", [0], blob=b"b")
        mail = mail_of(pair.port, 1)
        pair.port.send(mail[0].peer, b"pulled", [0], blob=b"b")
        next_of(link)
        with pytest.raises(ConnectionError):
            join(pair.port, partial(open_link, way, pair.port.address, Slots([1]), SMALL))
        pair.close()
        pair.close()
        del pair, link, mail
    assert left_since(before) == {}
    # Who has joined a thread may still find the system's entry of it.
    assert until(lambda: tasks() <= running, 10)


def start(*arguments: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(HERE.parent), *sys.path])
    command = [sys.executable, "-m", "collectives.end_script", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path})


@pytest.mark.slow
def test_a_link_that_is_killed_is_reported(small: Pair) -> None:
    with start("link", small.way, small.port.address) as process:
        (mail,) = mail_of(small.port, 1)
        small.port.send(mail.peer, b"here")
        process.send_signal(signal.SIGKILL)
        began = monotonic()
        assert mail_of(small.port, 1) == [ReceivedMessage(mail.peer, b"")]
        assert monotonic() - began < 10


@pytest.mark.slow
def test_a_port_that_is_killed_is_noticed(way: str) -> None:
    with start("port", way) as process:
        assert process.stdout is not None
        link = open_link(way, process.stdout.readline().strip(), SMALL, SMALL)
        link.send(b"here")
        assert next_of(link)[0] == b"here"
        process.send_signal(signal.SIGKILL)
        began = monotonic()
        with pytest.raises(ConnectionError):
            next_of(link)
        assert monotonic() - began < 10
        link.close()


def test_slots_without_a_gap_are_one_place_where_they_are_shared(way: str) -> None:
    slots = Slots([128, 64, 8, 0, 8])
    pair = Pair(way, slots, slots)
    link = pair.link()
    joined = link.joined_push_slots(range(3))
    if way.endswith("remote"):
        assert joined is None
    else:
        assert joined is not None
        assert joined.numel() == 200
        joined.copy_(filled(200, 0))
        link.send(b"push", range(3))
        (mail,) = mail_of(pair.port, 1)
        assert torch.equal(torch.cat([pair.port.pushed(mail.peer, slot) for slot in range(3)]), filled(200, 0))
        assert link.joined_push_slots(range(2, 5)) is None
    pair.close()
