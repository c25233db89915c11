"""What a worker sends that makes no sense is refused, and ends its link alone."""

from __future__ import annotations

import json
import math

import pytest

from headrace.parameter_server.wire import Kind, Message, ShardLayout, ShardSpec, decode, encode, layout_difference

FORM = ShardLayout([ShardSpec("weight", 0, (2, 3)), ShardSpec("bias", 0, (2,))])


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (Message(Kind.PUSH, lease=-2), "a message of lease -2"),
        (Message(Kind.PUSH, lease=(1 << 48) + 1), "a message of lease 281474976710657"),
        (Message(Kind.PUSH, weight=-1.0), "weight -1"),
        (Message(Kind.PUSH, weight=math.nan), "weight nan"),
        (Message(Kind.PUSH, weight=math.inf), "weight inf"),
        (Message(Kind.PUSH, share=1e300), r"share 1e\+300; at most 1e\+15 and 1000 are sent"),
        (Message(Kind.PUSH, share=math.nan), "share nan"),
    ],
)
def test_numbers_beyond_all_sense_are_refused(message: Message, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        decode(encode(message))


def test_a_description_that_is_nested_deep_is_refused() -> None:
    """Which Python's own reader answers with a RecursionError."""
    with pytest.raises(ValueError, match=r"nested too deep|described no shards"):
        layout_difference(FORM, b"[" * 30_000 + b"]" * 30_000)


def test_a_description_much_longer_than_ones_own_is_not_read() -> None:
    own = len(FORM.describe())
    with pytest.raises(ValueError, match=rf"in 1,000,000 bytes, the server in {own}"):
        layout_difference(FORM, b" " * 1_000_000)


def test_a_description_in_another_spelling_is_the_same() -> None:
    assert layout_difference(FORM, json.dumps(json.loads(FORM.describe()), indent=1).encode()) == ""
