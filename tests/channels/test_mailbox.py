"""Mailboxes: what is sent comes, in order, whatever its length, and no rank waits for a lost one."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from belongings import descriptors
from headrace.channels.mailbox import Check, Receiver, Sender, head_bytes, places
from headrace.errors import PeerLost

SLOTS = 2


def never(came: Callable[[], bool]) -> None:
    """No rank is lost."""


def ends(check: Check = never) -> tuple[Sender, Receiver]:
    heads = torch.zeros(head_bytes(SLOTS), dtype=torch.uint8)
    return Sender(heads, check), Receiver(heads, check)


def read(note: bytes, data: Tensor) -> tuple[bytes, Tensor]:
    return note, data.clone()


def test_messages_of_any_length_come_in_order() -> None:
    sender, receiver = ends()
    lengths = [0, 1, 63, 64, 65, 100_000, 3, 250_000, 7]
    messages = [(f"{n} bytes".encode(), torch.arange(n, dtype=torch.int32)) for n in lengths]

    def send() -> None:
        for note, tensor in messages:
            sender.send(note, [tensor, torch.tensor(1.5), tensor[::3]])

    thread = threading.Thread(target=send)
    thread.start()
    for note, tensor in messages:
        got, data = receiver.receive(read)
        begins, end = places([4 * len(tensor), 4, 4 * len(tensor[::3])])
        assert got == note
        assert len(data) >= end - 63
        assert torch.equal(data[: 4 * len(tensor)].view(torch.int32), tensor)
        assert data[begins[1] : begins[1] + 4].view(torch.float32).item() == 1.5
        assert torch.equal(data[begins[2] : begins[2] + 4 * len(tensor[::3])].view(torch.int32), tensor[::3])
    thread.join()
    assert sender.moved_bytes == receiver.moved_bytes > 0
    sender.close()
    receiver.close()


def test_a_sender_waits_while_all_slots_are_full() -> None:
    sender, receiver = ends()
    sent = []

    def send() -> None:
        for number in range(4):
            sender.send(b"", [torch.tensor(number)])
            sent.append(number)

    thread = threading.Thread(target=send)
    thread.start()
    assert int(receiver.receive(read)[1][:8].view(torch.int64)) == 0
    # Of four messages one is out and two have a slot.
    assert len(sent) <= 3
    for number in range(1, 4):
        assert int(receiver.receive(read)[1][:8].view(torch.int64)) == number
    thread.join()
    sender.close()
    receiver.close()


@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_who_waits_for_a_lost_peer_is_told(who: str) -> None:
    def lost(came: Callable[[], bool]) -> None:
        raise PeerLost(1, "here", "killed by signal 9 (SIGKILL)", "stage 1 of 2")

    sender, receiver = ends(lost)

    def fill() -> None:
        for _ in range(SLOTS + 1):
            sender.send(b"", [])

    with pytest.raises(PeerLost, match=r"rank 1 \(stage 1 of 2\) on here was lost"):
        fill() if who == "sender" else receiver.receive(read)
    sender.close()
    receiver.close()


@pytest.mark.slow
def test_nothing_is_left_when_both_ends_are_closed() -> None:
    before = descriptors()
    sender, receiver = ends()
    for _ in range(3):
        sender.send(b"note", [torch.zeros(100)])
        receiver.receive(read)
    # Each end has a descriptor of its own of each slot.
    assert len(descriptors() - before) == 2 * SLOTS
    sender.close()
    receiver.close()
    assert descriptors() <= before
