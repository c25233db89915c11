r"""The header of a safetensors file: names, types, shapes and places of its tensors.

    8 bytes      length of the header, little-endian
    header       {"weight":{"dtype":"F32","shape":[10,4],"data_offsets":[0,160]},"bias":...}, padded with spaces
    data         the tensors, one after the other, without gaps

The header must have this form, as the safetensors library writes it: these fields in this order, no other space, the
tensors in the order of their places. So a regular expression reads it, without JSON that may be nested or repeated,
and memory stays proportional to the number of tensors.

The library's own reader cannot replace it: safetensors 0.8.0 accepts names that occur twice (one tensor is silently
lost), tensors out of order or not aligned, unknown fields, 17 MiB, 100,000 dimensions. It maps a path, so that neither
the digest nor the refusal of links would cover what it reads.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

PREFIX: Final = 8
MOST_BYTES = 16 << 20
MOST_ENTRIES = 50_000
MOST_DIMS = 64
NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "C64": "complex64",
    "BOOL": "bool",
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}
"""torch's name of each dtype."""
BYTES = {name: int("".join(filter(str.isdigit, name.partition("_")[0])) or 8) // 8 for name in NAMES}
"""Bytes of one element of each dtype, from the bits in its name."""

FORM = re.compile(
    r"(.*)\|(coo|csr|csc|bsr|bsc)\[((?:[0-9]{1,18}(?:,[0-9]{1,18}){0,63})?)\]\.(indices|compressed|values)"
)
"""Names of the parts of a sparse tensor: of the tensor, its layout, its size, and which part it is."""
COMPLEX = "|complex128"
"""The end of the names of complex128 tensors, of which the file has real and imaginary parts, last in float64."""

_NUMBER = rb"(?:0|[1-9][0-9]{0,18}+)"
_ENTRY = re.compile(
    # Possessive, so that no header causes backtracking.
    rb'("(?:[^"\\\x00-\x1f]++|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*+"):\{"dtype":"([A-Z0-9_]{1,16})",'
    rb'"shape":\[((?:%(n)s(?:,%(n)s){0,%(d)d})?)\],"data_offsets":\[(%(n)s),(%(n)s)\]\}'
    % {b"n": _NUMBER, b"d": MOST_DIMS - 1}
)


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor; `dtype` is a key of `BYTES`, `begin` counts bytes from the first tensor's."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def end(self) -> int:
        return self.begin + math.prod(self.shape) * BYTES[self.dtype]


def encode(entries: Sequence[TensorEntry]) -> bytes:
    """Returns length and header of `entries` in the order of their data; a ValueError if there are too many."""
    fields = (
        f'{json.dumps(entry.name)}:{{"dtype":"{entry.dtype}","shape":[{",".join(map(str, entry.shape))}],'
        f'"data_offsets":[{entry.begin},{entry.end}]}}'
        for entry in entries
    )
    text = f"{{{','.join(fields)}}}".encode()
    text += b" " * (-len(text) % PREFIX)
    if len(entries) > MOST_ENTRIES or len(text) > MOST_BYTES:
        raise ValueError(
            f"{len(entries):,} tensors with a header of {len(text):,} bytes; "
            f"at most {MOST_ENTRIES:,} with {MOST_BYTES:,} go into one file"
        )
    return len(text).to_bytes(PREFIX, "little") + text


def length(prefix: bytes, file_bytes: int) -> int:
    """Returns the header's length; a ValueError if it does not fit into the file, or is too long."""
    count = int.from_bytes(prefix, "little")
    if count > min(MOST_BYTES, file_bytes - PREFIX):
        raise ValueError(
            f"its header would have {count:,} bytes; the file has {file_bytes:,}, at most {MOST_BYTES:,} are allowed"
        )
    return count


def parse(header: bytes, data_bytes: int) -> tuple[TensorEntry, ...]:
    """Returns the tensors of a file, which must cover its `data_bytes` exactly; a ValueError for any other header."""
    text = header.rstrip(b" ")
    if len(text) < 2 or not (text.startswith(b"{") and text.endswith(b"}")) or len(header) - len(text) >= PREFIX:
        raise ValueError("its header is no object, or not padded to 8 bytes")
    entries: dict[str, TensorEntry] = {}
    at, place, last = 1, 0, len(text) - 1
    while at < last:
        match = _ENTRY.match(text, at, last)
        if match is None or len(entries) == MOST_ENTRIES:
            raise ValueError(f"its header is malformed at byte {at}, after {len(entries):,} tensors")
        entry = _entry(match, place)
        if entry.name in entries:
            raise ValueError(f"two of its tensors are named {entry.name[:100]!r}")
        entries[entry.name] = entry
        at, place = match.end(), entry.end
        # A comma must stand between two and nowhere else.
        if at < last:
            if text[at : at + 1] != b"," or at == last - 1:
                raise ValueError(f"its header is malformed at byte {at}, after {len(entries):,} tensors")
            at += 1
    if place != data_bytes:
        raise ValueError(f"its tensors have {place:,} bytes, its data {data_bytes:,}")
    return tuple(entries.values())


def _entry(match: re.Match[bytes], place: int) -> TensorEntry:
    quoted, dtype, shape, begin, end = match.groups()
    name = json.loads(quoted) if b"\\" in quoted else quoted[1:-1].decode()
    entry = TensorEntry(name, dtype.decode(), tuple(map(int, shape.split(b","))) if shape else (), place)
    if entry.dtype not in BYTES:
        raise ValueError(f"its tensor {name[:100]!r} is of the unknown type {entry.dtype}")
    if place % BYTES[entry.dtype]:
        raise ValueError(f"its tensor {name[:100]!r} of {entry.dtype} stands at byte {place}, which is not aligned")
    if (int(begin), int(end)) != (place, entry.end):
        raise ValueError(
            f"its tensor {name[:100]!r} stands at bytes {int(begin)} to {int(end)}; "
            f"its shape, its type and the tensors before it make {place} to {entry.end}"
        )
    return entry


def whole(entry: TensorEntry) -> tuple[str, tuple[int, ...], str] | None:
    """Returns name, shape and torch's type of the tensor that an entry stands for; None if another one does."""
    name, shape, dtype = entry.name, entry.shape, NAMES[entry.dtype]
    if name.endswith(COMPLEX):
        name, shape, dtype = name.removesuffix(COMPLEX), shape[:-1], "complex128"
    match = FORM.fullmatch(name)
    if match is None:
        return name, shape, dtype
    return (match[1], tuple(map(int, match[3].split(","))), dtype) if match[4] == "values" else None
