"""The same formats, read in another way: slower, shorter, from the description alone."""

from __future__ import annotations

import math
import struct
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from headrace.parameter_server.wire import Kind

__all__ = ["Delivered", "Refused", "parse_frames", "read_message"]

KINDS = {kind.value for kind in Kind}
Delivered = tuple[bytes, dict[int, tuple[int, bytes]], bytes]


@dataclass(frozen=True)
class Refused:
    """These bytes are none of the format.

    Attributes:
        why: the reason, for finding the fault.
    """

    why: str


def read_message(data: bytes) -> tuple[object, ...] | Refused:
    """Returns a message's fields, in the order of `Message`."""
    if len(data) < 42 or (len(data) - 42) % 8:
        return Refused("length")
    version, kind = data[0], data[1]
    first, count, flag, steps = (int.from_bytes(data[at : at + 2], "little") for at in (2, 4, 6, 8))
    lease = int.from_bytes(data[10:18], "little", signed=True)
    weight, share = (struct.unpack("<d", data[at : at + 8])[0] for at in (18, 26))
    numbers = [int.from_bytes(data[at : at + 8], "little", signed=True) for at in range(42, len(data), 8)]
    number = int.from_bytes(data[34:42], "little")
    if version != 3 or kind not in KINDS or count != len(numbers) or lease < -1 or lease > 2**48:
        return Refused("fields")
    if math.isnan(weight) or math.isnan(share) or min(weight, share) < 0 or weight > 1e15 or share > 1e3:
        return Refused("floats")
    return kind, first, flag, lease, weight, share, tuple(numbers), steps, number


def parse_frames(lengths: Sequence[int], blob_bytes: int) -> Generator[Delivered | Refused | None, list[bytes], None]:
    """Is sent letters, each as a list of parts; yields what they complete. Begin it with `next`."""
    places: dict[int, tuple[int, bytes]] = {}
    blob = b""
    answer: Delivered | Refused | None = None
    while True:
        parts = yield answer
        answer = None
        if len(parts) < 2 or len(parts[0]) < 8 or len(parts[1]) > 60_000:
            answer = Refused("parts")
            continue
        form, sort, count = parts[0][0], parts[0][1], int.from_bytes(parts[0][2:4], "little")
        if form != 1 or sort not in (3, 4) or len(parts) != 2 + count or len(parts[0]) != 8 + 20 * count:
            answer = Refused("head")
            continue
        for index, content in enumerate(parts[2:]):
            place = parts[0][8 + 20 * index :][:20]
            slot, start, version = (
                int.from_bytes(place[low:high], "little", signed=True) for low, high in ((0, 4), (4, 12), (12, 20))
            )
            if slot == -1:
                if start != len(blob) or len(blob) + len(content) > blob_bytes:
                    answer = Refused("blob")
                    break
                blob += content
                continue
            if not 0 <= slot < len(lengths):
                answer = Refused("slot")
                break
            known, had = places.get(slot, (version, b""))
            begins = slot not in places
            if ((start == 0) != begins and lengths[slot]) or (start == 0 and not begins):
                answer = Refused("order")
                break
            if start != len(had) or known != version or len(had) + len(content) > lengths[slot]:
                answer = Refused("place")
                break
            if not content and lengths[slot]:
                answer = Refused("empty")
                break
            places[slot] = (version, had + content)
        if answer is None and sort == 4:
            if any(len(had) != lengths[slot] for slot, (_, had) in places.items()):
                answer = Refused("unfinished")
            else:
                answer = (parts[1], places, blob)
                places, blob = {}, b""
