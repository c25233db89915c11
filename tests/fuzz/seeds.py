"""What fuzzing begins with: sound bytes of every format, and some that are just not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch

from fuzz.readers import FORM, LAYOUT, LENGTHS, join_frames
from headrace.checkpoint import header, manifest
from headrace.checkpoint.header import TensorEntry
from headrace.checkpoint.manifest import FileRecord, Manifest
from headrace.parameter_server.core.leases import LeaseTableState
from headrace.parameter_server.core.shard import ShardState
from headrace.parameter_server.replication import log
from headrace.parameter_server.replication.log import LogEntry, LogPayload
from headrace.parameter_server.server import snapshots as snapshot
from headrace.parameter_server.server.coordinator import AskedState, CoordinatorState, MembershipState
from headrace.parameter_server.server.snapshots import ServerState
from headrace.parameter_server.server.updater import ShardOptimizerState
from headrace.parameter_server.wire import Kind, Message, encode
from headrace.transport import frames as pieces
from headrace.transport.base import ReceivedMessage
from headrace.transport.frames import FrameKind, control_frame, numbered, to_frames

__all__ = ["seeds"]


def seeds(name: str) -> list[bytes]:
    """Returns the seeds of a reader."""
    return list(_SEEDS[name]())


def _frames() -> Iterator[bytes]:
    every = list(enumerate(LENGTHS))
    for slots, blob in ((every, b"blob"), (every[:1], b""), ([], b"x" * 50), (every[3:], b"")):
        frames = to_frames(
            b"message", slots, lambda slot: (slot + 1, memoryview(bytes(range(256)) * 2)[: LENGTHS[slot]]), blob
        )
        yield join_frames([[bytes(part) for part in parts] for parts in frames])
    entry = pieces._ENTRY.pack
    halves = [
        [pieces._HEAD.pack(1, FrameKind.PART, 1, 0) + entry(1, 0, 5), b"", bytes(30)],
        [pieces._HEAD.pack(1, FrameKind.LAST, 2, 1) + entry(1, 30, 5) + entry(-1, 0, 0), b"m", bytes(10), b"blob"],
    ]
    yield join_frames(halves)
    yield join_frames(halves * 2)
    for length in (60_000, 60_001):
        yield join_frames([[bytes(part) for part in numbered(control_frame(FrameKind.LAST, bytes(length)), 1)]])
    for sort in FrameKind:
        yield join_frames([[bytes(part) for part in control_frame(sort, b"m")]])


def _handshakes() -> Iterator[bytes]:
    yield LAYOUT.hello()
    yield FORM.describe()
    described = json.loads(FORM.describe())
    for changed in (
        described[:-1],
        ["plain"],
        [*described[:-1], "piece"],
        [*described, ["more", 0, [1], "float32"]],
        ["int8", *described[1:]],
        {},
        [],
    ):
        yield json.dumps(changed).encode()
    yield b"[" * 200 + b"]" * 200


def _headers() -> Iterator[bytes]:
    entries = [
        TensorEntry("a", "F64", (2, 3), 0),
        TensorEntry("b\u00e9\n", "F32", (), 48),
        TensorEntry("c", "U8", (0, 7), 52),
    ]
    for count in range(4):
        data = entries[count - 1].end if count else 0
        yield data.to_bytes(2, "little") + header.encode(entries[:count])


def _messages() -> Iterator[bytes]:
    for kind in Kind:
        yield encode(Message(kind, 1, 1, 7, 32.0, 0.5, (1, ~2, 3), 2, 9))
    yield encode(Message(Kind.ASK))


def _manifests() -> Iterator[bytes]:
    digest = hashlib.sha256(b"").hexdigest()
    files = tuple(FileRecord(f"rank-{rank}.safetensors", rank, digest) for rank in range(3))
    for count, description in enumerate(({}, {"a": [1, 2.5, None, True, "x"]}, {"deep": {"er": {"est": []}}})):
        yield manifest.encode(Manifest(count, files[:count], description))
    yield b'{"format":"headrace checkpoint","version":2}'
    yield b"[" * 100
    yield b" " * (manifest.MOST_BYTES + 1)


def _logs() -> Iterator[bytes]:
    push = encode(Message(Kind.PUSH, 0, 1, 5, 1.0, 0.5, (1, 1), 1, 9))
    piece = LogEntry(
        ReceivedMessage(3, push), {slot: torch.full((LENGTHS[slot],), slot, dtype=torch.uint8) for slot in (0, 1)}
    )
    for payload in LogPayload:
        message = log.encode_entry(2, 7, piece, payload)
        packed = log.pack(LENGTHS, piece.pushed) if payload == LogPayload.CARRIED else b""
        yield len(message).to_bytes(2, "little") + message + bytes(packed)
    for kind, numbers in ((Kind.FILL, (1, 4, 0, 1, 3, 0)), (Kind.FILL, (1,)), (Kind.MEMORY, (3,)), (Kind.HELD, (1,))):
        message = encode(Message(kind, lease=1, numbers=numbers))
        yield len(message).to_bytes(2, "little") + message


def _snapshots() -> Iterator[bytes]:
    shard = ShardState(3, None, ((0, 1, 2), (1, 0, 1)), ((0, 3), (5, 6)), (), (), ())
    leases = LeaseTableState(2, 9, 0, 0, (5,), ((3, 4),), ((4, 1),), (), (), (0, 1), 1, (0,), False)
    coordinator = CoordinatorState((0, 0, 9, 1), leases, (AskedState(0, 77, 4, ""),))
    members = MembershipState((), (), ((0, 1), (1, 0)))
    applier = ShardOptimizerState(4, (3.0,), "{}", False)
    state = ServerState("[]", 3, True, False, members, (), (shard,), applier, coordinator)
    for given, tensors in (
        (state, {"parameter/0": torch.arange(5.0), "random": torch.arange(8, dtype=torch.uint8)}),
        (replace(state, coordinator=None, version=9), {}),
        (state, {"state/0/weight/exp_avg@0": torch.ones(2, 3, dtype=torch.float64)}),
    ):
        yield bytes(snapshot.pack(given, tensors, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)).numpy())


_SEEDS: Mapping[str, Callable[[], Iterator[bytes]]] = {
    "frames": _frames,
    "handshakes": _handshakes,
    "headers": _headers,
    "logs": _logs,
    "manifests": _manifests,
    "messages": _messages,
    "snapshots": _snapshots,
}
