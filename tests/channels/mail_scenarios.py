"""What the ranks of a test of mailboxes do, as in `scenarios`; ranks 0 and 1 are on one host, rank 2 on another."""

from __future__ import annotations

import os
import threading
import time
from time import monotonic

import torch
from torch import Tensor

from collectives.scenarios import DTYPES, between_hosts, digest, lengths, made
from headrace.channels.mailbox import places
from headrace.channels.mailboxes import Mailboxes, Route
from headrace.collectives.shared_memory import SharedMemoryGroup
from headrace.errors import PeerLost, UsageError
from headrace.shared_memory.control_page import ControlPage

HOSTS = ("one", "one", "other")
ROUND = [Route(0, 1, 2), Route(1, 2, 2), Route(2, 0, 3), Route(1, 1, 1)]
"""Where what a rank sends goes, and a way that needs no mailbox."""

LARGE = 1 << 22


def read(note: bytes, data: Tensor) -> tuple[bytes, Tensor]:
    return note, data.clone()


def exchange_everything(host: SharedMemoryGroup, page: ControlPage) -> list[str]:
    """Sends tensors of every type and length around, several at a time; returns what did not come as it was sent."""
    group = between_hosts(host, None, HOSTS)
    # The first time opens what makes keys, for good.
    Mailboxes(ROUND, group).close()
    group.barrier()
    before = len(os.listdir("/proc/self/fd")), threading.active_count()
    mailboxes = Mailboxes(ROUND, group)
    wrong = []
    own = mailboxes.outboxes[host.rank]
    inbox = mailboxes.inboxes[(host.rank - 1) % 3]
    for dtype in DTYPES:
        for length in lengths(dtype.itemsize):
            tensors = [made(length, dtype, seed) for seed in range(3)]
            note = f"{dtype} x {length}"
            own.send(note.encode(), [tensors[0].conj(), tensors[1][::2], tensors[2].reshape(-1, 1).t()])
            got, data = inbox.receive(read)
            sent = [tensors[0].conj().resolve_conj(), torch.cat([tensors[1][::2]]), tensors[2]]
            begins, _ = places([each.nbytes for each in sent])
            wrong += [
                note
                for begin, tensor in zip(begins, sent, strict=True)
                if digest(data[begin : begin + tensor.nbytes]) != digest(tensor)
            ]
            if got != note.encode():
                wrong.append(f"note of {note}")
    if own.moved_bytes != inbox.moved_bytes:
        wrong.append(f"{own.moved_bytes} bytes sent, and {inbox.moved_bytes} received")
    group.barrier()
    mailboxes.close()
    # Memory goes with the last that is on it.
    del mailboxes, own, inbox
    group.barrier()
    after = len(os.listdir("/proc/self/fd")), threading.active_count()
    # Fewer may be left, of what the group has opened to connect.
    if any(now > then for now, then in zip(after, before, strict=True)):
        wrong.append(f"descriptors and threads: {before} before, {after} after")
    group.close()
    return wrong


def get_ahead(host: SharedMemoryGroup, page: ControlPage) -> list[int]:
    """Rank 1 sends to rank 2, which reads nothing before the other waits; returns how many fit, and how many came."""
    group = between_hosts(host, None, HOSTS)
    mailboxes = Mailboxes([Route(1, 2, 2)], group)
    found = [0, 0]
    if host.rank == 1:
        content = torch.zeros(LARGE, dtype=torch.uint8)
        for number in range(40):
            content.fill_(number)
            mailboxes.outboxes[0].send(b"", [content])
            page.save_after = number + 1
    elif host.rank == 2:
        found[0] = stands_still(page)
        for number in range(40):
            _, data = mailboxes.inboxes[0].receive(read)
            found[1] += bool((data[:LARGE] == number).all())
    group.barrier()
    mailboxes.close()
    group.close()
    return found


def stands_still(page: ControlPage) -> int:
    """Returns what `page.save_after` is, some time after it has last been more than before."""
    last, since = 0, monotonic()
    while last < 2 or monotonic() - since < 0.5:
        if page.save_after > last:
            last, since = page.save_after, monotonic()
        time.sleep(0.01)
    return last


def wait_for_mail(host: SharedMemoryGroup, page: ControlPage, how: str, sends: bool) -> list[object]:
    """Rank 2 goes; returns what rank 1, which sends to it or receives from it, hears, and how soon."""
    own = page if how == "ended" else None
    group = between_hosts(host, own, HOSTS)
    route = Route(1, 2, 2) if sends else Route(2, 1, 2)
    mailboxes = Mailboxes([route], group)
    said, took = "", 0.0
    if host.rank == 2:
        if how == "ended":
            page.ranks[2].heartbeat.finished = 4
        elif how == "lost":
            page.abort = 3
        elif how == "gone":
            mailboxes.close()
    elif host.rank == 1:
        began = monotonic()
        try:
            while monotonic() < began + 20:
                if sends:
                    mailboxes.outboxes[0].send(b"", [torch.zeros(LARGE)])
                else:
                    mailboxes.inboxes[0].receive(read)
        except (PeerLost, UsageError) as error:
            said, took = str(error), monotonic() - began
    if how != "lost":
        host.barrier()
    mailboxes.close()
    group.close()
    return [said, took < 15.0]
