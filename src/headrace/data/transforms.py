"""Transforms: decoding images, parsing `tf.train.Example`, rows for strings; a check that they are deterministic."""

from __future__ import annotations

import copy
import functools
import hashlib
import math
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.data.loading.reader import ExampleReader
from headrace.data.pipeline.pipeline import InputPipeline
from headrace.data.pipeline.source import require_whole
from headrace.errors import DataError, UsageError
from headrace.machine.extras import import_package

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
                # Memory of this thread: new memory would cause page faults for every image.
                scratch: NDArray[np.uint8] | None = getattr(_own, "scratch", None)
                if scratch is None or len(scratch) < rows * columns * 3:
                    scratch = _own.scratch = np.empty(rows * columns * 3, dtype=np.uint8)
                options = {"fastdct": self._fast, "fastupsample": self._fast, "buffer": scratch}
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


def _libraries() -> tuple[Any, Any]:
    simplejpeg, cv2 = (import_package(name, "images need simplejpeg and OpenCV") for name in ("simplejpeg", "cv2"))
    return simplejpeg, cv2


_LISTS: Mapping[type, str] = {bytes: "bytes_list", str: "bytes_list", float: "float_list", int: "int64_list"}
_Shape = tuple[int, ...] | None


class ParseExample:
    """Turns the bytes of a `tf.train.Example` into a dict. A transform for `Pipeline.map`.

        hr.data.from_tfrecord("train-*").map(hr.data.ParseExample({"image": bytes, "label": int, "box": (float, (4,))}))

    Args:
        features: name to type, `bytes`, `str`, `int` (int64) or `float` (float32), for one value; or to
            `(type, shape)`; `(type, None)` for any number of values. Others are not read.

    Raises:
        UsageError: there is no such type.
        UnfitMachine: protobuf is not installed.

    Examples:
        >>> record = hr.data.from_tfrecord("train-*.tfrecord").source.example(1, hr.data.Epoch(0, 0))
        >>> hr.data.ParseExample({"label": int})(record)
        {'label': tensor(1)}
    """

    def __init__(self, features: Mapping[str, Any]) -> None:
        self._features: dict[str, tuple[type, _Shape]] = {}
        for name, wanted in features.items():
            kind, shape = wanted if isinstance(wanted, tuple) else (wanted, ())
            if kind not in _LISTS:
                raise UsageError(
                    f"the feature {name!r} must be bytes, str, int or float, or (int, shape), got {wanted!r}"
                )
            self._features[name] = (kind, shape if shape is None else tuple(shape))
        example_class()

    def __call__(self, record: bytes) -> dict[str, Any]:
        """Returns numbers as tensors, and bytes or str as values, or as lists if there is a shape."""
        message, damaged = example_class()
        try:
            features = message.FromString(record).features.feature
        except damaged as error:
            raise DataError(f"the {len(record):,} bytes are no tf.train.Example: {error}") from error
        if missing := [name for name in self._features if name not in features]:
            has = ", ".join(sorted(features)) or "none"
            raise DataError(f"the example has no feature {missing[0]!r}; it has {has}")
        return {
            name: _shaped(_values(features[name], name, kind), name, kind, shape)
            for name, (kind, shape) in self._features.items()
        }


@functools.cache
def example_class() -> tuple[Any, type[Exception]]:
    """Returns the class of `tf.train.Example`, with the fields of TensorFlow's feature.proto, and its error."""
    names = ("descriptor_pb2", "descriptor_pool", "message_factory", "message")
    pb2, pools, factory, errors = (
        import_package(f"google.protobuf.{name}", "tf.train.Example needs protobuf") for name in names
    )
    of = pb2.FieldDescriptorProto
    file = pb2.FileDescriptorProto(name="example.proto", package="tf", syntax="proto3")

    def add(message: Any, name: str, number: int, kind: int | str, repeated: bool = False, **more: int) -> None:
        typed = {"type": kind} if isinstance(kind, int) else {"type": of.TYPE_MESSAGE, "type_name": f".tf.{kind}"}
        label = of.LABEL_REPEATED if repeated else of.LABEL_OPTIONAL
        message.field.add(name=name, number=number, label=label, **typed, **more)

    feature = file.message_type.add(name="Feature")
    feature.oneof_decl.add(name="kind")
    kinds = {"BytesList": of.TYPE_BYTES, "FloatList": of.TYPE_FLOAT, "Int64List": of.TYPE_INT64}
    for number, ((name, kind), field) in enumerate(zip(kinds.items(), dict.fromkeys(_LISTS.values()), strict=True), 1):
        add(file.message_type.add(name=name), "value", 1, kind, repeated=True)
        add(feature, field, number, name, oneof_index=0)
    features = file.message_type.add(name="Features")
    entry = features.nested_type.add(name="FeatureEntry", options={"map_entry": True})
    add(entry, "key", 1, of.TYPE_STRING)
    add(entry, "value", 2, "Feature")
    add(features, "feature", 1, "Features.FeatureEntry", repeated=True)
    add(file.message_type.add(name="Example"), "features", 1, "Features")
    # A pool of its own, as TensorFlow's messages may be in the common one.
    pool = pools.DescriptorPool()
    pool.Add(file)
    return factory.GetMessageClass(pool.FindMessageTypeByName("tf.Example")), errors.DecodeError


def _values(feature: Any, name: str, kind: type) -> Any:
    """Returns all values of a feature: an array of numbers, or a list."""
    held = feature.WhichOneof("kind")
    # Fields that are none of TensorFlow's are skipped, but count.
    if held != _LISTS[kind] and feature.ByteSize():
        has = held.removesuffix("_list").replace("int64", "int") if held else "unknown"
        raise DataError(f"the feature {name!r} holds {has} values, not {kind.__name__}")
    values = getattr(feature, _LISTS[kind]).value
    if kind is bytes:
        return list(values)
    if kind is str:
        try:
            return [value.decode() for value in values]
        except UnicodeDecodeError as error:
            raise DataError(f"the feature {name!r} is not UTF-8 ({error}); read it as bytes") from error
    return np.array(values, dtype=np.int64 if kind is int else np.float32)


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


_DIGEST_BYTES = 8


def string_ids(strings: Any, rows: int) -> Tensor:
    """Returns an index from 1 to `rows - 1` for each string, by a 64-bit hash (BLAKE2b); 0 is left for padding.

    Two of n different strings share an index with a probability of about n * n / (2 * rows): of a million strings,
    with `rows=2**56`, of 1 in 140,000.

    Args:
        strings: a str or bytes, or an array or nested lists of them; text is hashed as UTF-8.
        rows: the `num_embeddings` of the layer, at least 2.

    Returns:
        int64, in the shape of `strings`; a scalar tensor for one string.

    Raises:
        DataError: something in it is no string.
        UsageError: there are too few rows.

    Examples:
        >>> ids = hr.data.string_ids(["cat", "dog", "cat"], rows=1000)
        >>> bool(ids[0] == ids[2]), bool(ids[0] == ids[1])
        (True, False)
    """
    if isinstance(rows, bool) or not isinstance(rows, int) or not 2 <= rows < 1 << 63:
        raise UsageError(f"rows must be a whole number from 2 to 2**63 - 1, got {rows!r}")
    # As objects, because numpy's own strings lose zeros at their end.
    array = np.array(strings, dtype=object)
    ids = np.fromiter((1 + _hash(string) % (rows - 1) for string in array.flat), dtype=np.int64, count=array.size)
    return torch.from_numpy(ids).view(array.shape)


def _hash(value: Any) -> int:
    if isinstance(value, str):
        value = value.encode("utf-8", "surrogatepass")
    elif not isinstance(value, bytes):
        raise DataError(
            f"string_ids is for str and bytes, in lists of equal length, and got {type(value).__name__} {value!r:.60}; "
            "convert it (str(value)), or pad the lists"
        )
    return int.from_bytes(hashlib.blake2b(value, digest_size=_DIGEST_BYTES).digest(), "little")


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
