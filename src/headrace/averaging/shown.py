"""What workers show each other: bytes in memory that they share, or in mailboxes between hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from headrace.channels.mailboxes import Mailboxes, Route
from headrace.collectives.base import ProcessGroup

Reads = Callable[[int, int], Sequence[int]]
"""`reads(rank, round)` returns whose bytes a worker reads in a round; the same on every worker."""


class ShownBytes:
    """`nbytes` of each worker, which it writes to its own region, `(nbytes,)` uint8.

    `reads` is None where each worker reads all others. `closing` closes connections to other hosts.

    Attributes:
        regions: by rank; of other hosts' workers, those that were read last.
    """

    def __init__(self, nbytes: int, group: ProcessGroup, reads: Reads | None, closing: ExitStack | None) -> None:
        self._group = group
        self._reads = reads or (lambda rank, _: [other for other in range(group.world) if other != rank])
        self._mail: Mailboxes | None = None
        self.regions: Mapping[int, Tensor]
        if group.one_memory:
            self.regions = dict(enumerate(group.share(nbytes)))
            return
        if closing is None:
            raise ValueError("workers of several hosts have connections: give closing=context.closing")
        # The mailbox of a pair is at place `source * world + target`.
        ranks = range(group.world)
        self._mail = Mailboxes([Route(source, target, 1) for source in ranks for target in ranks], group)
        closing.callback(self._mail.close)
        self.regions = {group.rank: torch.zeros(nbytes, dtype=torch.uint8)}

    def show(self, round_: int) -> None:
        """Returns when this worker can read what those have written whom it reads; every worker calls it."""
        if self._mail is None:
            self._group.barrier()
            return
        rank, world = self._group.rank, self._group.world
        for target in range(world):
            if target != rank and rank in self._reads(target, round_):
                self._mail.outboxes[rank * world + target].send(b"", [self.regions[rank]])
        shown = {rank: self.regions[rank]}
        for source in self._reads(rank, round_):
            shown[source] = self._mail.inboxes[source * world + rank].receive(lambda _, content: content.clone())
        self.regions = shown
