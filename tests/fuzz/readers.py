"""The readers of foreign bytes, each as a function that raises where a promise is broken.

The promises: nothing but a ValueError comes out; no more is kept than the caps say; what is accepted is what a second,
simpler reader makes of it, and is written again as it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress

import torch
from safetensors import deserialize

from fuzz.reference import Refused, parse_frames, read_message
from headrace.checkpoint import header, manifest
from headrace.checkpoint.header import BYTES, NAMES
from headrace.parameter_server.core.leases import numbers_in
from headrace.parameter_server.replication import log
from headrace.parameter_server.server import snapshots as snapshot
from headrace.parameter_server.wire import Kind, ShardLayout, ShardSpec, decode, encode, layout_difference
from headrace.spec.plain import to_plain
from headrace.transport.base import Slots, TransportLayout
from headrace.transport.frames import Reassembler, expect_number

__all__ = ["BLOB_BYTES", "LAYOUT", "LENGTHS", "READERS", "join_frames", "split_letters"]

LENGTHS = (8, 40, 0, 300)
BLOB_BYTES = 50
LAYOUT = TransportLayout(Slots(LENGTHS), Slots((4, 20, 0, 150)), Slots((2, 10, 0, 75)))
FORM = ShardLayout([ShardSpec("weight", 0, (2, 3)), ShardSpec("weight", 6, (4,)), ShardSpec("bias", 0, (), "float64")])
HEADER_BYTES = 4096
"""Of the data behind a header that is read."""


def join_frames(frames: list[list[bytes]]) -> bytes:
    """Returns letters as one piece of bytes: the count of parts, then each with its length."""
    return b"".join(
        bytes([len(parts)]) + b"".join(len(part).to_bytes(2, "little") + part for part in parts) for parts in frames
    )


def split_letters(data: bytes) -> list[list[bytes]]:
    """Returns the letters in a piece of bytes; what it breaks off in is shorter."""
    frames, at = [], 0
    while at < len(data):
        count, at, parts = data[at], at + 1, []
        for _ in range(count):
            if at >= len(data):
                break
            length = int.from_bytes(data[at : at + 2], "little")
            parts.append(data[at + 2 : at + 2 + length])
            at += 2 + length
        frames.append(parts)
    return frames


def read_frames(data: bytes) -> None:
    """What a link sends after its hello."""
    collector = Reassembler(LENGTHS, BLOB_BYTES)
    reference = parse_frames(LENGTHS, BLOB_BYTES)
    next(reference)
    for parts in split_letters(data):
        try:
            delivery = collector.add([memoryview(bytearray(part)) for part in parts])
        except ValueError:
            assert isinstance(reference.send(parts), Refused)
            return
        with suppress(ValueError):
            expect_number(parts, 1)
            assert parts[0][4:8] == b"\1\0\0\0"
        kept = sum(place.numel() for _, place in collector._slots.values()) + len(collector._blob)
        assert kept <= sum(LENGTHS) + BLOB_BYTES
        expected = reference.send(parts)
        if delivery is None:
            assert expected is None
        else:
            slots = {slot: (version, place.numpy().tobytes()) for slot, (version, place) in delivery.slots.items()}
            assert expected == (delivery.message, slots, bytes(delivery.blob))


def read_messages(data: bytes) -> None:
    """What workers and servers say to each other."""
    expected = read_message(data)
    try:
        message = decode(data)
    except ValueError:
        assert isinstance(expected, Refused), expected
        return
    assert tuple(message) == expected
    assert encode(message) == data


def read_handshakes(data: bytes) -> None:
    """What a link says first, and how a worker describes its shards when it joins."""
    with suppress(ValueError):
        taken = LAYOUT.match(data)
        assert data == taken.hello()
        assert (taken.parameters, taken.replies) == (LAYOUT.parameters, LAYOUT.replies)
        assert taken.pushes.lengths in (LAYOUT.pushes.lengths, ())
    try:
        difference = layout_difference(FORM, data)
    except ValueError:
        assert data != FORM.describe()
        return
    assert (difference == "") == (json.loads(data) == json.loads(FORM.describe()))
    assert len(difference) < 500


def read_manifests(data: bytes) -> None:
    """What a checkpoint says of itself."""
    try:
        found = manifest.decode(data)
    except ValueError:
        return
    assert manifest.encode(found) == data
    plain = json.loads(data)
    assert (found.step, found.description) == (plain["step"], plain["description"])
    assert [(each.name, each.bytes, each.sha256) for each in found.files] == [
        (each["name"], each["bytes"], each["sha256"]) for each in plain["files"]
    ]


def read_headers(data: bytes) -> None:
    """What a checkpoint's file says of its tensors: 2 bytes for how long their data are, then length and header."""
    count, prefix, text = int.from_bytes(data[:2], "little") % HEADER_BYTES, data[2:10], data[10:]
    try:
        length = header.length(prefix, len(prefix) + len(text) + count)
        entries = header.parse(text[:length], count)
    except ValueError:
        return
    if length > len(text):
        return
    # The library reads the same, of the file that this is the front of.
    other = {name: piece for name, piece in deserialize(length.to_bytes(8, "little") + text[:length] + bytes(count))}
    assert set(other) == {entry.name for entry in entries}
    for entry in entries:
        assert tuple(other[entry.name]["shape"]) == entry.shape
        assert other[entry.name]["dtype"] == entry.dtype
        assert entry.dtype in NAMES
        assert len(other[entry.name]["data"]) == entry.end - entry.begin
        assert (entry.end - entry.begin) % BYTES[entry.dtype] == 0


def read_logs(data: bytes) -> None:
    """What a primary sends to its backup: 2 bytes for how long the message is, the message, what was pushed."""
    length = int.from_bytes(data[:2], "little")
    message, packed = data[2 : 2 + length], data[2 + length :]
    try:
        head, mail = log.parse_entry(message)
    except ValueError:
        return
    assert head.kind in (Kind.FILL, Kind.MEMORY, Kind.ENTRY)
    assert encode(head) + mail == message
    present = log.pushed_by(mail)
    try:
        pushed = log.unpack(LENGTHS, present, memoryview(bytearray(packed)))
    except ValueError:
        return
    assert {slot: place.numel() for slot, place in pushed.items()} == {slot: LENGTHS[slot] for slot in present}
    # What lies between the slots is unused.
    again = log.unpack(LENGTHS, present, memoryview(log.pack(LENGTHS, pushed)))
    assert {slot: place.tolist() for slot, place in again.items()} == {
        slot: place.tolist() for slot, place in pushed.items()
    }


def read_snapshots(data: bytes) -> None:
    """What a server was, as bytes."""
    try:
        state, tensors = snapshot.unpack(memoryview(bytearray(data)))
        done = [numbers_in(shard.done) for shard in state.shards]
    except ValueError:
        return
    assert all(len(each) <= 1 << 26 for each in done)
    again = snapshot.pack(state, tensors, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8)).numpy().data
    once_more, others = snapshot.unpack(again)
    assert to_plain(once_more) == to_plain(state)
    assert {name: tensor.numpy().tobytes() for name, tensor in others.items()} == {
        name: tensor.numpy().tobytes() for name, tensor in tensors.items()
    }


READERS: Mapping[str, Callable[[bytes], None]] = {
    "frames": read_frames,
    "handshakes": read_handshakes,
    "headers": read_headers,
    "logs": read_logs,
    "manifests": read_manifests,
    "messages": read_messages,
    "snapshots": read_snapshots,
}
"""By the name of their corpus."""
