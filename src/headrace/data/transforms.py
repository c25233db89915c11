"""Transforms for pipelines: decoding images, parsing `tf.train.Example`; a check that they are deterministic."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.data.loading.reader import ExampleReader
from headrace.data.pipeline.pipeline import InputPipeline
from headrace.data.pipeline.source import import_package, require_whole
from headrace.errors import DataError, UsageError

_JPEG = b"\xff\xd8\xff"
_PNG = b"\x89PNG\r\n\x1a\n"
_MOST_PIXELS = 1 << 28
"""Of a JPEG or PNG: 16,384 x 16,384. A few hundred bytes may say that they are an image of 13 GB."""
_own = threading.local()


class DecodeImage:
    """Decodes an image and resizes its middle, straight into the batch. A transform for `Pipeline.map`.

    The largest centered crop of the wanted aspect ratio is resized; shrinking averages the pixels. JPEG is decoded by
    simplejpeg, everything else by OpenCV; other threads run meanwhile.

    Args:
        fast: whether JPEG is decoded with the faster transform, which may differ by a few of 255 steps.

    Attributes:
        shape: of a result, `(height, width, 3)`, in the order red, green, blue.
        dtype: uint8.

    Raises:
        UsageError: a length is below 1.
        UnfitMachine: simplejpeg or OpenCV is not installed.

    Examples:
        >>> hr.data.DecodeImage(224, 224).shape
        (224, 224, 3)
    """

    def __init__(self, height: int, width: int, *, fast: bool = True) -> None:
        for name, value in (("height", height), ("width", width)):
            require_whole(f"{name} must be", value)
        self.shape = (height, width, 3)
        self.dtype = np.dtype(np.uint8)
        self._fast = fast
        _, cv2 = _libraries()
        # Its own threads would take the cores of the calling threads.
        cv2.setNumThreads(0)

    def __call__(self, content: Any) -> NDArray[np.uint8]:
        """Returns the image, `(height, width, 3)` uint8."""
        out = np.empty(self.shape, dtype=np.uint8)
        self.into(content, out)
        return out

    def into(self, content: Any, out: NDArray[Any]) -> None:
        """Writes the image to `out`, `(height, width, 3)` uint8."""
        image = self._decode(content)
        height, width, _ = self.shape
        rows, columns, _ = image.shape
        # The largest crop with the wanted aspect ratio.
        tall = min(rows, max(1, round(columns * height / width)))
        wide = min(columns, max(1, round(rows * width / height)))
        top, left = (rows - tall) // 2, (columns - wide) // 2
        piece = image[top : top + tall, left : left + wide]
        _, cv2 = _libraries()
        how = cv2.INTER_AREA if tall > 2 * height else cv2.INTER_LINEAR
        cv2.resize(piece, (width, height), dst=out, interpolation=how)

    def _decode(self, content: Any) -> NDArray[np.uint8]:
        simplejpeg, cv2 = _libraries()
        if bytes(content[:3]) == _JPEG:
            try:
                rows, columns, _, _ = simplejpeg.decode_jpeg_header(content)
                _check_pixels(rows, columns)
                options = {"fastdct": self._fast, "fastupsample": self._fast, "buffer": _scratch(rows * columns * 3)}
                image = simplejpeg.decode_jpeg(content, colorspace="RGB", **options)
            except ValueError as error:
                raise DataError(f"{len(content):,} bytes are not a whole JPEG: {error}") from error
        else:
            if bytes(content[:8]) == _PNG:
                _check_pixels(int.from_bytes(content[20:24], "big"), int.from_bytes(content[16:20], "big"))
            try:
                image = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR_RGB)
            except cv2.error as error:
                said = " ".join(str(error).split())
                raise DataError(f"{len(content):,} bytes are not an image that OpenCV reads: {said}") from error
        if image is None:
            raise DataError(f"{len(content):,} bytes are not an image that OpenCV can read")
        decoded: NDArray[np.uint8] = image
        return decoded


def _check_pixels(rows: int, columns: int) -> None:
    if rows * columns > _MOST_PIXELS:
        raise DataError(f"the image says that it has {rows} x {columns} pixels, more than {_MOST_PIXELS:,}")


def _scratch(nbytes: int) -> NDArray[np.uint8]:
    """Returns memory of this thread for one image: new memory would cause page faults for every image."""
    held: NDArray[np.uint8] | None = getattr(_own, "scratch", None)
    if held is None or len(held) < nbytes:
        held = _own.scratch = np.empty(nbytes, dtype=np.uint8)
    return held


def _libraries() -> tuple[Any, Any]:
    simplejpeg, cv2 = (import_package(name, "images need simplejpeg and OpenCV") for name in ("simplejpeg", "cv2"))
    return simplejpeg, cv2


_KINDS: Mapping[type, int] = {bytes: 1, str: 1, float: 2, int: 3}
_LISTS = {1: "bytes", 2: "float", 3: "int"}
_VARINT, _BYTES = 0, 2
_FIXED: Mapping[int, int] = {1: 8, 5: 4}
_LONGEST = 10
"""Bytes of a number of 64 bits, 7 in each."""
_Shape = tuple[int, ...] | None


class ParseExample:
    """Turns the bytes of a `tf.train.Example` into a dict. A transform for `Pipeline.map`.

        hr.data.from_tfrecord("train-*").map(hr.data.ParseExample({"image": bytes, "label": int, "box": (float, (4,))}))

    Args:
        features: name to type, `bytes`, `str`, `int` (int64) or `float` (float32), for one value; or to
            `(type, shape)`; `(type, None)` for any number of values. Others are not read.

    Raises:
        UsageError: there is no such type.

    Examples:
        >>> record = hr.data.from_tfrecord("train-*.tfrecord").source.example(1, hr.data.Epoch(0, 0))
        >>> hr.data.ParseExample({"label": int})(record)
        {'label': tensor(1)}
    """

    def __init__(self, features: Mapping[str, Any]) -> None:
        self._features: dict[bytes, tuple[str, type, _Shape]] = {}
        for name, wanted in features.items():
            kind, shape = wanted if isinstance(wanted, tuple) else (wanted, ())
            if kind not in _KINDS:
                raise UsageError(
                    f"the feature {name!r} must be bytes, str, int or float, or (int, shape), got {wanted!r}"
                )
            self._features[name.encode()] = (name, kind, shape if shape is None else tuple(shape))

    def __call__(self, record: bytes) -> dict[str, Any]:
        """Returns numbers as tensors, and bytes or str as values, or as lists if there is a shape."""
        found: dict[bytes, memoryview] = {}
        for features in _inner(memoryview(record), 1):
            for entry in _inner(features, 1):
                key = next(_inner(entry, 1), memoryview(b""))
                found[bytes(key)] = next(_inner(entry, 2), memoryview(b""))
        missing = [name for encoded, (name, _, _) in self._features.items() if encoded not in found]
        if missing:
            has = ", ".join(sorted(name.decode(errors="replace") for name in found)) or "none"
            raise DataError(f"the example has no feature {missing[0]!r}; it has {has}")
        return {
            name: _shaped(_values(found[encoded], name, kind), name, kind, shape)
            for encoded, (name, kind, shape) in self._features.items()
        }


def _values(feature: memoryview, name: str, kind: type) -> Any:
    """Returns all values of a feature: an array of numbers, or a list."""
    for number, _, _ in _fields(feature):
        if number != _KINDS[kind]:
            raise DataError(f"the feature {name!r} holds {_LISTS.get(number, 'unknown')} values, not {kind.__name__}")
    pieces = [piece for one in _inner(feature, _KINDS[kind]) for number, wire, piece in _fields(one) if number == 1]
    if kind is bytes:
        return [bytes(piece) for piece in pieces]
    if kind is str:
        try:
            return [str(piece, "utf-8") for piece in pieces]
        except UnicodeDecodeError as error:
            raise DataError(f"the feature {name!r} is not UTF-8 ({error}); read it as bytes") from error
    # Numbers are packed or single; the bytes of both are the same.
    together = b"".join(pieces)
    if kind is int:
        return _varints(together, name)
    if len(together) % 4:
        raise DataError(f"the feature {name!r} holds {len(together)} bytes of float, which is no multiple of 4")
    return np.frombuffer(together, dtype="<f4").astype(np.float32)


def _shaped(values: Any, name: str, kind: type, shape: _Shape) -> Any:
    wanted = len(values) if shape is None else math.prod(shape)
    if len(values) != wanted:
        raise DataError(
            f"the feature {name!r} has {len(values)} values, and {wanted} are asked for; say how many there are, "
            f"({kind.__name__}, (n,)), or None for any number, ({kind.__name__}, None)"
        )
    if kind in (bytes, str):
        return values[0] if shape == () else values
    return torch.from_numpy(values).reshape(-1 if shape is None else shape)


def _varints(content: bytes, name: str) -> NDArray[np.int64]:
    raw = np.frombuffer(content, dtype=np.uint8)
    last = np.flatnonzero(raw < 128)
    begins = np.concatenate([np.zeros(1, np.int64), last[:-1] + 1])[: len(last)]
    lengths = last - begins + 1
    if lengths.sum() != len(raw) or np.any(lengths > _LONGEST):
        raise DataError(f"the feature {name!r} holds {len(raw)} bytes that are no whole numbers of protobuf")
    if not len(raw):
        return np.empty(0, dtype=np.int64)
    shifts = 7 * (np.arange(len(raw)) - np.repeat(begins, lengths))
    bits = (raw & np.uint8(127)).astype(np.uint64) << shifts.astype(np.uint64)
    return np.bitwise_or.reduceat(bits, begins).view(np.int64)


def _inner(message: memoryview, number: int) -> Iterator[memoryview]:
    """Yields the fields of a message with one number, messages or bytes themselves."""
    for found, wire, content in _fields(message):
        if found == number:
            if wire != _BYTES:
                raise DataError(f"it is no tf.train.Example: its field {number} has the wire type {wire}, not {_BYTES}")
            yield content


def _fields(message: memoryview) -> Iterator[tuple[int, int, memoryview]]:
    """Yields number, wire type and content of every field."""
    place, end = 0, len(message)
    while place < end:
        tag, place = _varint(message, place)
        wire, begin = tag & 7, place
        if wire == _VARINT:
            _, place = _varint(message, place)
        elif wire == _BYTES:
            length, begin = _varint(message, place)
            place = begin + length
        elif wire in _FIXED:
            place += _FIXED[wire]
        else:
            raise DataError(f"it is no tf.train.Example: a field has the wire type {wire}, which there is not")
        if place > end:
            raise DataError(f"it is no tf.train.Example: a field ends at byte {place:,} of {end:,}")
        yield tag >> 3, wire, message[begin:place]


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    """Returns a number, and where it ends."""
    value = 0
    for at, byte in enumerate(message[place : place + _LONGEST]):
        value |= (byte & 127) << (7 * at)
        if byte < 128:
            return value, place + at + 1
    raise DataError(f"it is no tf.train.Example: the number at byte {place:,} of {len(message):,} has no end")


def check_deterministic(pipeline: InputPipeline, seed: int, examples: int = 64) -> int:
    """Checks that examples depend on (seed, epoch, index) alone: reads some twice, and returns how many.

    They are evenly spread over the data, and compared after every stage; objects whose type has no equality are taken
    for equal. A DataError names the example that differs, or that a transform changes in place, and the stage.
    """
    reader = ExampleReader(pipeline, seed)
    places = range(0, len(pipeline), max(1, len(pipeline) // examples))[:examples]
    for place in places:
        before = _source(reader, place)
        if not _same(before, _source(reader, place)):
            raise _differs(reader, place, reader.stages[0])
        first = []
        for stage, value in reader.trace(0, place):
            first.append(copy.deepcopy(value))
            if not _same(before, _source(reader, place)):
                raise DataError(
                    f"{stage} changes {reader.key(place)} in place, so that the next epoch begins with what this one "
                    "has made of it; let it return something new, or copy first"
                )
        second = [value for _, value in reader.trace(0, place)]
        for number, (one, other) in enumerate(zip(first, second, strict=False)):
            if not _same(one, other):
                raise _differs(reader, place, reader.stages[number])
        if len(first) != len(second):
            raise _differs(reader, place, reader.stages[min(len(first), len(second))])
    return len(places)


def _source(reader: ExampleReader, place: int) -> Any:
    """Returns a copy of an example as the source has it."""
    return copy.deepcopy(next(reader.trace(0, place), None))


def _differs(reader: ExampleReader, place: int, stage: str) -> DataError:
    return DataError(
        f"{stage} is not deterministic: for {reader.key(place)} it gave two results for one seed, epoch and index; "
        "let it draw random numbers from its parameter rng alone, and depend on nothing that changes between two calls"
    )


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor | np.ndarray):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        # NaN is not equal to itself.
        return bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_same, one, other))
    equality: object = type(one).__eq__
    if equality is object.__eq__:
        return True
    return bool(one == other or (one != one and other != other))
