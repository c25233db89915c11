"""What workers and servers send each other: the shards of a server and how they are encoded, and messages."""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.transport.base import LARGEST_MESSAGE, Slots
from headrace.transport.codec import Codec, Plain, codec_for

_HEAD = struct.Struct("<BBHHHHqddQ")
_VERSION = 3
_MOST = (1 << 16) - 1
MOST_SHARDS, MOST_TOGETHER = 1 << 16, (LARGEST_MESSAGE - 2 * _HEAD.size - 16) // 8
"""Of one server, and of one push: its message has to fit into one of the log of a backup."""

_LAST_LEASE = 1 << 48
VALUES = 2
"""Flag of a STATE that asks for the parameters of a shard alone, as they are."""
MOST_WEIGHT = 1e15
"""More than any batch weighs: a sum of them remains a number."""
_MOST_SHARE = 1e3
"""More than any push stands for."""

_LONGER, _LONGER_BYTES = 4, 1 << 16
"""A longer description is not read."""

_BUCKET_BYTES, _BUCKET_SHARDS = 1 << 20, 4096
"""A server updates one bucket while the worker copies the next. One message has room for that many versions."""


@dataclass(frozen=True)
class ShardSpec:
    """A shard: a piece of the parameter `parameter` with its own shape, and `dtype` as in `torch.float32`.

    An `exact` one is never encoded, because it is optimizer state.
    """

    parameter: str
    start: int
    shape: tuple[int, ...]
    dtype: str = "float32"
    exact: bool = False

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def name(self) -> str:
        """The parameter, and the start in it."""
        return f"{self.parameter}@{self.start}" if self.start else self.parameter


class ShardLayout:
    """All shards of one server, in order, and how they are sent; raises UnknownName if there is no such codec.

    `reply_slots` are of encoded parameters; None if they are sent as they are. `rows_bytes` is the length of the
    longest push of rows of sparse tables.
    """

    def __init__(
        self,
        pieces: Sequence[ShardSpec],
        push_codec: str = "plain",
        pull_codec: str = "plain",
        rows_bytes: int = 0,
    ) -> None:
        self.pieces = tuple(pieces)
        self.rows_bytes = rows_bytes
        self._dtypes = [getattr(torch, piece.dtype) for piece in pieces]
        self._names = (push_codec, pull_codec)
        self._push, self._pull = (
            [codec_for("plain" if piece.exact else codec, getattr(torch, piece.dtype)) for piece in pieces]
            for codec in (push_codec, pull_codec)
        )
        self.slots = Slots([p.elements * d.itemsize for p, d in zip(self.pieces, self._dtypes, strict=True)])
        self.push_slots = self._slots_of(self._push)
        self.reply_slots = None if pull_codec == "plain" else self._slots_of(self._pull)
        self._residuals: dict[tuple[str, int, int], Tensor] = {}

    def __len__(self) -> int:
        return len(self.pieces)

    def view(self, shard: int, place: Tensor) -> Tensor:
        """Returns a shard at a place, `(bytes,)` uint8."""
        return place.view(self._dtypes[shard]).view(self.pieces[shard].shape)

    def push_view(self, shard: int, place: Tensor) -> Tensor:
        """Returns a push slot as `encode` and `decode` take it: as the shard, if it is sent as it is."""
        return self.view(shard, place) if isinstance(self._push[shard], Plain) else place

    def encode(self, shard: int, gradient: Tensor, place: Tensor) -> None:
        """Writes a gradient to a `push_view`, and keeps the encoding error for the next gradient."""
        if isinstance(self._push[shard], Plain):
            if not _is_at(gradient, place):
                place.copy_(gradient)
            return
        self._push[shard].encode(gradient.detach().cpu().contiguous(), place, self._residual("push", 0, shard))

    def decode(self, shard: int, place: Tensor) -> Tensor:
        """Returns the gradient in a push slot, a view if it was sent as it is; raises ValueError if it is none."""
        if isinstance(self._push[shard], Plain):
            return self.view(shard, place)
        gradient = torch.empty(self.pieces[shard].shape, dtype=self._dtypes[shard])
        self._push[shard].decode(place, gradient)
        return gradient

    def encode_reply(self, worker: int, shard: int, parameters: Tensor, place: Tensor) -> None:
        """Writes parameters to a worker's reply slot, and keeps the encoding error for its next reply."""
        self._pull[shard].encode(parameters, place, self._residual("pull", worker, shard))

    def decode_reply(self, shard: int, place: Tensor, into: Tensor) -> None:
        """Copies the parameters in a reply slot into a worker's copy, `(bytes,)` uint8."""
        near = torch.empty(self.pieces[shard].elements, dtype=self._dtypes[shard])
        self._pull[shard].decode(place, near)
        into.view(self._dtypes[shard]).copy_(near)

    @property
    def residuals(self) -> dict[str, Tensor]:
        """Encoding errors so far, which are corrected next time, by name."""
        return {f"residual/{way}/{worker}/{shard}": lost for (way, worker, shard), lost in self._residuals.items()}

    @residuals.setter
    def residuals(self, named: Mapping[str, Tensor]) -> None:
        self._residuals.clear()
        for name in named:
            way, worker, shard = name.split("/")[1:]
            residual = self._residual(way, int(worker), int(shard))
            if residual is None:
                raise ValueError(f"{name} of a codec that loses nothing")
            residual.copy_(like(named, name, residual))

    def forget(self, worker: int) -> None:
        """Drops the encoding errors of the replies to a worker."""
        self._residuals = {key: lost for key, lost in self._residuals.items() if key[:2] != ("pull", worker)}

    def _residual(self, way: str, worker: int, shard: int) -> Tensor | None:
        if not (self._push if way == "push" else self._pull)[shard].feedback:
            return None
        key = (way, worker, shard)
        if key not in self._residuals:
            self._residuals[key] = torch.zeros(self.pieces[shard].elements, dtype=self._dtypes[shard])
        return self._residuals[key]

    def _slots_of(self, codecs: Sequence[Codec]) -> Slots:
        of = zip(codecs, self.pieces, self._dtypes, strict=True)
        return Slots([codec.nbytes(piece.elements, dtype) for codec, piece, dtype in of])

    def describe(self) -> bytes:
        """Returns what another process compares its layout with."""
        pieces = [[p.parameter, p.start, list(p.shape), p.dtype] for p in self.pieces]
        return json.dumps([*self._names, *pieces]).encode()


def buckets_of(layout: ShardLayout) -> list[range]:
    """Returns the shards in ranges of about a megabyte."""
    buckets, start, nbytes = [], 0, 0
    for shard, length in enumerate(layout.slots.lengths):
        nbytes += length
        full = nbytes >= _BUCKET_BYTES or shard + 1 - start >= _BUCKET_SHARDS
        if full or shard == len(layout) - 1:
            buckets.append(range(start, shard + 1))
            start, nbytes = shard + 1, 0
    return buckets


def layout_difference(layout: ShardLayout, described: bytes) -> str:
    """Says how a layout that was described differs from one's own, "" if it does not.

    Raises:
        ValueError: it is no layout's description.
    """
    mine = layout.describe()
    if described == mine:
        return ""
    if len(described) > _LONGER * len(mine) + _LONGER_BYTES:
        raise ValueError(f"a worker described its shards in {len(described):,} bytes, the server in {len(mine):,}")
    try:
        return _compare(json.loads(mine), json.loads(described))
    except RecursionError:
        raise ValueError("a worker described shards that are nested too deep") from None


def _compare(ours: list[object], other: object) -> str:
    if ours == other:
        return ""
    if not isinstance(other, list) or len(other) < 2:
        raise ValueError("a worker described no shards")
    if ours[:2] != other[:2]:
        return f"the worker's codecs are {other[:2]!s:.60} and the server's {ours[:2]}; use the same on both"
    ours, other = ours[2:], other[2:]
    at = next((i for i, (mine, its) in enumerate(zip(ours, other, strict=False)) if mine != its), None)
    if at is None:
        return f"the worker's model has {len(other)} shards here and the server {len(ours)}; build the same on both"
    return f"shard {at} is {_words(other[at])} in the worker, {_words(ours[at])} on the server; build the same model"


def _is_at(gradient: Tensor, place: Tensor) -> bool:
    """Tells whether a gradient was made in its push slot."""
    same = gradient.data_ptr() == place.data_ptr() and gradient.dtype == place.dtype
    return same and gradient.numel() == place.numel() and gradient.is_contiguous()


def _words(piece: object) -> str:
    if isinstance(piece, list) and len(piece) == 4:
        return f"{piece[0]!s:.60}[{piece[1]!s:.20}:] of shape {piece[2]!s:.40} and type {piece[3]!s:.20}"
    return f"{piece!r:.80}"


def like(tensors: Mapping[str, Tensor], name: str, known: Tensor) -> Tensor:
    """Returns the tensor of a snapshot with this name; raises ValueError unless it is of the form of `known`."""
    tensor = tensors.get(name)
    if tensor is None or tensor.shape != known.shape or tensor.dtype != known.dtype:
        words = "missing" if tensor is None else f"{tuple(tensor.shape)} of {tensor.dtype}"
        raise ValueError(f"the tensor {name!r} is {words}, and {tuple(known.shape)} of {known.dtype} is needed")
    return tensor


class Kind(IntEnum):
    """What a message is about; workers ask the first half, servers answer with the other."""

    JOIN = 1
    PUSH = 2
    PULL = 3
    PUSH_PULL = 4
    ASK = 5
    HALT = 6
    ADVANCE = 7
    STATE = 8
    LOAD = 9
    AVERAGE = 10
    SETTLE = 11
    LEAVE = 12
    END = 13
    COMMIT = 14
    ALIVE = 15
    BEGIN = 16
    REST = 17
    CLOSE = 18
    ROUND_MEMBERS = 19
    LOST = 20
    PULL_ROWS = 21
    PUSH_ROWS = 22
    ROWS = 23
    LOAD_ROWS = 24
    VECTORS = 25
    MOVE_ROWS = 26
    FOLLOW = 32
    HELD = 33

    ANSWER = 64
    GRANT = 65
    SYNC_POINT = 66
    DONE = 67
    ERROR = 68
    OPEN = 69
    MOVED = 70
    FILL = 96
    MEMORY = 97
    ENTRY = 98


class Message(NamedTuple):
    """One message.

    Attributes:
        first: of the shards that it is about; their number is that of `numbers`.
        flag: of a push, 1 if it is finite. Of an answer, the
            `Reason` of a refusal, or 0. Of LEAVE, 1 for this client alone, 0 for its worker.
        lease: of a push; -1 for none.
        weight, share: of a push, see `Push`. Of an answer, the weight is the squared distance of the push from the mean
            of its round, if servers measure it.
        numbers: of a push or pull, a version for each shard, `~version` if the push has no gradient for it. Of an
            answer, the versions. Of ADVANCE, see `ServerDataLeases`. Of ROUND_MEMBERS, a round and its workers, or none
            to ask for them. Of JOIN, worker, incarnation, session. Of LOST, which only the server's own process says,
            worker and incarnation of the process that may follow. Of OPEN, the requests that are not answered yet. Of
            ERROR with `flag`, worker and incarnation of the process that has replaced this one. Of PUSH_ROWS, the
            version of the rows and that of the map by which they were divided, and a third one for the rest of a push;
            MOVED answers it instead of ANSWER where the server has a later map. A PULL_ROWS has the map's version in
            `lease`, for its changes since. ROWS and LOAD_ROWS are about the table
            `first`, ROWS from the row `lease` on. Of a COMMIT or ASK, and behind the others of a GRANT, a report, as
            `numbers_of` returns it. Of VECTORS, see `VectorStore`.
        steps: how many gradients a push is the sum of; each has that share.
        number: counted by the client, from 1; an answer repeats it. 0 if the message is not remembered.
    """

    kind: Kind
    first: int = 0
    flag: int = 0
    lease: int = -1
    weight: float = 0.0
    share: float = 0.0
    numbers: tuple[int, ...] = ()
    steps: int = 1
    number: int = 0

    @property
    def pushed(self) -> list[int]:
        """The shards whose gradients are sent with it: those that have one, if all are finite and count."""
        if self.kind not in (Kind.PUSH, Kind.PUSH_PULL) or not self.weight or not self.flag:
            return []
        return [shard for shard, version in enumerate(self.numbers, self.first) if version >= 0]


def numbers_of(floats: Sequence[float]) -> tuple[int, ...]:
    """Returns floating-point numbers as whole ones, which a message can carry; see `floats_in`."""
    return struct.unpack(f"<{len(floats)}q", struct.pack(f"<{len(floats)}d", *floats))


def floats_in(numbers: Sequence[int]) -> tuple[float, ...]:
    """Returns the floating-point numbers that `numbers_of` was given, bit for bit."""
    return struct.unpack(f"<{len(numbers)}d", struct.pack(f"<{len(numbers)}q", *numbers))


def encode(message: Message) -> bytes:
    """Returns a message as bytes."""
    kind, first, flag, lease, weight, share, numbers, steps, number = message
    count = len(numbers)
    return _struct(count).pack(_VERSION, kind, first, count, flag, steps, lease, weight, share, number, *numbers)


def decode(data: bytes) -> Message:
    """Returns the message of some bytes; raises ValueError if they are not a message."""
    count, rest = divmod(len(data) - _HEAD.size, 8)
    if count < 0 or rest or count > _MOST:
        raise ValueError(f"a message of {len(data)} bytes is none of form {_VERSION}")
    version, kind, first, stated, flag, steps, lease, weight, share, number, *numbers = _struct(count).unpack(data)
    if version != _VERSION or stated != count:
        raise ValueError(f"no message of form {_VERSION}: {len(data)} bytes for {stated} numbers of form {version}")
    if not -1 <= lease <= _LAST_LEASE:
        raise ValueError(f"a message of lease {lease}; leases are counted from 0 to {_LAST_LEASE:,}")
    # NaN is in no range.
    if not (0 <= weight <= MOST_WEIGHT and 0 <= share <= _MOST_SHARE):
        raise ValueError(
            f"a message of weight {weight:g} and share {share:g}; at most {MOST_WEIGHT:g} and {_MOST_SHARE:g} are sent"
        )
    return Message(Kind(kind), first, flag, lease, weight, share, tuple(numbers), steps, number)


@functools.lru_cache(maxsize=256)
def _struct(count: int) -> struct.Struct:
    return struct.Struct(f"{_HEAD.format}{count}q")
