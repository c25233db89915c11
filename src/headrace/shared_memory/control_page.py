"""The page that the processes of a run on one host share: barrier counters, heartbeats, and a few numbers a rank.

┌───────────────────────────────┐
│ abort, apart, stop, ...       │  the run's
├───────────────────────────────┤
│ barrier counters              │  a rank's, each line below on cache lines of its own
│ heartbeat                     │  written by the rank, watched by the launcher
│ segment offer                 │  a segment that the others of the rank's group may open
│ saved part                    │  the rank's part of the last checkpoint
│ restarts, leave, server view  │  written by the launcher
│ suspicion                     │  whose connection has ended
│ membership                    │  the members as the rank knows them, where they may come and go
│ address                       │  where a server can be reached
│ last event                    │  of a rank whose disk does not take it
│ board                         │  collectives of devices that the rank has called
│ 2 x 4096 numbers              │  for sums, in alternation
└───────────────────────────────┘  x ranks
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import Array, Structure, c_char, c_double, c_int32, c_int64, c_uint8, sizeof

from headrace.errors import UnfitMachine
from headrace.machine.identity import require_linux
from headrace.shared_memory import futex
from headrace.shared_memory.calls import CallBoard
from headrace.shared_memory.layout import LINE
from headrace.shared_memory.segment import SharedSegment
from headrace.spec.plan import MOST_MEMBERS

NUMBERS = 4096
"""How many numbers one sum may hold."""


class Heartbeat(Structure):
    """What a rank tells the launcher and the other ranks.

    `count` grows a few times a second while the process runs; `pid` is 0 before the process has begun; `finished` is
    1 + the rounds done, once the rank's training loop has ended, 0 before; `promotable_epoch` is of a server: the epoch
    whose backup can be promoted; `changed` are the parameters that user code has frozen since the run
    began, and the modules whose mode it has changed.
    """

    count: int
    step: int
    examples: int
    pid: int
    finished: int
    promotable_epoch: int
    changed: int
    loss: float
    _fields_ = [
        *((name, c_int64) for name in ("count", "step", "examples", "pid", "finished", "promotable_epoch", "changed")),
        ("loss", c_double),
    ]


class SegmentOffer(Structure):
    """A segment that another process can open through /proc; its descriptor is -1 where there is none."""

    pid: int
    descriptor: int
    nbytes: int
    _fields_ = [(name, c_int64) for name in ("pid", "descriptor", "nbytes")]

    def publish(self, pid: int, descriptor: int, nbytes: int) -> None:
        """Writes the offer; a barrier must follow before others read it."""
        self.pid, self.descriptor, self.nbytes = pid, descriptor, nbytes

    def open(self) -> SharedSegment:
        """Maps the segment that is offered; an UnfitMachine if it cannot be opened from here."""
        return SharedSegment.open(self.pid, self.descriptor, self.nbytes)


class SavedPart(Structure):
    """The part of a checkpoint that a rank wrote last, with its length, SHA-256, and 0 or the system's error number.

    `step_plus_1` is 1 + the rounds that it was written after; written last, because it says that the rest is there.
    """

    step_plus_1: int
    nbytes: int
    error: int
    digest: Array[c_uint8]
    _fields_ = [*((name, c_int64) for name in ("step_plus_1", "nbytes", "error")), ("digest", c_uint8 * 32)]


class ServerView(Structure):
    """Which processes are the primary and the backup of a server: one process writes it, others read it whole."""

    epoch: int
    primary: int
    backup: int
    _fields_ = [(name, c_int64) for name in ("epoch", "primary", "backup")]

    def publish(self, epoch: int, primary: int, backup: int) -> None:
        """Writes the view; epochs are greater than 0 and only grow."""
        self.epoch = 0
        futex.fence()
        self.primary, self.backup = primary, backup
        futex.fence()
        self.epoch = epoch

    def read(self) -> tuple[int, int, int]:
        """Returns epoch, primary and backup; all 0 before they are there, or while they are written."""
        epoch = self.epoch
        futex.fence()
        primary, backup = self.primary, self.backup
        futex.fence()
        return (epoch, primary, backup) if epoch and self.epoch == epoch else (0, 0, 0)


class MemberRecord(Structure):
    """Members of a run whose workers may come and go, as one of them knows it: the view, and whether it waits to join.

    `ready` is 1 + the number of processes that its rank has had before, where this one waits to join; `number` is that
    of the view, 0 while it is written; of the `count` members the first `able` have the state.
    """

    ready: int
    number: int
    count: int
    able: int
    members: Array[Array[c_int32]]
    _fields_ = [
        *((name, c_int64) for name in ("ready", "number", "count", "able")),
        ("members", c_int32 * 2 * MOST_MEMBERS),
    ]

    def publish(self, number: int, members: Sequence[tuple[int, int]], able: int) -> None:
        """Writes a view; see `ServerView.publish`."""
        self.number = 0
        futex.fence()
        self.count, self.able = len(members), able
        for place, member in zip(self.members, members, strict=False):
            place[:] = member
        futex.fence()
        self.number = number

    def read(self) -> tuple[int, list[tuple[int, int]], int]:
        """Returns the view's number, its members, and how many of them have the state; 0, [] and 0 for none."""
        number = self.number
        futex.fence()
        members = [(int(rank), int(incarnation)) for rank, incarnation in self.members[: self.count]]
        able = self.able
        futex.fence()
        return (number, members, able) if number and self.number == number else (0, [], 0)


class Suspicion(Structure):
    """The rank to which a connection of this rank has ended, and how often one has; where a rank may be lost."""

    rank: int
    count: int
    _fields_ = [(name, c_int64) for name in ("rank", "count")]

    def raise_against(self, rank: int) -> None:
        """Tells that the connection to a rank has ended, and no other could be opened yet."""
        self.rank = rank
        # Last, because it says that the rest is there.
        self.count += 1


class Address(Structure):
    """A text of at most 191 bytes that one process writes and others wait for."""

    length: int
    text: Array[c_uint8]
    _fields_ = [("length", c_uint8), ("text", c_uint8 * (3 * LINE - 1))]

    def publish(self, text: str) -> None:
        """Writes the text."""
        encoded = text.encode()
        self.text[: len(encoded)] = list(encoded)
        # Last, because it says that the rest is there.
        self.length = len(encoded)

    def clear(self) -> None:
        """Removes the text, before another process writes its own."""
        self.length = 0

    def read(self) -> str:
        """Returns the text; "" before it is there."""
        return bytes(self.text[: self.length]).decode()


class LastEvent(Structure):
    """The last event of a rank, as a line of its event file, where that file could not take it."""

    length: int
    text: Array[c_uint8]
    _fields_ = [("length", c_int64), ("text", c_uint8 * (128 * LINE - 8))]

    def publish(self, line: str) -> None:
        """Writes the line; a ValueError if it is too long."""
        encoded = line.encode()
        if len(encoded) > len(self.text):
            raise ValueError(f"a last event of {len(encoded):,} bytes, of which {len(self.text):,} fit")
        ctypes.memmove(self.text, encoded, len(encoded))
        # Last, because it says that the rest is there.
        self.length = len(encoded)

    def clear(self) -> None:
        """Removes the line, before another process has the rank."""
        self.length = 0

    def read(self) -> str:
        """Returns the line; "" where there is none."""
        return bytes(self.text[: self.length]).decode()


def _on_lines(*groups: list[tuple[str, type]]) -> list[tuple[str, type]]:
    """Returns the fields, with padding so that each group begins on a cache line of its own."""
    fields = []
    for number, group in enumerate(groups):
        size = sum(sizeof(kind) for _, kind in group)
        fields += [*group, (f"_unused_{number}", c_char * (-size % LINE))]
    return fields


class RankRecord(Structure):
    """What is told about one rank; every field has one writer.

    `barrier_counter` counts the barriers of all ranks that this one has come to, modulo 2**31. The launcher writes
    `restarts`, how many processes the rank has had before its present one, and `leave`, 1 if the rank is to leave the
    run. `numbers` are two arrays of `NUMBERS` float64, for sums.
    """

    barrier_counter: int
    elastic_counter: int
    heartbeat: Heartbeat
    segment_offer: SegmentOffer
    saved: SavedPart
    restarts: int
    leave: int
    server_view: ServerView
    suspicion: Suspicion
    membership: MemberRecord
    address: Address
    last_event: LastEvent
    board: CallBoard
    numbers: Array[Array[c_double]]
    _fields_ = _on_lines(
        [("barrier_counter", c_int32), ("elastic_counter", c_int32)],
        [("heartbeat", Heartbeat)],
        [("segment_offer", SegmentOffer)],
        [("saved", SavedPart)],
        [("restarts", c_int64), ("leave", c_int64), ("server_view", ServerView)],
        [("suspicion", Suspicion)],
        [("membership", MemberRecord)],
        [("address", Address)],
        [("last_event", LastEvent)],
        [("board", CallBoard)],
        [("numbers", c_double * NUMBERS * 2)],
    )

    def address_of(self, field: str) -> int:
        """Returns where in this process a field lies, for `futex`."""
        return int(ctypes.addressof(self) + getattr(RankRecord, field).offset)


class ControlPage(Structure):
    """The run's fields, and a record for each rank, in a segment of at least `ControlPage.nbytes(ranks)`.

    The launcher writes `abort`, 1 + the rank that was lost first, and `stop`, 1 if the run is to end soon, in order.
    Where that rank lives and does not reach another one, `apart` is 1 + the other one, and was written before `abort`.
    Rank 0 writes `stop_after`, 1 + the last round to do, `save_after`, 1 + the last round to save after,
    `change_after`, 1 + the last round before members join or leave, and `rate_after`, 1 + the last round before the
    learning rate changes, in that round, before its barrier. Who is asked alone to end the run writes `stopped_by`, 1 +
    its rank, before `stop`. All are 0 while there is nothing to tell.
    """

    abort: int
    apart: int
    stop: int
    stop_after: int
    save_after: int
    change_after: int
    rate_after: int
    stopped_by: int
    _RUNS = ("abort", "apart", "stop", "stop_after", "save_after", "change_after", "rate_after", "stopped_by")
    _fields_ = [(name, c_int64) for name in _RUNS]

    def __new__(cls, segment: SharedSegment, ranks: int) -> ControlPage:
        return cls.from_buffer(segment.memory)

    def __init__(self, segment: SharedSegment, ranks: int) -> None:
        self.segment = segment
        starts = range(LINE, self.nbytes(ranks), sizeof(RankRecord))
        self.ranks = [RankRecord.from_buffer(segment.memory, start) for start in starts]

    @classmethod
    def create(cls, ranks: int, label: str = "control") -> ControlPage:
        """Makes a page in a segment of its own, all of it 0; see `SharedSegment.create`."""
        return cls(SharedSegment.create(cls.nbytes(ranks), label), ranks)

    @staticmethod
    def nbytes(ranks: int) -> int:
        """Returns the length that a page for `ranks` needs."""
        return LINE + ranks * sizeof(RankRecord)


def check_shared_memory() -> str | None:
    """Returns None if processes can share anonymous memory and wake each other here, else the reason."""
    try:
        require_linux()
        page = ControlPage.create(1, "probe")
        segment = page.segment
        SharedSegment.open(os.getpid(), segment.descriptor, segment.nbytes).close()
        futex.wake(page.ranks[0].address_of("barrier_counter"))
        futex.wait(page.ranks[0].address_of("barrier_counter"), 1, 0.001)
        segment.close()
    except (UnfitMachine, OSError) as error:
        return str(error)
    return None
