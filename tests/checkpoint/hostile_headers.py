"""Files of tensors made to harm their reader."""

from __future__ import annotations

import pickle
from collections.abc import Callable

__all__ = ["HEADERS", "LARGE_HEADERS"]


def file(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    """Returns a file; the header is padded as it should be unless its length is told."""
    if length is None:
        header += b" " * (-len(header) % 8)
        length = len(header)
    return length.to_bytes(8, "little") + header + data


def one(dtype: str = '"F32"', shape: str = "[2]", offsets: str = "[0,8]", data: int = 8) -> bytes:
    """Returns a file with one tensor, its fields as they are written."""
    return file(f'{{"a":{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}}}'.encode(), bytes(data))


def two(first: str, second: str, data: int = 8) -> bytes:
    """Returns a file with two tensors of four bytes each, their places as they are written."""
    entry = '"{}":{{"dtype":"F32","shape":[1],"data_offsets":{}}}'
    return file(f"{{{entry.format('a', first)},{entry.format('b', second)}}}".encode(), bytes(data))


EMPTY = b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
ENTRY = b'"dtype":"F32","shape":[2],"data_offsets":[0,8]'


def many(count: int) -> bytes:
    """Returns a file with so many tensors, each of no bytes."""
    return file(
        b"{" + b",".join(b'"%d":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}' % i for i in range(count)) + b"}"
    )


LARGE_HEADERS: dict[str, Callable[[], bytes]] = {
    "of 17 MiB": lambda: file(b"{}" + b" " * (17 << 20)),
    "of 16 MiB of spaces": lambda: file(b" " * (16 << 20)),
    "of 16 MiB of braces": lambda: file(b"{" * (16 << 20)),
    "of 16 MiB of lists": lambda: file(b"{" + b"[" * ((16 << 20) - 2) + b"}"),
    "of 16 MiB of empty objects": lambda: file(b"{" + b'"":{},' * (2 << 20) + b"}"),
    "of 16 MiB of a name": lambda: file(b'{"' + b"a" * ((16 << 20) - 100) + b'":{}}'),
    "of 16 MiB of escapes": lambda: file(b'{"' + b"\\n" * ((8 << 20) - 100) + b'":{}}'),
    "of 16 MiB of a name without an end": lambda: file(b'{"' + b"a" * ((16 << 20) - 100) + b"}"),
    "of 16 MiB of a shape": lambda: one(shape="[" + "1," * (8 << 20) + "1]"),
    "of 8 MiB of a number": lambda: one(shape="[" + "1" * (8 << 20) + "]"),
    "of 8 MiB of a type": lambda: one(dtype='"' + "F" * (8 << 20) + '"'),
    "a million tensors": lambda: many(1_000_000)[: 16 << 20],
    "50,001 tensors": lambda: many(50_001),
    "50,000 tensors, the last of them wrong": lambda: many(50_000).replace(
        b'"49999":{"dtype":"U8"', b'"49999":{"dtype":"U9"'
    ),
}
"""Makers of whole files of megabytes, by what is wrong with them."""

HEADERS: dict[str, bytes] = {
    "seven bytes": bytes(7),
    "no header": bytes(8),
    "nothing but a length": file(b"", length=100),
    "longer than the file": file(b"{}      ", length=9),
    "of 2**63 bytes": file(b"{}", length=1 << 63),
    "of 2**64 - 1 bytes": file(b"{}", length=(1 << 64) - 1),
    "no JSON": file(b"hello"),
    "a list": file(b"[]"),
    "a text": file(b'"a"'),
    "null": file(b"null"),
    "a name twice": file(
        b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    ),
    "a name twice, once in escapes": file(b'{"a":%b,"\\u0061":%b}' % (EMPTY, EMPTY)),
    "a field twice": file(b'{"a":{"dtype":"F32","shape":[2],"shape":[2],"data_offsets":[0,8]}}', bytes(8)),
    "no dtype": file(b'{"a":{"shape":[2],"data_offsets":[0,8]}}', bytes(8)),
    "no shape": file(b'{"a":{"dtype":"F32","data_offsets":[0,8]}}', bytes(8)),
    "no place": file(b'{"a":{"dtype":"F32","shape":[2]}}', bytes(8)),
    "another field": file(b'{"a":{' + ENTRY + b',"requires_grad":true}}', bytes(8)),
    "metadata": file(b'{"__metadata__":{"format":"pt"},"a":{' + ENTRY + b"}}", bytes(8)),
    "a tensor that is null": file(b'{"a":null}'),
    "a tensor that is a list": file(b'{"a":["F32",[2],[0,8]]}', bytes(8)),
    "an unknown type": one('"F31"'),
    "a type in small letters": one('"f32"'),
    "a type that is a number": one("32"),
    "a type that is null": one("null"),
    "a type of a pickled object": one('"OBJECT"'),
    "a type that Python would import": one('"os.system"'),
    "a negative length": one(shape="[-2]"),
    "two negative lengths": one(shape="[-1,-2]"),
    "a length that is true": one(shape="[2,true]"),
    "a length that is a float": one(shape="[2.0]"),
    "a length that is 2e0": one(shape="[2e0]"),
    "a length that is a text": one(shape='["2"]'),
    "a length that is null": one(shape="[null]"),
    "a length that is a list": one(shape="[[2]]"),
    "a length that is no number": one(shape="[NaN]"),
    "a length with a zero before it": one(shape="[02]"),
    "a length with a plus": one(shape="[+2]"),
    "a length in hexadecimal": one(shape="[0x2]"),
    "a length of 2**64": one(shape="[18446744073709551616]"),
    "a length of 20 digits": one(shape="[10000000000000000000]"),
    "lengths whose product is 2 by 64 bits": one(shape="[2,9223372036854775809]"),
    "lengths whose product is 0 by 64 bits": one(shape="[4294967296,4294967296]", offsets="[0,0]", data=0),
    "lengths of 10**18": one(shape="[1000000000000000000,1000000000000000000]"),
    "a shape that is null": one(shape="null"),
    "a shape that is a number": one(shape="2"),
    "a shape that is an object": one(shape='{"0":2}'),
    "65 dimensions": one(shape=f"[2{',1' * 64}]"),
    "100,000 dimensions": one(shape=f"[2{',1' * 99_999}]"),
    "a comma too many in a shape": one(shape="[2,]"),
    "a place that is shorter than the shape": one(offsets="[0,4]"),
    "a place that is longer than the shape": one(offsets="[0,16]", data=16),
    "a place of another type's length": one(dtype='"F64"'),
    "a place beyond the file": one(offsets="[8,16]"),
    "a place turned round": one(offsets="[8,0]"),
    "a negative place": one(offsets="[-8,0]"),
    "a place that is true": one(shape="[]", dtype='"U8"', offsets="[false,true]", data=1),
    "a place of floats": one(offsets="[0.0,8.0]"),
    "a place of one number": one(offsets="[8]"),
    "a place of three numbers": one(offsets="[0,4,8]"),
    "a place that is null": one(offsets="null"),
    "a place of 2**64": one(offsets="[18446744073709551616,18446744073709551624]"),
    "no data": one(data=0),
    "data too short": one(data=7),
    "data too long": one(data=9),
    "data of no tensor": file(b"{}", bytes(8)),
    "the same bytes twice": two("[0,4]", "[0,4]", 4),
    "the same bytes twice, and some of no tensor": two("[0,4]", "[0,4]"),
    "overlapping": two("[0,4]", "[2,6]", 6),
    "a hole between": two("[0,4]", "[8,12]", 12),
    "a hole before": two("[4,8]", "[8,12]", 12),
    "a hole behind": two("[0,4]", "[4,8]", 12),
    "not in the order of the data": two("[4,8]", "[0,4]"),
    "not aligned": file(
        b'{"z":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}}',
        bytes(5),
    ),
    "a space before": file(b' {"a":{' + ENTRY + b"}}", bytes(8)),
    "spaces within": file(b'{"a": {' + ENTRY + b"}}", bytes(8)),
    "eight spaces behind": file(b'{"a":{' + ENTRY + b"}}" + b" " * 15, bytes(8)),
    "a line's end behind": file(b'{"a":{' + ENTRY + b"}}\n", bytes(8)),
    "zeros behind": file(b'{"a":{' + ENTRY + b"}}\0\0", bytes(8)),
    "a comma behind": file(b'{"a":{' + ENTRY + b"},}", bytes(8)),
    "a comma before": file(b'{,"a":{' + ENTRY + b"}}", bytes(8)),
    "a brace too many": file(b'{"a":{' + ENTRY + b"}}}", bytes(8)),
    "a brace too few": file(b'{"a":{' + ENTRY + b"}", bytes(8)),
    "two commas": two("[0,4]", "[4,8]").replace(b"},", b"},,"),
    "a comment": file(b'{/**/"a":{' + ENTRY + b"}}", bytes(8)),
    "single quotes": file(b"{'a':{" + ENTRY + b"}}", bytes(8)),
    "a byte order mark": file(b'\xef\xbb\xbf{"a":{' + ENTRY + b"}}", bytes(8)),
    "UTF-16": file('{"a":{}}'.encode("utf-16")),
    "a name that is not UTF-8": file(b'{"\xff":{' + ENTRY + b"}}", bytes(8)),
    "a name with a zero": file(b'{"a\0":{' + ENTRY + b"}}", bytes(8)),
    "a name with a line's end": file(b'{"a\n":{' + ENTRY + b"}}", bytes(8)),
    "a name with an unknown escape": file(b'{"\\x61":{' + ENTRY + b"}}", bytes(8)),
    "a name that is a number": file(b"{1:{" + ENTRY + b"}}", bytes(8)),
    "a pickle": file(pickle.dumps({"a": 1})),
    "a pickle for a name": file(b'{"' + pickle.dumps("a", 0) + b'":{' + ENTRY + b"}}", bytes(8)),
    "objects in objects": file(b'{"a":' * 200_000 + b"1" + b"}" * 200_000),
}
"""Whole files by what is wrong with them."""
