"""Mailboxes between the ranks of a group: in shared memory where two are on one host, else over the network."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from headrace.channels.mailbox import Inbox, Outbox, Receiver, Sender, head_bytes
from headrace.channels.remote_mailbox import RemoteReceiver, RemoteSender
from headrace.collectives.base import HostMap, ProcessGroup, gather_texts
from headrace.shared_memory.segment import SharedSegment
from headrace.transport.one_way import Limits


@dataclass(frozen=True)
class Route:
    """A mailbox from rank `source` to `target`; of one and the same there is none.

    At most `slots` messages may be on their way; between hosts, at either end.
    """

    source: int
    target: int
    slots: int


class Mailboxes:
    """A rank's ends of all mailboxes. Every rank of the group makes them at the same time, with the same routes."""

    def __init__(self, routes: Sequence[Route], group: ProcessGroup) -> None:
        self.outboxes: dict[int, Outbox] = {}
        self.inboxes: dict[int, Inbox] = {}
        self._routes = [(index, route) for index, route in enumerate(routes) if route.source != route.target]
        self._group = group
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._segments: list[SharedSegment] = []
        try:
            if group.home is None:
                self._in_one_memory()
            else:
                self._between_hosts(group.home)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Releases memory and connections."""
        ends: list[Outbox | Inbox] = [*self.outboxes.values(), *self.inboxes.values()]
        for each in (*ends, *self._segments):
            each.close()
        self.outboxes.clear()
        self.inboxes.clear()
        self._segments.clear()
        if self._context is not None:
            self._context.term()
            self._context = None

    def _in_one_memory(self) -> None:
        group = self._group
        used = [0] * group.world
        heads = {}
        for index, route in self._routes:
            begin = used[route.source]
            used[route.source] += head_bytes(route.slots)
            heads[index] = slice(begin, used[route.source])
        regions = group.share(used[group.rank])
        for index, route in self._routes:
            head = regions[route.source][heads[index]]
            if route.source == group.rank:
                self.outboxes[index] = Sender(head, _check(group, route.target))
            elif route.target == group.rank:
                self.inboxes[index] = Receiver(head, _check(group, route.source))

    def _between_hosts(self, home: HostMap) -> None:
        """The end that makes a mailbox says where: in shared memory the sender, over the network the receiver."""
        own, group = self._group.rank, self._group
        self._context = zmq.Context()
        remote: dict[int, RemoteReceiver | RemoteSender] = {}
        heads: dict[int, SharedSegment] = {}
        own_addresses: dict[int, list[int | str]] = {}
        near = {index: home.hosts[route.source] == home.hosts[route.target] for index, route in self._routes}
        for index, route in self._routes:
            if near[index] and route.source == own:
                heads[index] = self._tracked(SharedSegment.create(head_bytes(route.slots), "mailboxes"))
                own_addresses[index] = [os.getpid(), heads[index].descriptor]
            elif not near[index] and route.target == own:
                check = _check(group, route.source)
                limits = Limits(route.slots, kernel_silent_s=home.silent_s)
                receiver = RemoteReceiver(self._context, limits, check, home.address, home.encrypt)
                self.inboxes[index] = remote[index] = receiver
                own_addresses[index] = [receiver.address, receiver.key.decode()]
        addresses = [json.loads(text) for text in gather_texts(group, json.dumps(own_addresses))]
        for index, route in self._routes:
            if route.source == own and not near[index]:
                where, key = addresses[route.target][str(index)]
                check = _check(group, route.target)
                limits = Limits(route.slots, kernel_silent_s=home.silent_s)
                sender = RemoteSender(self._context, limits, check, where, key.encode())
                self.outboxes[index] = remote[index] = sender
            elif route.source == own:
                self.outboxes[index] = Sender(heads[index].tensor(), _check(group, route.target))
            elif route.target == own and near[index]:
                pid, descriptor = addresses[route.source][str(index)]
                head = self._tracked(SharedSegment.open(pid, descriptor, head_bytes(route.slots)))
                self.inboxes[index] = Receiver(head.tensor(), _check(group, route.source))
        for end in remote.values():
            end.meet()
        # No rank may release what another has not opened yet.
        group.barrier()

    def _tracked(self, segment: SharedSegment) -> SharedSegment:
        self._segments.append(segment)
        return segment


def _check(group: ProcessGroup, peer: int) -> Callable[..., None]:
    """Returns what raises where a rank is lost, or the loop of the one that is waited for has ended."""

    def check(came: Callable[[], bool], broken: str = "") -> None:
        group.check()
        group.ends.check(peer, group.rank, came)
        if broken:
            group.check(peer, broken)

    return check
