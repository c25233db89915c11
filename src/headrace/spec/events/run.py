"""The base of all events and their JSON form; the events of the run itself, and those of parameter servers."""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Mapping

import msgspec
from msgspec import Struct

from headrace.spec.job import JobSource
from headrace.spec.plain import FiniteFloat, Int64, to_builtin, to_plain

LAUNCHER = -1
"""The rank of the process that started the run."""


class Event(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """What every event has.

    Attributes:
        rank: the process that wrote it; `LAUNCHER` for the process that started the run.
        time_s: seconds since the run began.
    """

    rank: Int64
    time_s: FiniteFloat

    @property
    def kind(self) -> str:
        """The name of its class in JSON."""
        return str(self.__struct_config__.tag)


_encoder = msgspec.json.Encoder(enc_hook=to_builtin)


@functools.cache
def _decoder() -> msgspec.json.Decoder[Event]:
    return msgspec.json.Decoder(functools.reduce(operator.or_, Event.__subclasses__()))


def encode(event: Event) -> str:
    """Returns the event as one line of JSON, without the line's end.

    JSON has no NaN, no infinities and no halves of surrogate pairs: they stand as Python's `json` writes them.
    """
    try:
        line = _encoder.encode(event).decode()
    except UnicodeEncodeError:
        return _encode_exactly(event)
    # What msgspec writes for NaN.
    return _encode_exactly(event) if "null" in line else line


def _encode_exactly(event: Event) -> str:
    return json.dumps(to_plain(event), separators=(",", ":"))


def decode(line: bytes | str) -> Event:
    """Returns the event that `encode` wrote.

    Raises:
        ValueError: the line is no event.
    """
    try:
        return _decode(line)
    except (ValueError, RecursionError) as error:
        text = line if isinstance(line, str) else line.decode(errors="replace")
        raise ValueError(f"not an event: {text[:120]!r} ({error})") from error


def _decode(line: bytes | str) -> Event:
    try:
        return _decoder().decode(line)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        # It may hold what JSON lacks.
        document = json.loads(line if isinstance(line, str) else line.decode())
        event: Event = msgspec.convert(document, _decoder().type)
        return event


class RunStarted(Event, frozen=True, tag="run_started"):
    """The first event, by the launcher.

    Attributes:
        device: the kind of the workers' devices, "cuda"; where there are several, "cuda, cpu".
        threads: of each worker.
        examples_per_epoch: that training visits; fewer than the data has where `drop_last` leaves some out.
        started_at: wall time, ISO 8601, for display only.
        plan: as JSON values.
        versions: "headrace", "torch", "python" to version.
        clock_s: start of the run on the host's monotonic clock.
        resumed_step: rounds that an earlier attempt had done; later rounds of that attempt are repeated. The events of
            all attempts follow each other in the same files, on one clock.
        resumed_leases: half-open ranges of data leases beyond `resumed_step` that are not repeated.
        job: the file that it was read from; None where a program made it.
        rounds, cores: of the job, and those that processes on the launcher's host may use; 0 where not known.
        command: that has started it, as a shell reads it.
        model, optimizer: of the job, in a few words.
    """

    strategy: str
    workers: Int64
    device: str
    threads: Int64
    global_batch_size: Int64
    examples_per_epoch: Int64
    started_at: str
    plan: Mapping[str, object]
    versions: Mapping[str, str]
    clock_s: FiniteFloat = 0.0
    resumed_step: Int64 = 0
    resumed_leases: tuple[tuple[Int64, Int64], ...] = ()
    job: JobSource | None = None
    rounds: Int64 = 0
    cores: Int64 = 0
    command: str = ""
    model: str = ""
    optimizer: str = ""


class Notice(Event, frozen=True, tag="notice"):
    """A line for the user."""

    text: str


class Failed(Event, frozen=True, tag="failed"):
    """An error of a worker or server: its cause in one line, and the traceback from the first frame of user code on.

    `exit_code` is that of the command line; `remedy` what to do, "" where that is in the cause, or not known.
    """

    step: Int64
    cause: str
    traceback: str = ""
    exit_code: Int64 = 1
    remedy: str = ""

    def __repr__(self) -> str:
        # Without the traceback, which has many lines.
        values = {name: getattr(self, name) for name in self.__struct_fields__ if name != "traceback"}
        return f"Failed({', '.join(f'{name}={value!r}' for name, value in values.items())})"


class Lost(Event, frozen=True, tag="lost"):
    """By the launcher: the process with rank `lost` has ended, and the run continues.

    Attributes:
        incarnation: number of earlier processes with this rank.
        replaced: whether the launcher starts a replacement.
        host: on which it ran, where there are several; "" where there is one.
    """

    lost: Int64
    incarnation: Int64
    cause: str
    replaced: bool
    host: str = ""

    @property
    def line(self) -> str:
        """What happened, as a sentence for the user."""
        then = "another one takes its place" if self.replaced else "the others go on without it"
        where = f" on {self.host}" if self.host else ""
        return f"rank {self.lost}{where} was lost ({self.cause}): {then}"


class BackupReady(Event, frozen=True, tag="backup_ready"):
    """By the launcher: the backup with rank `backup` holds all that its server does, and can follow it.

    For `unguarded_s` before, since the last backup was lost or the servers began, the server's loss would have ended
    the run.
    """

    backup: Int64
    unguarded_s: FiniteFloat = 0.0


ENDS_EARLY = "ends early: "
"""A notice that begins so says why a run ends before all its rounds are done."""


class RunEnded(Event, frozen=True, tag="run_ended"):
    """The last event, by the launcher.

    Attributes:
        status: "ok", "failed" or "interrupted".
        cause, remedy: what has ended it, with the numbers, and what to do next; "" where there is nothing to say.
    """

    status: str
    cause: str = ""
    remedy: str = ""

    @property
    def words(self) -> str:
        """Cause and remedy, as every view shows them."""
        return "; ".join(filter(None, (self.cause, self.remedy)))


class ServerStarted(Event, frozen=True, tag="server_started"):
    """A server has loaded its shards."""

    host: str
    pid: Int64
    shards: Int64
    parameter_bytes: Int64


class ShardStats(Struct, frozen=True, forbid_unknown_fields=True):
    """What a server has done with one shard.

    Attributes:
        name: the parameter's; for a part of a parameter with its first element, "weight@4096".
        bytes: of its parameters.
        steps: updates.
        apply_s: seconds that the updates took.
        pushed_bytes, pulled_bytes: received and sent.
    """

    name: str
    bytes: Int64
    pushes: Int64
    pulls: Int64
    steps: Int64
    apply_s: FiniteFloat
    pushed_bytes: Int64
    pulled_bytes: Int64


class ServerStats(Event, frozen=True, tag="served"):
    """What a server has done since it started: about once a second, and at its end.

    Attributes:
        busy_s: seconds in which it was not waiting for messages.
        queue_mean, queue_longest: number of messages that it found waiting.
        staleness: worker (its rank, or "-1" for the mean of a round) to staleness to the number of shards' updates.
        waited_s: worker to the seconds from its requests to their answers.
        refused: reason to the number of shards' pushes.
        shards: in the server's order.
    """

    busy_s: FiniteFloat
    queue_mean: float
    queue_longest: Int64
    staleness: Mapping[str, Mapping[str, Int64]]
    waited_s: Mapping[str, FiniteFloat]
    refused: Mapping[str, Int64]
    shards: tuple[ShardStats, ...]


class TableStats(Struct, frozen=True, forbid_unknown_fields=True):
    """The rows of one sparse embedding.

    Attributes:
        name: of the layer.
        held: rows that are held now, each with a gradient so far.
        most: rows that may be held, of which each of several servers has a part; 0 without a limit.
        evicted: rows dropped since the process started, because there would have been more.
    """

    name: str
    held: Int64
    most: Int64
    evicted: Int64


class RowsHeld(Event, frozen=True, tag="rows"):
    """The rows of all sparse embeddings: by each server with its counts, else by rank 0 at its end.

    Attributes:
        server: whose rows these are; its backup, once it has taken over, says them for it.
    """

    server: Int64
    tables: tuple[TableStats, ...]


class PushesApplied(Event, frozen=True, tag="pushes"):
    """By a server whose every push is a step: those that it has applied since the last such event, in order.

    One entry a message; where a push comes in several, each is about some of the shards.

    Attributes:
        workers, leases: whose push, and of which data lease.
        firsts: the first shard of each message; () where all begin with shard 0.
        versions: that this shard had then.
    """

    workers: tuple[Int64, ...]
    leases: tuple[Int64, ...]
    firsts: tuple[Int64, ...]
    versions: tuple[Int64, ...]


class HotRow(Struct, frozen=True, forbid_unknown_fields=True):
    """A row of a table, and how often it was asked for."""

    table: str
    row: Int64
    pulls: Int64


class RowsAsked(Event, frozen=True, tag="rows_asked"):
    """By a server whose rows may move: what it was asked for since the last such event.

    Attributes:
        rows: how many rows were pulled; a row counts once a pull.
        hottest: the rows that were pulled most, of a window of the last pulls.
    """

    rows: Int64
    hottest: tuple[HotRow, ...]


class RowsMoved(Event, frozen=True, tag="rows_moved"):
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

    number: Int64
    table: str
    ranges: Int64
    rows: Int64
    bytes: Int64
    to: Int64
    pause_s: FiniteFloat


class SnapshotTaken(Event, frozen=True, tag="snapshot_taken"):
    """A server without a backup has written its whole state, between two updates, to the disk.

    Attributes:
        pause_s: how long the server answered no request, for the copy.
    """

    bytes: Int64
    pause_s: FiniteFloat


class ServerEnded(Event, frozen=True, tag="server_ended"):
    """The last event of a server.

    Attributes:
        moved_bytes: payload that was pushed to it and pulled from it.
        peak_memory_bytes: largest resident size of its process.
        parameter_bytes, optimizer_bytes: bytes that it holds.
        runtime_bytes: its resident size before it held any; 0 where it was not measured.
    """

    moved_bytes: Int64
    peak_memory_bytes: Int64
    parameter_bytes: Int64
    optimizer_bytes: Int64
    runtime_bytes: Int64 = 0
