"""Cutting into letters and putting together again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.transport import frames as pieces
from headrace.transport.frames import FrameKind, Reassembler, control_frame, kind_of, to_frames

SMALL = 16

LENGTHS = st.lists(st.integers(0, 3 * SMALL), max_size=6)


@pytest.fixture(autouse=True, scope="module")
def _small_pieces() -> object:
    """Letters of 16 bytes and three payloads, so that few bytes make many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_BYTES", SMALL)
        patch.setattr(pieces, "_PAYLOADS", 3)
        yield


def content(slot: int, length: int) -> bytearray:
    return bytearray((slot * 31 + index) % 251 for index in range(length))


@pytest.mark.slow
@given(lengths=LENGTHS, blob=st.binary(max_size=50), message=st.binary(min_size=1, max_size=20))
def test_what_is_cut_is_put_together_again(lengths: list[int], blob: bytes, message: bytes) -> None:
    collector = Reassembler(lengths, 50)
    slots = list(enumerate(lengths))
    for turn in range(2):
        frames = list(
            to_frames(message, slots, lambda slot: (slot + 5, memoryview(content(slot, lengths[slot]))), blob)
        )
        for parts in frames:
            assert sum(len(payload) for payload in parts[2:]) <= SMALL
            assert len(parts) <= 5
        assert [kind_of(parts) for parts in frames] == [FrameKind.PART] * (len(frames) - 1) + [FrameKind.LAST], turn
        # As they come from a socket: each part a piece of memory of its own.
        came = [collector.add([memoryview(bytearray(part)) for part in parts]) for parts in frames]
        assert came[:-1] == [None] * (len(frames) - 1)
        delivery = came[-1]
        assert delivery is not None
        assert (delivery.message, bytes(delivery.blob)) == (message, blob)
        assert {slot: (version, bytes(place.tolist())) for slot, (version, place) in delivery.slots.items()} == {
            slot: (slot + 5, bytes(content(slot, length))) for slot, length in slots
        }


def test_a_slot_is_looked_at_when_its_letter_is_made() -> None:
    """So that what waits for room is not copied before, and its version is that of its content."""
    taken: list[int] = []

    def take(slot: int) -> tuple[int, memoryview]:
        taken.append(slot)
        return 0, memoryview(bytearray(10))

    frames = to_frames(b"m", [(0, 10), (1, 10), (2, 10)], take)
    for count in (1, 2, 3):
        next(frames)
        assert taken == list(range(count))


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_noise_is_refused_or_harmless(parts: list[bytes]) -> None:
    collector = Reassembler([8, 40], 50)
    try:
        delivery = collector.add([memoryview(bytearray(part)) for part in parts])
    except ValueError:
        return
    assert delivery is None or len(delivery.message) <= 40


def test_pieces_of_different_versions_are_refused() -> None:
    first, *_ = to_frames(b"m", [(0, 20)], lambda slot: (1, memoryview(bytearray(20))))
    *_, second = to_frames(b"m", [(0, 20)], lambda slot: (2, memoryview(bytearray(20))))
    collector = Reassembler([20], 0)
    assert collector.add([memoryview(bytearray(part)) for part in first]) is None
    with pytest.raises(ValueError, match="pieces of versions 1 and 2"):
        collector.add([memoryview(bytearray(part)) for part in second])


def test_an_unfinished_slot_is_refused() -> None:
    collector = Reassembler([20], 0)
    first, *_ = to_frames(b"m", [(0, 20)], lambda slot: (1, memoryview(bytearray(20))))
    assert collector.add([memoryview(bytearray(part)) for part in first]) is None
    with pytest.raises(ValueError, match="slot 0 came with 16 bytes only"):
        collector.add([memoryview(part) for part in control_frame(FrameKind.LAST, b"m")])


def test_a_blob_is_not_longer_than_it_may_be() -> None:
    (parts,) = to_frames(b"m", [], lambda slot: (0, memoryview(b"")), b"12345")
    with pytest.raises(ValueError, match="the longest that may come has 4"):
        Reassembler([], 4).add([memoryview(part) for part in parts])


def test_an_empty_slot_has_a_place() -> None:
    (parts,) = to_frames(b"m", [(0, 0)], lambda slot: (3, memoryview(b"")))
    delivery = Reassembler([0], 0).add([memoryview(part) for part in parts])
    assert delivery is not None
    assert delivery.slots[0][0] == 3
    assert delivery.slots[0][1].shape == torch.Size([0])
