"""The page that the processes of a run on one host share: counters, signs of life, a few numbers.

┌──────────────────────────────┐
│ abort │ stop │ stop, save    │  the run's
│              │ after a round │
├──────────────────────────────┤
│ counter, counter of workers  │  a rank's: barrier counters, on a cache line of their own
│ beat, step, examples, pid    │           what the launcher watches,
│ loss, end                    │           written by the rank
│ pid, descriptor, nbytes      │           a segment that it offers to the others
│ saved, bytes, error, digest  │           its part of a checkpoint
│ lost, wanted away, ready     │           how many of its processes were lost, says the launcher; backups
│ epoch, primary, backup       │           which processes are a server's, says the launcher
│ address                      │           where a server can be reached
│ 2 x 4096 numbers              │           for sums, by turns
└──────────────────────────────┘  x ranks
"""

from __future__ import annotations

import ctypes

from headrace.shared_memory import futex
from headrace.shared_memory.segment import SharedSegment

NUMBERS = 4096
"""How many numbers one sum may hold."""

_LINE = 64
_WATCHED = _LINE
_OFFERED = 2 * _LINE
_SAVED = 3 * _LINE
_FATE = 4 * _LINE
_ADDRESS = 5 * _LINE
_NUMBERS = 8 * _LINE
_BLOCK = _NUMBERS + 2 * NUMBERS * 8


class Address:
    """A text that one process writes once and others wait for.

    Args:
        place: a byte for its length, then the text.
    """

    def __init__(self, place: memoryview) -> None:
        self._place = place

    def tell(self, text: str) -> None:
        """Writes it."""
        encoded = text.encode()
        self._place[1 : 1 + len(encoded)] = encoded
        # Last, because it says that the rest is there.
        self._place[0] = len(encoded)

    def clear(self) -> None:
        """Lets it be not there, before another process writes it."""
        self._place[0] = 0

    def read(self) -> str:
        """Returns it; "" before it is there."""
        return bytes(self._place[1 : 1 + self._place[0]]).decode()


class ServerView:
    """Who is what of a server: written by one process, and read whole by others.

    Args:
        place: three int64.
    """

    def __init__(self, place: memoryview) -> None:
        self._place = place

    def tell(self, epoch: int, primary: int, backup: int) -> None:
        """Writes it; epochs are greater than 0 and only grow."""
        place = self._place
        place[0] = 0
        futex.fence()
        place[1], place[2] = primary, backup
        futex.fence()
        place[0] = epoch

    def read(self) -> tuple[int, int, int]:
        """Returns epoch, primary and backup; all 0 before they are there, or while they are written."""
        place = self._place
        epoch: int = place[0]
        futex.fence()
        primary, backup = place[1], place[2]
        futex.fence()
        return (epoch, primary, backup) if epoch and place[0] == epoch else (0, 0, 0)


class ControlPage:
    """Views of one segment; every field is written by one process.

    Args:
        segment: at least `ControlPage.nbytes(ranks)` long.
        ranks: how many processes work together.

    Attributes:
        counters: by rank, an int32 view of length 2: of all ranks' barrier, and of the one of those who meet.
        beats: by rank; [beat, step, examples, pid] as int64.
        losses: by rank, a float64 view of length 1.
        ends: by rank, an int64 view of length 1: 1 + the rounds that a loop which has ended did; 0 before.
        offers: by rank; [pid, descriptor, nbytes] as int64.
        saves: by rank; [1 + rounds, bytes, error] as int64 of the last part of a checkpoint that it has written;
            error is 0, or the system's number.
        digests: by rank, 32 bytes: the SHA-256 of that part.
        fates: by rank; [how many of its processes were lost so far, 1 if it is to leave] as int64, by the launcher;
            then the epoch whose backup can be promoted, by a server.
        views: by rank of a server, its primary and its backup, by the launcher.
        addresses: by rank, where this server can be reached.
        numbers: by rank, two float64 views of length `NUMBERS`.
    """

    def __init__(self, segment: SharedSegment, ranks: int) -> None:
        self.segment = segment
        self.ranks = ranks
        memory = segment.memory
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._run = memory[:_LINE].cast("q")
        blocks = [_LINE + rank * _BLOCK for rank in range(ranks)]
        self.counters = [memory[block : block + 8].cast("i") for block in blocks]
        self.beats = [memory[block + _WATCHED : block + _WATCHED + 32].cast("q") for block in blocks]
        self.losses = [memory[block + _WATCHED + 32 : block + _WATCHED + 40].cast("d") for block in blocks]
        self.ends = [memory[block + _WATCHED + 40 : block + _WATCHED + 48].cast("q") for block in blocks]
        self.offers = [memory[block + _OFFERED : block + _OFFERED + 24].cast("q") for block in blocks]
        self.saves = [memory[block + _SAVED : block + _SAVED + 24].cast("q") for block in blocks]
        self.digests = [memory[block + _SAVED + 24 : block + _SAVED + 56] for block in blocks]
        self.fates = [memory[block + _FATE : block + _FATE + 24].cast("q") for block in blocks]
        self.views = [ServerView(memory[block + _FATE + 24 : block + _FATE + 48].cast("q")) for block in blocks]
        self.addresses = [Address(memory[block + _ADDRESS : block + _NUMBERS]) for block in blocks]
        half = NUMBERS * 8
        self.numbers = [
            tuple(memory[block + _NUMBERS + i * half : block + _NUMBERS + (i + 1) * half].cast("d") for i in (0, 1))
            for block in blocks
        ]

    @staticmethod
    def nbytes(ranks: int) -> int:
        """Returns the length that a page for `ranks` needs."""
        return _LINE + ranks * _BLOCK

    def counter_address(self, rank: int, which: int = 0) -> int:
        """Returns where in this process one of the rank's counters lies, for `futex`."""
        return self._base + _LINE + rank * _BLOCK + 4 * which

    @property
    def abort(self) -> int:
        """1 + the rank that was lost first, 0 while all is well. Written by the launcher."""
        return self._run[0]

    @abort.setter
    def abort(self, value: int) -> None:
        self._run[0] = value

    @property
    def stop(self) -> int:
        """1 if the launcher wants the run to end soon, in order."""
        return self._run[1]

    @stop.setter
    def stop(self, value: int) -> None:
        self._run[1] = value

    @property
    def stop_after(self) -> int:
        """1 + the last round to do, 0 if there is none; written by rank 0 in that round, before its barrier."""
        return self._run[2]

    @stop_after.setter
    def stop_after(self, value: int) -> None:
        self._run[2] = value

    @property
    def save_after(self) -> int:
        """1 + the last round to save after; written by rank 0 in that round, before its barrier."""
        return self._run[3]

    @save_after.setter
    def save_after(self, value: int) -> None:
        self._run[3] = value
