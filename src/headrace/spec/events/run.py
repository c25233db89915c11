"""The base of all events and their JSON form; the events of the run itself, and those of parameter servers."""

from __future__ import annotations

import json
from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from headrace.spec.job import JobSource
from headrace.spec.plain import from_plain, to_plain

LAUNCHER = -1
"""The rank of the process that started the run."""

_KINDS: dict[str, type[Event]] = {}


@dataclass(frozen=True)
class Event(ABC):
    """What every event has.

    Attributes:
        kind: of the class, its name in JSON.
        rank: the process that wrote it; `LAUNCHER` for the process that started the run.
        time_s: seconds since the run began.
    """

    kind: ClassVar[str] = "event"
    rank: int
    time_s: float

    def __init_subclass__(cls, kind: str) -> None:
        cls.kind = kind
        _KINDS[kind] = cls


def encode(event: Event) -> str:
    """Returns the event as one line of JSON, without the line's end."""
    return json.dumps({"kind": event.kind, **to_plain(event)}, separators=(",", ":"))


def decode(line: str) -> Event:
    """Returns the event that `encode` wrote.

    Raises:
        ValueError: the line is no event.
    """
    try:
        plain = json.loads(line)
        return from_plain(_KINDS[plain.pop("kind")], plain)
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not an event: {line[:120]!r} ({error})") from error


@dataclass(frozen=True)
class RunStarted(Event, kind="run_started"):
    """The first event, by the launcher.

    Attributes:
        device: the kind of the workers' devices, "cuda"; where there are several, "cuda, cpu".
        threads: of each worker.
        examples_per_epoch: length of the training set.
        started_at: wall time, ISO 8601, for display only.
        plan: as JSON values.
        versions: "headrace", "torch", "python" to version.
        clock_s: start of the run on the host's monotonic clock.
        resumed_step: rounds that an earlier attempt had done; later rounds of that attempt are repeated. The events of
            all attempts follow each other in the same files, on one clock.
        resumed_leases: half-open ranges of data leases beyond `resumed_step` that are not repeated.
        job: the file that it was read from; None where a program made it.
    """

    strategy: str
    workers: int
    device: str
    threads: int
    global_batch_size: int
    examples_per_epoch: int
    started_at: str
    plan: Mapping[str, object]
    versions: Mapping[str, str]
    clock_s: float = 0.0
    resumed_step: int = 0
    resumed_leases: tuple[tuple[int, int], ...] = ()
    job: JobSource | None = None


@dataclass(frozen=True)
class Notice(Event, kind="notice"):
    """A line for the user."""

    text: str


@dataclass(frozen=True)
class Failed(Event, kind="failed"):
    """An error of a worker or server: its cause in one line, and the traceback from the first frame of user code on.

    `exit_code` is that of the command line.
    """

    step: int
    cause: str
    traceback: str = field(default="", repr=False)
    exit_code: int = 1


@dataclass(frozen=True)
class Lost(Event, kind="lost"):
    """By the launcher: the process with rank `lost` has ended, and the run continues.

    Attributes:
        incarnation: number of earlier processes with this rank.
        replaced: whether the launcher starts a replacement.
        host: on which it ran, where there are several; "" where there is one.
    """

    lost: int
    incarnation: int
    cause: str
    replaced: bool
    host: str = ""

    @property
    def line(self) -> str:
        """What happened, as a sentence for the user."""
        then = "another one takes its place" if self.replaced else "the others go on without it"
        where = f" on {self.host}" if self.host else ""
        return f"rank {self.lost}{where} was lost ({self.cause}): {then}"


@dataclass(frozen=True)
class BackupReady(Event, kind="backup_ready"):
    """By the launcher: the backup with rank `backup` holds all that its server does, and can follow it.

    For `unguarded_s` before, since the last backup was lost or the servers began, the server's loss would have ended
    the run.
    """

    backup: int
    unguarded_s: float = 0.0


@dataclass(frozen=True)
class RunEnded(Event, kind="run_ended"):
    """The last event, by the launcher; the status is "ok", "failed" or "interrupted"."""

    status: str


@dataclass(frozen=True)
class ServerStarted(Event, kind="server_started"):
    """A server has loaded its shards."""

    host: str
    pid: int
    shards: int
    parameter_bytes: int


@dataclass(frozen=True)
class ShardStats:
    """What a server has done with one shard.

    Attributes:
        name: the parameter's; for a part of a parameter with its first element, "weight@4096".
        bytes: of its parameters.
        steps: updates.
        apply_s: seconds that the updates took.
        pushed_bytes, pulled_bytes: received and sent.
    """

    name: str
    bytes: int
    pushes: int
    pulls: int
    steps: int
    apply_s: float
    pushed_bytes: int
    pulled_bytes: int


@dataclass(frozen=True)
class ServerStats(Event, kind="served"):
    """What a server has done since it started: about once a second, and at its end.

    Attributes:
        busy_s: seconds in which it was not waiting for messages.
        queue_mean, queue_longest: number of messages that it found waiting.
        staleness: worker (its rank, or "-1" for the mean of a round) to staleness to the number of shards' updates.
        waited_s: worker to the seconds from its requests to their answers.
        refused: reason to the number of shards' pushes.
        shards: in the server's order.
    """

    busy_s: float
    queue_mean: float
    queue_longest: int
    staleness: Mapping[str, Mapping[str, int]]
    waited_s: Mapping[str, float]
    refused: Mapping[str, int]
    shards: tuple[ShardStats, ...]


@dataclass(frozen=True)
class TableStats:
    """The rows of one sparse embedding.

    Attributes:
        name: of the layer.
        held: rows that are held now, each with a gradient so far.
        most: rows that may be held, of which each of several servers has a part; 0 without a limit.
        evicted: rows dropped since the process started, because there would have been more.
    """

    name: str
    held: int
    most: int
    evicted: int


@dataclass(frozen=True)
class RowsHeld(Event, kind="rows"):
    """The rows of all sparse embeddings: by each server with its counts, else by rank 0 at its end.

    Attributes:
        server: whose rows these are; its backup, once it has taken over, says them for it.
    """

    server: int
    tables: tuple[TableStats, ...]


@dataclass(frozen=True)
class PushesApplied(Event, kind="pushes"):
    """By a server whose every push is a step: those that it has applied since the last such event, in order.

    One entry a message; where a push comes in several, each is about some of the shards.

    Attributes:
        workers, leases: whose push, and of which data lease.
        firsts: the first shard of each message; () where all begin with shard 0.
        versions: that this shard had then.
    """

    workers: tuple[int, ...]
    leases: tuple[int, ...]
    firsts: tuple[int, ...]
    versions: tuple[int, ...]


@dataclass(frozen=True)
class HotRow:
    """A row of a table, and how often it was asked for."""

    table: str
    row: int
    pulls: int


@dataclass(frozen=True)
class RowsAsked(Event, kind="rows_asked"):
    """By a server whose rows may move: what it was asked for since the last such event.

    Attributes:
        rows: how many rows were pulled; a row counts once a pull.
        hottest: the rows that were pulled most, of a window of the last pulls.
    """

    rows: int
    hottest: tuple[HotRow, ...]


@dataclass(frozen=True)
class RowsMoved(Event, kind="rows_moved"):
    """Rows of a table have left the server `rank` while workers pushed; the server that has them now writes it.

    Attributes:
        number: of the move, in the order of all moves of the run.
        table: the layer's name.
        ranges: how many ranges of rows.
        rows: how many rows travelled; those that were never changed do not.
        bytes: of these rows with their optimizer's state.
        to: the rank of the server that has them now.
        pause_s: for how long no server had these rows, by the clocks of both servers' hosts.
    """

    number: int
    table: str
    ranges: int
    rows: int
    bytes: int
    to: int
    pause_s: float


@dataclass(frozen=True)
class SnapshotTaken(Event, kind="snapshot_taken"):
    """A server without a backup has written its whole state, between two updates, to the disk.

    Attributes:
        pause_s: how long the server answered no request, for the copy.
    """

    bytes: int
    pause_s: float


@dataclass(frozen=True)
class ServerEnded(Event, kind="server_ended"):
    """The last event of a server.

    Attributes:
        moved_bytes: payload that was pushed to it and pulled from it.
        peak_memory_bytes: largest resident size of its process.
        parameter_bytes, optimizer_bytes: bytes that it holds.
        runtime_bytes: its resident size before it held any; 0 where it was not measured.
    """

    moved_bytes: int
    peak_memory_bytes: int
    parameter_bytes: int
    optimizer_bytes: int
    runtime_bytes: int = 0
